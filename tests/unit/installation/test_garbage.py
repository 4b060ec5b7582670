"""Large imports run without garbage collection."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.command_line import CHECKOUT

IMPORTS = """
import gc
from rftcore.garbage import large_imports
passes = []
gc.callbacks.append(lambda phase, info: passes.append(phase))
gc.set_threshold(100)
try:
    with large_imports():
        passes.clear()
        kept = [[] for _ in range(10_000)]
        searched = list(passes)
        raise ImportError
except ImportError:
    pass
found = {id(each) for each in gc.get_objects()}
print(searched, gc.isenabled(), any(id(each) in found for each in kept))
"""

REWARD = """
log = open("rewards.log", "w")

def reward(turn, task):
    print(task, file=log)
    return 1.0
"""

LOGS = """
from rftcore.garbage import large_imports
with large_imports():
    from pathlib import Path
    from rftcore.rewards import load_rewards
load_rewards(["./reward.py:reward"], Path.cwd())["./reward.py:reward"](None, "7 > 5")
"""


def printed(program: str, folder: Path) -> str:
    command = [sys.executable, "-c", program]
    environment = {"PYTHONPATH": str(CHECKOUT)}
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder, env=environment).stdout


def test_modules_are_not_searched_while_they_are_imported_nor_afterwards_and_an_error_ends_the_pause(
    tmp_path: Path,
) -> None:
    assert printed(IMPORTS, tmp_path) == "[] True False\n"


def test_a_file_that_a_user_s_module_leaves_open_is_written_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    printed(LOGS, tmp_path)
    assert (tmp_path / "rewards.log").read_text() == "7 > 5\n"
