"""Seconds that the long test files take, for their order (`pytest_collection_modifyitems`). A file that is missing counts as short.

Measured by `make test` and `make test-long` with PYTEST_ARGS=--durations=0, on machines of different speed and some only estimated from that: only
their order matters.
"""

from __future__ import annotations

from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]
# The files that the processes begin with, of either suite. Only one of them needs the session's warm-up and one its wheel, so that no process waits
# for another.
_FIRST = (
    "acceptance/test_full_disk.py",
    "acceptance/test_first_hour.py",
    "crash/test_failpoints.py",
    "acceptance/test_interrupt_and_resume.py",
    "acceptance/test_judge_server.py",
    "acceptance/test_signals.py",
)
_SECONDS = {
    "crash/test_failpoints.py": 516,
    "acceptance/test_wheel.py": 424,
    "acceptance/test_first_hour.py": 354,
    "acceptance/test_example_human_in_the_loop.py": 200,
    "crash/test_ray_storm.py": 173,
    "acceptance/test_judge_server.py": 145,
    "acceptance/test_full_disk.py": 119,
    "store/maintenance/test_archive.py": 106,
    "acceptance/test_server_url.py": 102,
    "store/studio/test_studio_accessibility.py": 100,
    "unit/sandbox/test_attacks.py": 60,
    "store/studio/test_studio_config.py": 60,
    "unit/benchmarks/test_trainer_benchmark.py": 102,
    "acceptance/test_vllm_adapters.py": 90,
    "acceptance/test_train_from_store.py": 82,
    "acceptance/test_interrupt_and_resume.py": 79,
    "acceptance/test_main_job.py": 75,
    "crash/test_storm.py": 72,
    "store/postgres/test_session_processes.py": 70,
    "acceptance/test_explorers_come_and_go.py": 63,
    "acceptance/test_example_dpo_from_stored.py": 63,
    "acceptance/test_supervisor.py": 58,
    "store/exchange/test_exchange.py": 53,
    "store/postgres/test_idle_stop.py": 50,
    "acceptance/test_vllm_engine.py": 50,
    "unit/trainer/test_ranks.py": 47,
    "acceptance/test_lost_answers.py": 30,
    "acceptance/test_roles_by_hand.py": 47,
    "unit/installation/test_installer.py": 47,
    "acceptance/test_example_pipelines.py": 44,
    "unit/benchmarks/test_selection_benchmark.py": 44,
    "acceptance/test_replay_workers.py": 42,
    "store/benchmarks/test_soak.py": 41,
    "acceptance/test_bad_input.py": 41,
    "unit/test_types.py": 40,
    "store/query/test_query.py": 37,
    "store/postgres/test_plans.py": 36,
    "unit/test_model_folder.py": 34,
    "unit/benchmarks/test_weights_benchmark.py": 34,
    "acceptance/test_blocked_roles.py": 33,
    "acceptance/test_placement_by_ray.py": 33,
    "store/benchmarks/test_benchmarks.py": 32,
    "unit/operators/test_operators_data_juicer.py": 31,
    "acceptance/test_signals.py": 30,
    "store/planning/test_selecting.py": 29,
    "unit/benchmarks/test_benchmark_data_juicer.py": 28,
    "unit/trainer/test_host_waits.py": 28,
    "unit/algorithms/test_invariance.py": 26,
    "unit/operators/test_operators_sql.py": 26,
    "acceptance/test_distillation.py": 26,
    "acceptance/test_example_gsm8k.py": 24,
    "store/attempts/test_sampling.py": 24,
    "acceptance/test_engines_under_load.py": 24,
    "store/postgres/test_outage.py": 22,
    "acceptance/test_several_ranks.py": 21,
    "store/launch/test_rehearsal.py": 21,
    "store/tasks/test_blocked_tasks.py": 20,
    "acceptance/test_reward_model_run.py": 19,
    "store/query/test_cli_sql.py": 19,
    "store/sync/test_live_weights.py": 18,
    "acceptance/test_hanging_engine.py": 18,
    "unit/trainer/test_sharding.py": 18,
    "store/segments/test_readers.py": 18,
    "store/postgres/test_server.py": 18,
    "store/explorer/test_explorer.py": 17,
    "store/attempts/test_protocol.py": 17,
    "store/pipeline/test_blocked_pipeline.py": 17,
    "store/attempts/test_rewind.py": 17,
    "unit/workflows/test_rewards.py": 17,
    "store/writing/test_every_lost_answer.py": 16,
    "unit/operators/test_stage.py": 16,
    "acceptance/test_chains_that_drop.py": 16,
    "store/maintenance/test_backup.py": 16,
    "acceptance/test_inputs_of_algorithms.py": 15,
    "store/launch/test_worker.py": 15,
    "acceptance/test_wrong_engine.py": 14,
    "store/segments/test_compaction.py": 14,
}


def rank(path: Path) -> tuple[bool, int]:
    """Sort key of a test file: the files to begin with, then by the seconds of their tests, longest first."""
    name = path.relative_to(_TESTS).as_posix()
    return name not in _FIRST, -_SECONDS.get(name, 0)
