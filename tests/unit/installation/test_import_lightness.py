"""A notebook or a labeller's laptop needs neither torch, ray, vLLM nor transformers, and does not wait for them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from rftcore.algorithms import ADVANTAGES, AGGREGATIONS, CORRECTIONS, KL_ESTIMATORS, LOSSES, MASKS
from tests.support.waiting import PATIENCE_S

HEAVY = ("torch", "ray", "vllm", "transformers")

# Prints the heavy modules that are loaded after each statement. Those of earlier statements stay loaded: the first that loads one is the culprit.
PROBE = """
import json, sys
statements, heavy = map(json.loads, sys.argv[1:])
for statement in statements:
    try:
        exec(statement, {})
    except SystemExit as exit:
        assert not exit.code, f"exit code {exit.code}"
    print("\\nloaded:", json.dumps(sorted(set(heavy) & sys.modules.keys())))
"""


def heavy_modules_after(*statements: str) -> list[list[str]]:
    """Return the heavy modules after each of these statements, in a separate process."""
    command = [sys.executable, "-c", PROBE, json.dumps(statements), json.dumps(HEAVY)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return [json.loads(line.removeprefix("loaded: ")) for line in lines if line.startswith("loaded: ")]


# A role that computes nothing is there as soon as it can be: in a run of seconds, torch would be most of what it does.
ROLES = ["rftcore.launch.preparation", "rftcore.pipeline.role", "rftcore.explorer.role"]
_KINDS = (ADVANTAGES, AGGREGATIONS, CORRECTIONS, KL_ESTIMATORS, LOSSES, MASKS)
_PARTS = {target.partition(":")[0] for parts in _KINDS for target in parts.builtins.values()}
ALGORITHMS = ", ".join(["rftcore.algorithms.algorithm", *sorted(_PARTS)])
MODULES = [
    "rftdata",
    "rftcore.cli",
    "rftcore.config.run",
    "operators",
    "rftcore.checks.devices",
    "rftcore.studio.server",
    *ROLES,
    ALGORITHMS,
]
COMMANDS = ["", "run", "sql", "status", "label", "pairs", "query", "report", "export", "purge", "studio"]


@pytest.fixture(scope="module")
def loaded_by_import() -> dict[str, list[str]]:
    return dict(zip(MODULES, heavy_modules_after(*(f"import {module}" for module in MODULES)), strict=True))


@pytest.fixture(scope="module")
def loaded_by_help() -> dict[str, list[str]]:
    shows = "import sys; sys.argv = {!r}; from rftcore.cli import main; main()"
    statements = [shows.format(["rft", *command.split(), "--help"]) for command in COMMANDS]
    return dict(zip(COMMANDS, heavy_modules_after(*statements), strict=True))


@pytest.mark.parametrize("module", MODULES, ids=lambda modules: modules.partition(",")[0])
def test_importing_it_loads_no_training_stack(module: str, loaded_by_import: dict[str, list[str]]) -> None:
    assert loaded_by_import[module] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_showing_its_help_loads_no_training_stack(command: str, loaded_by_help: dict[str, list[str]]) -> None:
    assert loaded_by_help[command] == []


def test_the_probe_would_notice() -> None:
    quiet, loud = heavy_modules_after("import json", "import transformers")
    assert quiet == [] and "transformers" in loud
