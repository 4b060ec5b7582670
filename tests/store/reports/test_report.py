"""The report is arithmetic on rows: every number here was computed by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import rftdata
from rftcore.reporting.learning_curve import write_learning_curve
from rftcore.reporting.report import Gain, build_report, compare
from rftcore.reporting.table import print_report
from rftdata.errors import QueryError
from rftdata.reports.progress import Progress
from tests.support.stored_run import StoredRun


@pytest.fixture
def run(buffer: rftdata.Buffer) -> StoredRun:
    run = StoredRun(buffer)
    run.attempt()
    return run


def gain(gains: list[Gain], purpose: str) -> Gain:
    return next(g for g in gains if g.purpose == purpose)


def test_a_gain_is_the_mean_of_differences_with_its_standard_error(buffer: rftdata.Buffer, run: StoredRun) -> None:
    run.evaluation(0, {1: 0, 2: 0, 3: 1, 4: 0})
    run.evaluation(4, {1: 1, 2: 0, 3: 1, 4: 1})
    found = gain(build_report(buffer).gains, "validation")
    # Differences 1, 0, 0, 1: mean 1/2, sample variance 1/3, standard error sqrt(1/3) / sqrt(4).
    assert (found.num_questions, found.before, found.after, found.difference) == (4, 0.25, 0.75, 0.5)
    assert found.standard_error == pytest.approx(math.sqrt(1 / 3) / 2)
    assert found.z == pytest.approx(0.5 / (math.sqrt(1 / 3) / 2))


def test_only_questions_answered_both_times_are_paired(buffer: rftdata.Buffer, run: StoredRun) -> None:
    run.evaluation(0, {1: 0, 2: 0, 3: 1})
    run.evaluation(4, {2: 1, 3: 1, 9: 1})
    found = gain(build_report(buffer).gains, "validation")
    assert (found.num_questions, found.before, found.after) == (2, 0.5, 1.0)


def test_a_difference_without_spread_has_no_z(buffer: rftdata.Buffer, run: StoredRun) -> None:
    run.evaluation(0, {1: 0, 2: 0})
    run.evaluation(4, {1: 1, 2: 1})
    found = gain(build_report(buffer).gains, "validation")
    assert (found.difference, found.standard_error, found.z) == (1.0, 0.0, None)


def test_answers_that_could_not_be_scored_are_reported(
    buffer: rftdata.Buffer, run: StoredRun, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluation = run.evaluation(0, {1: 0.0, 2: 1.0}, taskset="sums")
    said = "1 of 2 answers failed and count 0; the first: KeyError: [the answer]"
    buffer.sql("UPDATE rft.evaluation SET error = %s WHERE evaluation_id = %s", [said, evaluation])
    report = build_report(buffer)
    assert report.unscored == [f"validation sums, greedy, step 0: {said}"]
    print_report([report])
    assert f"warning validation sums, greedy, step 0: {said}" in " ".join(capsys.readouterr().out.split())
    assert Progress(run.run).snapshot().evaluations[0].error == said


def test_only_validation_decides_the_best_step(buffer: rftdata.Buffer, run: StoredRun) -> None:
    for step, mean in ((0, 0.0), (2, 1.0), (4, 0.5)):
        run.evaluation(step, {1: mean, 2: mean})
    for step, mean in ((0, 0.0), (2, 0.25), (4, 1.0)):
        run.evaluation(step, {5: mean, 6: mean}, purpose="test", taskset="held-out")
    run.checkpoint(2)
    run.checkpoint(4)
    report = build_report(buffer)
    assert report.best_step == 2
    assert (gain(report.gains, "test").before_step, gain(report.gains, "test").after_step) == (0, 2)
    assert gain(report.gains, "test").difference == 0.25
    assert report.best_checkpoint is not None and report.best_checkpoint.trainer_step == 2
    assert report.last_checkpoint is not None and report.last_checkpoint.uri == "/c/4"


def test_a_step_counts_as_best_only_when_every_validation_taskset_was_answered(
    buffer: rftdata.Buffer, run: StoredRun
) -> None:
    for step, a, b in ((0, 0.0, 0.2), (2, 0.4, 0.4)):
        run.evaluation(step, {1: a}, taskset="a")
        run.evaluation(step, {2: b}, taskset="b")
    run.evaluation(4, {1: 1.0}, taskset="a")
    assert build_report(buffer).best_step == 2


def test_of_equal_steps_the_earliest_is_best(buffer: rftdata.Buffer, run: StoredRun) -> None:
    for step in (0, 2, 4):
        run.evaluation(step, {1: 0.5})
    assert build_report(buffer).best_step == 2


def test_training_that_did_harm_is_reported_as_harm(buffer: rftdata.Buffer, run: StoredRun) -> None:
    for step, mean in ((0, 1.0), (2, 0.5), (4, 0.0)):
        run.evaluation(step, {1: mean})
    for step, mean in ((0, 1.0), (2, 0.25)):
        run.evaluation(step, {5: mean}, purpose="test", taskset="held-out")
    report = build_report(buffer)
    assert report.best_step == 2
    assert (gain(report.gains, "test").difference, gain(report.gains, "validation").difference) == (-0.75, -0.5)


def test_the_first_decoding_of_the_configuration_decides(buffer: rftdata.Buffer, run: StoredRun) -> None:
    for step, greedy, sampled in ((2, 1.0, 0.0), (4, 0.0, 1.0)):
        run.evaluation(step, {1: greedy})
        run.evaluation(step, {1: sampled}, decoding="sampled")
    assert build_report(buffer).best_step == 2
    buffer.sql('UPDATE rft.run SET config = config || \'{"eval": {"decodings": ["sampled", "greedy"]}}\'')
    assert build_report(buffer).best_step == 4


def test_steps_after_the_checkpoint_of_a_crashed_attempt_do_not_count(buffer: rftdata.Buffer, run: StoredRun) -> None:
    first = run.attempt_id
    for step in (1, 2, 3):
        run.train_step(step)
    run.evaluation(0, {1: 0.0})
    run.evaluation(3, {1: 1.0})  # after the checkpoint: gone with the crash
    run.attempt(parent=first, checkpoint=run.checkpoint(2))
    run.train_step(3, outcome="skipped", reason="nothing survived")
    run.train_step(4)
    run.evaluation(4, {1: 0.5})
    report = build_report(buffer)
    assert (report.steps.done, report.steps.planned, report.steps.skipped, report.num_attempts) == (4, 4, 1, 2)
    assert report.steps.skipped_because == {"nothing survived": 1}
    assert [p.step for p in report.evaluation_curves[0].points] == [0, 4]
    assert gain(report.gains, "validation").difference == 0.5


def test_steps_without_a_gradient_are_counted(
    buffer: rftdata.Buffer, run: StoredRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.train_step(1, grad_norm=0.0)
    run.train_step(2, grad_norm=0.5)
    report = build_report(buffer)
    assert report.steps.without_gradient == 1
    print_report([report])
    assert "1 without a gradient" in " ".join(capsys.readouterr().out.split())


def test_a_run_without_rewards_shows_its_loss(
    buffer: rftdata.Buffer, run: StoredRun, capsys: pytest.CaptureFixture[str]
) -> None:
    for step, loss in ((1, 2.0), (2, 1.5), (3, 1.0), (4, 0.5)):
        run.train_step(step, loss=loss)
    report = build_report(buffer)
    assert [(p.step, p.value) for p in report.metric_curves["loss"]] == [(1, 2.0), (2, 1.5), (3, 1.0), (4, 0.5)]
    print_report([report])
    shown = " ".join(capsys.readouterr().out.split())
    assert "training loss 1.750 (first 2 steps) to 0.750 (last 2)" in shown and "training reward" not in shown
    # Beside a run that has rewards each stands under its name.
    other = StoredRun(buffer, "other")
    other.attempt()
    other.group(0, [1.0, 0.0])
    other.train_step(1, loss=0.1)
    print_report([report, build_report(buffer, "other")])
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("training ")]
    assert sorted(line[1] for line in lines) == ["loss", "reward"]
    assert [line[2] for line in sorted(lines)] == ["1.750", "–"]
    assert next(line[3:5] for line in lines if line[1] == "reward") == ["0.500", "(first"]


def test_rows_and_groups_are_counted_by_what_became_of_them(buffer: rftdata.Buffer, run: StoredRun) -> None:
    run.group(0, [1.0, 0.0])
    flat = run.group(0, [0.0, 0.0], trainable=False, closed_reason="dropped: zero variance")
    run.drop(flat, "drop_zero_variance_groups", "all rewards are 0")
    run.group(0, [1.0, None], is_refill=True)
    run.train_step(1)
    report = build_report(buffer)
    (dropped,) = report.dropped
    assert (dropped.stage, dropped.reason, dropped.num_experiences, dropped.num_groups) == (
        "drop_zero_variance_groups",
        "all rewards are 0",
        2,
        1,
    )
    assert (report.groups.planned, report.groups.closed, report.groups.refilled, report.groups.trained) == (3, 1, 1, 2)
    assert report.groups.closed_because == {"dropped: zero variance": 1}
    assert report.rollouts == {"ok": 5, "failed": 1}
    assert (report.num_experiences, report.sampled_tokens) == (5, 25)


def test_errors_of_a_stage_that_differ_only_by_the_rows_they_name_are_one_line(
    buffer: rftdata.Buffer, run: StoredRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.train_step(1)
    for number in range(3):
        errors = [f"a stage failed: mine raised for experience {2 * number + i}: KeyError: 'x'" for i in range(2)]
        reasons = "; ".join(f"mine: {error}" for error in errors[: 1 + number % 2])
        group = run.group(0, [0.0, 1.0], trainable=False, closed_reason=f"dropped by {reasons}")
        ids = run.experiences()[-2:]
        for experience_id, error in zip(ids, errors, strict=True):
            buffer.sql(
                "INSERT INTO rft.verdict (experience_id, group_id, pipeline_version, kept, stage, reason) VALUES (%s, %s, 'v1', false, 'mine', %s)",
                [experience_id, group, error],
            )
    other = run.group(0, [0.0], trainable=False)
    run.drop(other, "mine", "a stage failed: mine raised for experience 7: ValueError: 7")
    report = build_report(buffer)
    assert [(d.reason, d.num_experiences, d.num_groups) for d in report.dropped] == [
        ("a stage failed: mine raised for experience …: KeyError: 'x'", 6, 3),
        ("a stage failed: mine raised for experience …: ValueError: 7", 1, 1),
    ]
    assert next(iter(report.groups.closed_because.values())) == 3 and report.groups.closed == 4
    assert all("raised for experience …" in reason for reason in report.groups.closed_because if "mine" in reason)
    print_report([report])
    assert capsys.readouterr().out.count("KeyError") == 2  # once for the rows, once for their groups


def test_times_and_groups_of_a_fork_are_its_own(
    buffer: rftdata.Buffer, run: StoredRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.worker("trainer", seconds_ago=1000, seconds=900)
    for step in (1, 2):
        run.group(step, [0.0, 1.0])
        run.train_step(step)
    checkpoint = run.checkpoint(2)
    parent_attempt, first = run.attempt_id, run.experiences()[0]
    fork = StoredRun(buffer, "fork")
    fork.worker("trainer", seconds_ago=60, seconds=5)
    fork.attempt(parent=parent_attempt, checkpoint=checkpoint)
    fork.group(3, [0.0, 1.0])  # one of them is a copy of the parent's
    buffer.sql("ALTER TABLE rft.experience DISABLE TRIGGER USER")
    buffer.sql("UPDATE rft.experience SET parent_id = %s WHERE experience_id = %s", [first, fork.experiences()[0]])
    buffer.sql("ALTER TABLE rft.experience ENABLE TRIGGER USER")
    fork.train_step(3)
    report = build_report(buffer, "fork")
    steps = report.steps
    assert (steps.done, steps.before_fork, report.groups.planned, report.groups.trained) == (3, 2, 1, 2)
    assert (steps.wait_seconds, steps.train_seconds, steps.publish_seconds) == (1.5, 2, 0.5)
    assert steps.wait_seconds + steps.train_seconds + steps.publish_seconds <= report.wall_seconds == pytest.approx(5)
    assert (report.num_experiences, report.sampled_tokens, report.trained_tokens) == (2, 5, 100)
    print_report([report])
    assert "3 of 4, 2 of them before the fork" in capsys.readouterr().out
    assert build_report(buffer, "sums").steps.before_fork == 0


def test_a_fork_is_not_compared_by_its_parents_results(
    buffer: rftdata.Buffer, run: StoredRun, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        run.group(step, [0.0, 1.0])
        run.train_step(step)
    run.evaluation(0, {1: 0.25})
    fork = StoredRun(buffer, "fork")
    fork.attempt(parent=run.attempt_id, checkpoint=run.checkpoint(2))
    fork.group(3, [0.0, 1.0])
    fork.train_step(3)
    alone = build_report(buffer, "sums")
    assert (alone.gains, alone.not_compared) == ([], ["validation val, greedy: evaluated at step 0 alone: 0.250"])
    report = build_report(buffer, "fork")
    assert report.gains == [] and len(report.not_compared) == 1
    print_report([report])
    assert "not evaluated since the fork at step 2; 0.250 at step 0" in capsys.readouterr().out
    fork.evaluation(3, {1: 0.75})
    report = build_report(buffer, "fork")
    assert (gain(report.gains, "validation").difference, report.not_compared) == (0.5, [])


def test_a_fork_is_compared_by_its_own_steps_though_its_parent_was_better(
    buffer: rftdata.Buffer, run: StoredRun
) -> None:
    for step in (1, 2):
        run.group(step, [0.0, 1.0])
        run.train_step(step)
    run.evaluation(0, {1: 0.25})
    run.evaluation(2, {1: 1.0})
    fork = StoredRun(buffer, "fork")
    fork.attempt(parent=run.attempt_id, checkpoint=run.checkpoint(2))
    fork.group(3, [0.0, 1.0])
    fork.train_step(3)
    assert "not evaluated since the fork at step 2; 1.000 at step 2" in build_report(buffer, "fork").not_compared[0]
    fork.evaluation(3, {1: 0.5})
    found = gain(build_report(buffer, "fork").gains, "validation")
    assert (found.before_step, found.after_step, found.difference) == (0, 3, 0.25)


def test_the_training_curve_has_dropped_groups_in_it(buffer: rftdata.Buffer, run: StoredRun) -> None:
    run.group(0, [1.0, 0.0])
    run.group(0, [0.0, 0.0], trainable=False)
    run.group(1, [1.0, 0.5, None])
    curve = build_report(buffer).train_curve
    assert [(p.step, p.num, p.mean, p.pass_rate) for p in curve] == [(0, 4, 0.25, 0.25), (1, 2, 0.75, 0.5)]


def test_parts_of_rewards_have_curves_of_their_own(
    buffer: rftdata.Buffer, run: StoredRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.group(0, [1.0, 0.0], parts={"right": 0.5, "form": 1})
    run.group(1, [1.0, None], parts={"right": 0.25})
    curves = build_report(buffer).part_curves
    assert {name: [(p.step, p.num, p.mean) for p in points] for name, points in curves.items()} == {
        "form": [(0, 2, 1.0)],
        "right": [(0, 2, 0.5), (1, 1, 0.25)],
    }
    run.train_step(1)
    print_report([build_report(buffer)])
    assert "reward right 0.500" in " ".join(capsys.readouterr().out.split())


def test_time_is_that_of_live_processes_without_overlaps_or_pauses(buffer: rftdata.Buffer, run: StoredRun) -> None:
    run.worker("trainer", seconds_ago=1000, seconds=100)
    run.worker("explorer", seconds_ago=950, seconds=100)  # 50 of them beside the trainer
    run.worker("trainer", seconds_ago=200, seconds=30)
    # They were inserted a moment after one another; now they are as far apart as they should be.
    buffer.sql(
        "UPDATE rft.worker w SET (started_at, heartbeat_at, stopped_at) = (SELECT t, t + x.s, t + x.s FROM (SELECT now() - x.ago AS t) AS y)"
        " FROM unnest(ARRAY[1, 2, 3], ARRAY['1000 s', '950 s', '200 s']::interval[], ARRAY['100 s', '100 s', '30 s']::interval[])"
        " AS x (worker_id, ago, s) WHERE x.worker_id = w.worker_id"
    )
    run.group(0, [1.0, 0.0])
    report = build_report(buffer)
    assert report.wall_seconds == pytest.approx(180)
    assert report.tokens_per_s == pytest.approx(10 / 180)


def test_a_run_that_has_not_begun_has_a_report(buffer: rftdata.Buffer) -> None:
    StoredRun(buffer, "empty")
    report = build_report(buffer, "empty")
    assert (report.steps.done, report.gains, report.best_step, report.wall_seconds) == (0, [], None, 0.0)
    assert json.loads(report.model_dump_json())["run"] == "empty"


def test_two_runs_are_compared_question_by_question_at_their_best_steps(buffer: rftdata.Buffer, run: StoredRun) -> None:
    run.evaluation(0, {1: 0, 2: 0})
    run.evaluation(4, {1: 1, 2: 0})
    other = StoredRun(buffer, "other")
    other.attempt()
    other.evaluation(0, {1: 0, 2: 0})
    other.evaluation(2, {1: 1, 2: 1})
    (found,) = compare(run.run, other.run).gains
    assert (found.before, found.after, found.difference, found.before_step, found.after_step) == (0.5, 1.0, 0.5, 4, 2)


def test_a_comparison_pairs_the_means_of_several_answers_and_says_what_it_leaves_out(
    buffer: rftdata.Buffer, run: StoredRun, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluation = run.evaluation(4, {1: 1, 2: 0, 3: 1, 4: 0}, decoding="sampled")
    buffer.sql("UPDATE rft.evaluation SET num_answers = 2 WHERE evaluation_id = %s", [evaluation])
    buffer.sql(
        "INSERT INTO rft.evaluation_answer (evaluation_id, task_id, answer_index, reward, response, num_response_tokens, finish_reason)"
        " SELECT evaluation_id, task_id, 1, 0, 'b', 3, 'stop' FROM rft.evaluation_answer WHERE evaluation_id = %s",
        [evaluation],
    )
    run.evaluation(4, {9: 1}, taskset="only here")
    other = StoredRun(buffer, "other")
    other.attempt()
    other.evaluation(2, {1: 1, 2: 0, 3: 0.5, 5: 1}, purpose="test", decoding="sampled")
    both = compare(run.run, other.run)
    (found,) = both.gains
    # Means 0.5, 0, 0.5 against 1, 0, 0.5: differences 0.5, 0, 0 with the sample variance 1/12.
    assert (found.num_questions, found.before, found.after) == (3, pytest.approx(1 / 3), 0.5)
    assert (found.num_better, found.num_worse, found.num_only_before, found.num_only_after) == (1, 0, 1, 1)
    assert found.standard_error == pytest.approx(1 / 6) and found.z == pytest.approx(1.0)
    assert found.p == pytest.approx(0.3173, abs=1e-4) and found.interval == pytest.approx((-0.16, 0.4933), abs=1e-3)
    assert both.not_compared == ["only here, greedy: evaluated in sums alone"]
    (several,) = build_report(buffer, "sums").several_answers
    assert (several.num_answers, several.mean.value, several.pass_at[1].value, several.pass_at[2].value) == (
        2,
        0.25,
        0.25,
        0.5,
    )
    print_report([build_report(buffer, "sums"), build_report(buffer, "other")], both)
    out = capsys.readouterr().out
    assert "pass@2" in out and "of 3 questions, other is better on 1, worse on 0, equal on 2" in out
    assert "sums alone answered 1 further question" in out and "not compared: only here, greedy" in out


def test_the_learning_curve_is_a_picture(buffer: rftdata.Buffer, run: StoredRun, tmp_path: Path) -> None:
    for step in range(30):
        run.group(step, [0.0, step / 30])
    for step, mean in ((0, 0.1), (10, 0.3), (20, 0.45), (30, 0.4)):
        run.evaluation(step, {1: 0.0, 2: mean * 2})
    for step, mean in ((0, 0.1), (20, 0.4)):
        run.evaluation(step, {5: 0.0, 6: mean * 2, 7: mean}, purpose="test", taskset="held-out")
    path = tmp_path / "deep" / "curve.png"
    write_learning_curve(build_report(buffer), path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_a_picture_of_nothing_is_still_a_picture(buffer: rftdata.Buffer, tmp_path: Path) -> None:
    StoredRun(buffer, "empty")
    write_learning_curve(build_report(buffer), tmp_path / "curve.png")
    assert (tmp_path / "curve.png").exists()


def test_a_picture_that_cannot_be_written_is_reported(buffer: rftdata.Buffer, tmp_path: Path) -> None:
    StoredRun(buffer, "empty")
    report = build_report(buffer)
    folder = tmp_path / "pictures"
    folder.mkdir()
    with pytest.raises(QueryError, match=r"unknown image format \(got '.*curve.txt'\); allowed: .*\.png"):
        write_learning_curve(report, folder / "curve.txt")
    (folder / "file").write_text("")
    with pytest.raises(QueryError, match=r"cannot be written: (File exists|Not a directory)"):
        write_learning_curve(report, folder / "file" / "curve.png")
    (folder / "curve.png").mkdir()
    with pytest.raises(QueryError, match="cannot be written: Is a directory"):
        write_learning_curve(report, folder / "curve.png")
    assert sorted(path.name for path in folder.iterdir()) == ["curve.png", "file"]


def test_a_loss_for_experts_without_an_expert_s_experience_is_reported(
    buffer: rftdata.Buffer, run: StoredRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.train_step(1, expert_sequences=0.0)
    run.train_step(2, expert_sequences=0.0)
    [warning] = build_report(buffer).warnings
    assert "algorithm.expert had no effect: none of 2 steps had an expert's experience" in warning
    print_report([build_report(buffer)])
    assert "warning algorithm.expert had no effect" in capsys.readouterr().out
    run.train_step(3, expert_sequences=4.0)
    assert build_report(buffer).warnings == []
