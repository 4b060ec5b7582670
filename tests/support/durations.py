"""Seconds that the long test files take, for their order (`pytest_collection_modifyitems`). A file that is missing counts as short.

Measured by `make test PYTEST_ARGS=--durations=0`, rounded; only their order matters.
"""

from __future__ import annotations

from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]
# The files that the processes begin with. Only one of them needs the session's warm-up and one its wheel, so that no process waits for another.
_FIRST = ("acceptance/test_full_disk.py", "acceptance/test_first_hour.py", "acceptance/test_signals.py")
_SECONDS = {
    "acceptance/test_first_hour.py": 265,
    "acceptance/test_wheel.py": 246,
    "acceptance/test_train_from_store.py": 243,
    "acceptance/test_full_disk.py": 228,
    "acceptance/test_signals.py": 182,
    "acceptance/test_interrupt_and_resume.py": 180,
    "acceptance/test_judge_server.py": 150,
    "acceptance/test_blocked_roles.py": 148,
    "acceptance/test_distillation.py": 147,
    "acceptance/test_main_job.py": 138,
    "acceptance/test_roles_by_hand.py": 107,
    "acceptance/test_inputs_of_algorithms.py": 105,
    "store/test_idle_stop.py": 105,
    "acceptance/test_example_pipelines.py": 104,
    "acceptance/test_bad_input.py": 100,
    "acceptance/test_server_url.py": 78,
    "crash/test_ray_storm.py": 70,
    "acceptance/test_explorers_come_and_go.py": 67,
    "acceptance/test_going_back.py": 67,
    "acceptance/test_reward_model_run.py": 65,
    "crash/test_failpoints.py": 60,
    "acceptance/test_example_dpo_from_stored.py": 56,
    "unit/trainer/test_ranks.py": 55,
    "store/test_sampling.py": 55,
    "store/test_exchange.py": 55,
    "acceptance/test_chains_that_drop.py": 54,
    "acceptance/test_several_ranks.py": 51,
    "acceptance/test_supervisor.py": 50,
    "store/test_outage.py": 49,
    "crash/test_storm.py": 47,
    "acceptance/test_stages.py": 46,
    "store/test_backup.py": 38,
    "unit/test_trainer_benchmark.py": 38,
    "acceptance/test_replay_workers.py": 37,
    "store/test_rewind.py": 37,
    "unit/test_models.py": 37,
    "store/test_soak.py": 36,
    "store/test_selection.py": 35,
    "store/test_explorer.py": 35,
    "store/test_worker.py": 34,
    "store/test_task_pipeline.py": 33,
    "store/test_server.py": 33,
    "unit/test_rewards.py": 33,
    "store/test_cli_sql.py": 33,
    "store/test_compaction.py": 31,
    "store/test_draws.py": 30,
    "acceptance/test_example_gsm8k.py": 29,
    "acceptance/test_engines_under_load.py": 29,
    "acceptance/test_placement_by_ray.py": 28,
    "store/test_selecting.py": 28,
    "store/test_benchmarks.py": 28,
    "unit/test_operators_data_juicer.py": 27,
    "store/test_labels.py": 26,
    "store/test_roles.py": 24,
    "unit/test_selection_benchmark.py": 24,
    "acceptance/test_sampling_policies.py": 23,
    "acceptance/test_vllm_engine.py": 23,
    "store/test_opening.py": 23,
    "store/test_blocked_pipeline.py": 22,
    "store/test_tasks.py": 21,
    "store/test_readers.py": 20,
    "store/test_plans.py": 20,
}


def rank(path: Path) -> tuple[bool, int]:
    """Sort key of a test file: the files to begin with, then by the seconds of their tests, longest first."""
    name = path.relative_to(_TESTS).as_posix()
    return name not in _FIRST, -_SECONDS.get(name, 0)
