"""Seconds that the long test files take, for their order (`pytest_collection_modifyitems`). A file that is missing counts as short.

Measured by `make test PYTEST_ARGS=--durations=0`, rounded; only their order matters.
"""

from __future__ import annotations

from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]
# The files that the processes begin with. Only one of them needs the session's warm-up and one its wheel, so that no process waits for another.
_FIRST = ("acceptance/test_full_disk.py", "acceptance/test_first_hour.py", "acceptance/test_signals.py")
_SECONDS = {
    "acceptance/test_train_from_store.py": 394,
    "acceptance/test_full_disk.py": 342,
    "acceptance/test_judge_server.py": 336,
    "acceptance/test_wheel.py": 252,
    "acceptance/test_first_hour.py": 222,
    "crash/test_failpoints.py": 213,
    "acceptance/test_interrupt_and_resume.py": 195,
    "acceptance/test_signals.py": 182,
    "acceptance/test_blocked_roles.py": 164,
    "crash/test_ray_storm.py": 163,
    "acceptance/test_distillation.py": 162,
    "store/test_idle_stop.py": 105,
    "acceptance/test_going_back.py": 103,
    "acceptance/test_main_job.py": 101,
    "acceptance/test_explorers_come_and_go.py": 101,
    "acceptance/test_wrong_engine.py": 97,
    "acceptance/test_example_pipelines.py": 92,
    "acceptance/test_bad_input.py": 87,
    "acceptance/test_inputs_of_algorithms.py": 79,
    "acceptance/test_reward_model_run.py": 79,
    "acceptance/test_server_url.py": 78,
    "acceptance/test_stages.py": 74,
    "acceptance/test_several_ranks.py": 73,
    "acceptance/test_chains_that_drop.py": 70,
    "acceptance/test_roles_by_hand.py": 69,
    "acceptance/test_example_dpo_from_stored.py": 69,
    "unit/test_trainer_benchmark.py": 56,
    "acceptance/test_vllm_adapters.py": 56,
    "unit/trainer/test_ranks.py": 55,
    "store/test_sampling.py": 55,
    "store/test_exchange.py": 55,
    "crash/test_storm.py": 53,
    "acceptance/test_supervisor.py": 50,
    "store/test_outage.py": 49,
    "store/test_backup.py": 38,
    "acceptance/test_replay_workers.py": 37,
    "store/test_rewind.py": 37,
    "unit/test_models.py": 37,
    "acceptance/test_sampling_policies.py": 37,
    "store/test_soak.py": 36,
    "store/test_selection.py": 35,
    "store/test_explorer.py": 35,
    "store/test_worker.py": 34,
    "store/test_task_pipeline.py": 33,
    "store/test_server.py": 33,
    "unit/test_rewards.py": 33,
    "store/test_cli_sql.py": 33,
    "acceptance/test_hanging_engine.py": 33,
    "store/test_compaction.py": 31,
    "acceptance/test_turns.py": 31,
    "store/test_draws.py": 30,
    "acceptance/test_example_gsm8k.py": 29,
    "acceptance/test_engines_under_load.py": 29,
    "acceptance/test_placement_by_ray.py": 28,
    "store/test_selecting.py": 28,
    "store/test_benchmarks.py": 28,
    "unit/test_operators_data_juicer.py": 27,
    "store/test_labels.py": 26,
    "unit/trainer/test_sharding.py": 26,
    "store/test_archive.py": 25,
    "store/test_roles.py": 24,
    "unit/test_selection_benchmark.py": 24,
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
