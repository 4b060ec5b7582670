"""The main job as a user runs it: `rft run` under Ray, vLLM on the CPU, weights into the live engine, the reward rises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command_line import EXAMPLE, Rft, report, rows
from tests.support.warm_up import Warm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

REWARD = '''
def score(turn, task):
    """Right and ended; a few questions upset it on purpose."""
    if task.answer.startswith("00"):
        raise ValueError("this verifier does not like zeros")
    return float(turn.finish_reason == "stop" and turn.response == task.answer)
'''

# More than in the example, so that the gain of a run is far from what could be chance.
MANY_QUESTIONS = "eval.test=[{name: sort-test, source: './tasks.py:numbers', args: {size: 20000, seed: 2}, split: test, limit: 1000}]"


@pytest.fixture(scope="module")
def finished(warm: Warm, rft: Rft, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The buffer of a finished GRPO run with the example's configuration and a reward function of its own."""
    folder = tmp_path_factory.mktemp("main")
    (folder / "my_reward.py").write_text(REWARD)
    chain = [
        {"drop_truncated": {}},
        {"text_length_filter": {"min_len": 1}},
        {"drop_zero_variance_groups": {}},
        {"sql": "SELECT * FROM batch WHERE num_response_tokens < 8"},
    ]
    result = rft(
        "run",
        EXAMPLE / "grpo.yaml",
        "--plain",
        "--studio",
        "--buffer",
        folder / "buffer",
        "--set",
        f"model.path={warm.model}",
        "--set",
        f"explorer.reward=['{folder}/my_reward.py:score']",
        "--set",
        f"pipelines.experience={json.dumps(chain)}",
        "--set",
        "monitor=[tensorboard]",
        "--set",
        MANY_QUESTIONS,
        timeout=1500,
    )
    assert "rft report sort-grpo" in result.stdout, result.stdout
    assert "the studio is at http://127.0.0.1:" in result.stdout, result.stdout
    assert "step 40/40" in result.stdout or "40/40" in result.stdout, result.stdout
    return folder / "buffer"


def test_the_reward_rises_on_questions_that_were_not_trained_on(finished: Path, rft: Rft) -> None:
    result = report(rft, finished, "sort-grpo")
    assert result["status"] == "finished"
    assert result["steps"]["done"] == 40
    sampled = next(gain for gain in result["gains"] if gain["purpose"] == "test" and gain["decoding"] == "sampled")
    assert sampled["num_questions"] == 1000
    # Weights that do not learn would come so far once in 700 runs. With half as many questions, five runs gained 5.3 to 6.5 standard errors.
    assert sampled["difference"] > 3 * sampled["standard_error"]


def test_training_and_held_out_questions_do_not_overlap(finished: Path) -> None:
    overlap = rows(
        finished,
        """select a.taskset, b.taskset from rft.task a join rft.task b
           on a.payload->>'answer' = b.payload->>'answer' and a.taskset < b.taskset""",
    )
    assert overlap == []


def test_engine_and_trainer_agree_on_every_log_probability(finished: Path) -> None:
    # An engine that kept old weights, or part of them, would be off by tenths of a nat after the first update.
    steps = rows(
        finished, "select trainer_step, (metrics->>'logprob_diff')::float8 as diff from rft.v_train_step order by 1"
    )
    assert len(steps) == 40
    assert all(step["diff"] < 1e-3 for step in steps), steps
    lengths = rows(finished, "select count(distinct policy_version_min) as versions from rft.experience")
    assert lengths[0]["versions"] >= 40


def test_a_reward_that_raises_is_a_recorded_outcome(finished: Path) -> None:
    failed = rows(
        finished, "select outcome::text, error, count(*) as n from rft.rollout where outcome <> 'ok' group by 1, 2"
    )
    assert [row["error"] for row in failed] == [
        "ValueError: this verifier does not like zeros (my_reward.py, line 5, in score)"
    ]
    assert rows(finished, "select count(*) as n from rft.v_dropped where stage = 'outcome'")[0]["n"] >= 1
    trained = rows(
        finished,
        "select count(*) as n from rft.draw d join rft.experience e using (experience_id) where e.reward is null",
    )
    assert trained == [{"n": 0}]


def test_every_drop_left_a_verdict_and_was_refilled(finished: Path) -> None:
    dropped = rows(finished, "select group_id, status::text, closed_reason from rft.rollout_group where not trainable")
    assert dropped
    assert all(row["status"] == "ready" and row["closed_reason"] for row in dropped)
    assert rows(finished, "select count(*) as n from rft.rollout_group where is_refill")[0]["n"] > 0
    undecided = """select count(*) as n from rft.experience e
        where not exists (select from rft.verdict v where v.experience_id = e.experience_id)
          and not exists (select from rft.rollout_group g where g.group_id = e.group_id and g.status = 'sealed')"""
    assert rows(finished, undecided) == [{"n": 0}]
    stages = {row["stage"] for row in rows(finished, "select distinct stage from rft.operator_run")}
    assert {"drop_truncated", "text_length_filter", "drop_zero_variance_groups", "sql"} <= stages


def test_each_step_trained_on_as_many_groups_as_configured_unless_it_states_why(finished: Path) -> None:
    short = rows(finished, "select trainer_step from rft.v_train_step where num_groups <> 16 and reason is null")
    assert short == []


def test_best_and_last_checkpoint_are_there_and_can_be_used_as_models(finished: Path, rft: Rft) -> None:
    result = report(rft, finished, "sort-grpo")
    for name in ("best_checkpoint", "last_checkpoint"):
        assert (Path(result[name]["uri"]) / "config.json").is_file()
    kept = rows(finished, "select uri from rft.checkpoint where deleted_at is null")
    assert all(Path(row["uri"]).is_dir() for row in kept)


def test_sql_and_query_see_rows_and_arrays(finished: Path, rft: Rft) -> None:
    printed = rft("sql", "--json", "--buffer", finished, "select * from rft.v_experience limit 5").stdout
    assert len(json.loads(printed)) == 5
    query = "select max(len(token_ids)) as longest, count(*) as n from experience"
    found = json.loads(rft("query", "--json", "--buffer", finished, query).stdout)[0]
    assert found["n"] == rows(finished, "select count(*) as n from rft.experience")[0]["n"]
    assert 8 <= found["longest"] <= 20


def test_the_curve_is_a_picture_and_tensorboard_has_it(finished: Path) -> None:
    run = finished / "runs" / "sort-grpo"
    assert (run / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert list(run.rglob("events.out.tfevents.*"))


def test_doctor_finds_nothing_wrong(finished: Path, rft: Rft) -> None:
    assert rft("doctor", "--buffer", finished).returncode == 0
