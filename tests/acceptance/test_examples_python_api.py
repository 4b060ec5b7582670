"""examples/python_api runs as its README says, without torch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from rftdata.postgres.embedded import EmbeddedServer
from tests.support.waiting import PATIENCE_S

EXAMPLE = Path(__file__).parents[2] / "examples" / "python_api"


def test_the_walk_through_prints_what_its_readme_states(server_folders: Path) -> None:
    script = (
        "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__');"
        "assert not {'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", script, str(EXAMPLE / "walk_through.py"), str(server_folders / "walk")]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    finally:
        EmbeddedServer(server_folders / "walk").stop()
    assert result.returncode == 0, result.stderr
    (promised,) = re.findall(r"It prints\n\n```\n(.*?)```", (EXAMPLE / "README.md").read_text(), flags=re.DOTALL)
    assert result.stdout.startswith(promised)
    assert (
        "'response': 'Tokyo', 'reward_sampled': 0.0, 'reward': 1.0, 'state': 'drawn', 'trainer_steps': [2]"
        in result.stdout
    )
