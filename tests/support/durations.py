"""Seconds that the long test files take, for their order (`pytest_collection_modifyitems`). A file that is missing counts as short.

Measured by `make test PYTEST_ARGS=--durations=0`, rounded; only their order matters.
"""

from __future__ import annotations

from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]
# The files that the processes begin with. Only one of them needs the session's warm-up and one its wheel, so that no process waits for another.
_FIRST = ("acceptance/test_full_disk.py", "acceptance/test_first_hour.py", "acceptance/test_signals.py")
_SECONDS = {
    "acceptance/test_train_from_store.py": 506,
    "acceptance/test_interrupt_and_resume.py": 457,
    "acceptance/test_first_hour.py": 456,
    "acceptance/test_bad_input.py": 416,
    "acceptance/test_wheel.py": 412,
    "acceptance/test_full_disk.py": 379,
    "acceptance/test_signals.py": 308,
    "acceptance/test_judge_server.py": 241,
    "acceptance/test_blocked_roles.py": 201,
    "acceptance/test_distillation.py": 187,
    "acceptance/test_main_job.py": 184,
    "acceptance/test_inputs_of_algorithms.py": 166,
    "acceptance/test_example_pipelines.py": 164,
    "acceptance/test_server_url.py": 154,
    "acceptance/test_roles_by_hand.py": 154,
    "acceptance/test_going_back.py": 142,
    "crash/test_failpoints.py": 127,
    "acceptance/test_reward_model_run.py": 121,
    "acceptance/test_stages.py": 118,
    "store/test_idle_stop.py": 111,
    "acceptance/test_several_ranks.py": 90,
    "acceptance/test_supervisor.py": 81,
    "store/test_plans.py": 79,
    "acceptance/test_example_dpo_from_stored.py": 79,
    "acceptance/test_example_gsm8k.py": 75,
    "acceptance/test_chains_that_drop.py": 65,
    "store/test_exchange.py": 63,
    "store/test_outage.py": 61,
    "store/test_benchmarks.py": 60,
    "store/test_cli_sql.py": 53,
    "store/test_selecting.py": 53,
    "store/test_opening.py": 49,
    "unit/test_selection_benchmark.py": 47,
    "unit/test_models.py": 46,
    "store/test_explorer.py": 45,
    "store/test_pipeline_verbs.py": 45,
    "unit/test_rewards.py": 44,
    "store/test_selection.py": 44,
    "store/test_rewind.py": 44,
    "store/test_server.py": 40,
    "unit/trainer/test_ranks.py": 40,
    "store/test_sampling.py": 39,
    "crash/test_storm.py": 38,
    "acceptance/test_engines_under_load.py": 37,
    "store/test_task_pipeline.py": 37,
    "unit/test_operators_data_juicer.py": 36,
    "store/test_backup.py": 33,
    "store/test_power_loss.py": 33,
    "store/test_soak.py": 32,
    "store/test_compaction.py": 32,
    "unit/test_import_lightness.py": 30,
    "acceptance/test_sampling_policies.py": 30,
    "store/test_tasks.py": 29,
    "store/test_labels.py": 28,
    "store/test_rehearsal.py": 28,
    "unit/test_stage.py": 28,
    "acceptance/test_vllm_engine.py": 27,
    "store/test_shares.py": 27,
    "store/test_worker.py": 27,
    "unit/test_operators_sql.py": 25,
    "store/test_roles.py": 25,
    "store/test_readers.py": 25,
    "store/test_blocked_tasks.py": 25,
    "store/test_group_prompts.py": 24,
    "store/test_draws.py": 24,
    "store/test_blocked_pipeline.py": 23,
    "unit/algorithms/test_invariance.py": 23,
    "store/test_one_copy.py": 22,
    "store/test_task_sources.py": 22,
    "store/test_planning.py": 21,
    "store/test_schema.py": 21,
    "store/test_purge.py": 21,
    "unit/test_rollouts.py": 20,
}


def rank(path: Path) -> tuple[bool, int]:
    """Sort key of a test file: the files to begin with, then by the seconds of their tests, longest first."""
    name = path.relative_to(_TESTS).as_posix()
    return name not in _FIRST, -_SECONDS.get(name, 0)
