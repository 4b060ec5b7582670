"""A notebook or a labeller's laptop needs neither torch, ray, vLLM nor transformers, and does not wait for them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rftcore.algorithms import ADVANTAGES, LOSSES, MASKS
from tests.support.waiting import PATIENCE_S

HEAVY = ("torch", "ray", "vllm", "transformers")

# Runs in a process of its own, prints the heavy modules that are loaded when the statement is done.
PROBE = """
import sys
try:
    {statement}
except SystemExit as exit:
    assert not exit.code, f"exit code {{exit.code}}"
print("loaded:", *sorted({heavy!r} & sys.modules.keys()))
"""


def heavy_modules_after(statement: str) -> list[str]:
    program = PROBE.format(statement=statement, heavy=set(HEAVY))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.rpartition("loaded:")[2].split()


# A role that computes nothing is there as soon as it can be: in a run of seconds, torch would be most of what it does.
ROLES = ["rftcore.run.prepare", "rftcore.pipeline.role", "rftcore.explorer.role"]
_PARTS = {target.partition(":")[0] for parts in (ADVANTAGES, LOSSES, MASKS) for target in parts.builtins.values()}
# In one process: there are many, and what one of them loads is named.
ALGORITHMS = ", ".join(["rftcore.algorithms.algorithm", *sorted(_PARTS)])


@pytest.mark.parametrize(
    "module",
    ["rftdata", "rftcore.cli", "rftcore.config", "operators", "rftcore.trainer.device_checks", *ROLES, ALGORITHMS],
    ids=lambda modules: modules.partition(",")[0],
)
def test_importing_it_loads_no_training_stack(module: str) -> None:
    assert heavy_modules_after(f"import {module}") == []


@pytest.mark.parametrize(
    "command",
    [[], ["run"], ["sql"], ["status"], ["label"], ["pairs"], ["query"], ["report"], ["export"], ["purge"]],
)
def test_showing_its_help_loads_no_training_stack(command: list[str]) -> None:
    arguments = ["rft", *command, "--help"]
    assert heavy_modules_after(f"sys.argv = {arguments!r}; from rftcore.cli import main; main()") == []


def test_the_probe_would_notice() -> None:
    assert "transformers" in heavy_modules_after("import transformers")
