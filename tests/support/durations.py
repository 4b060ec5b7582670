"""Seconds that the long test files take, for their order (`pytest_collection_modifyitems`). A file that is missing counts as short.

Measured by `make test PYTEST_ARGS=--durations=0`, rounded; only their order matters.
"""

from __future__ import annotations

from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]
# The files that the processes begin with. Only one of them needs the session's warm-up and one its wheel, so that no process waits for another.
_FIRST = ("acceptance/test_full_disk.py", "acceptance/test_first_hour.py", "acceptance/test_signals.py")
_SECONDS = {
    "acceptance/test_full_disk.py": 572,
    "acceptance/test_distillation.py": 300,
    "acceptance/test_inputs_of_algorithms.py": 200,
    "acceptance/test_reward_model_run.py": 200,
    "acceptance/test_first_hour.py": 450,
    "acceptance/test_interrupt_and_resume.py": 432,
    "acceptance/test_wheel.py": 409,
    "acceptance/test_signals.py": 356,
    "acceptance/test_main_job.py": 334,
    "acceptance/test_bad_input.py": 288,
    "acceptance/test_train_from_store.py": 243,
    "acceptance/test_blocked_roles.py": 224,
    "acceptance/test_judge_server.py": 210,
    "acceptance/test_example_pipelines.py": 171,
    "acceptance/test_roles_by_hand.py": 157,
    "crash/test_failpoints.py": 150,
    "acceptance/test_going_back.py": 142,
    "acceptance/test_server_url.py": 126,
    "acceptance/test_supervisor.py": 102,
    "acceptance/test_chains_that_drop.py": 101,
    "acceptance/test_example_dpo_from_stored.py": 99,
    "store/test_outage.py": 83,
    "store/test_idle_stop.py": 77,
    "store/test_benchmarks.py": 60,
    "store/test_plans.py": 50,
    "acceptance/test_sampling_policies.py": 50,
    "crash/test_storm.py": 48,
    "acceptance/test_engines_under_load.py": 48,
    "unit/test_selection_benchmark.py": 45,
    "unit/test_operators_data_juicer.py": 45,
    "unit/test_models.py": 43,
    "store/test_soak.py": 35,
    "store/test_server.py": 34,
    "store/test_blocked_pipeline.py": 29,
    "store/test_worker.py": 24,
    "store/test_blocked_tasks.py": 24,
    "unit/test_installer.py": 21,
}


def rank(path: Path) -> tuple[bool, int]:
    """Sort key of a test file: the files to begin with, then by the seconds of their tests, longest first."""
    name = path.relative_to(_TESTS).as_posix()
    return name not in _FIRST, -_SECONDS.get(name, 0)
