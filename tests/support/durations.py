"""Seconds that the long test files take, for their order (`pytest_collection_modifyitems`). A file that is missing counts as short.

Measured by `make test PYTEST_ARGS=--durations=0`, rounded; only their order matters.
"""

from __future__ import annotations

from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]
_SECONDS = {
    "acceptance/test_main_job.py": 260,
    "acceptance/test_wheel.py": 240,
    "acceptance/test_signals.py": 180,
    "acceptance/test_full_disk.py": 180,
    "acceptance/test_first_hour.py": 170,
    "acceptance/test_judge_server.py": 150,
    "acceptance/test_interrupt_and_resume.py": 150,
    "acceptance/test_blocked_roles.py": 120,
    "acceptance/test_example_pipelines.py": 110,
    "acceptance/test_roles_by_hand.py": 110,
    "acceptance/test_example_dpo_from_stored.py": 90,
    "acceptance/test_train_from_store.py": 90,
    "acceptance/test_server_url.py": 90,
    "acceptance/test_bad_input.py": 90,
    "acceptance/test_going_back.py": 60,
    "acceptance/test_chains_that_drop.py": 55,
    "acceptance/test_supervisor.py": 55,
    "acceptance/test_vllm_engine.py": 45,
    "acceptance/test_engines_under_load.py": 45,
    "acceptance/test_sampling_policies.py": 30,
    "acceptance/test_example_notebook.py": 20,
}


def of_file(path: Path) -> int:
    """Seconds of a test file's tests."""
    return _SECONDS.get(path.relative_to(_TESTS).as_posix(), 0)
