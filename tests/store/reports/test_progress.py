"""The progress view shows the state of the buffer, on a terminal and in a pipe."""

from __future__ import annotations

import io
import re
import socket
import subprocess
from typing import Any

import pytest
from rich.console import Console

import rftdata
from rftcore.launch.terminal.open_reviews import OpenReviews
from rftcore.launch.terminal.views import LineView, LiveView, block, line
from rftcore.reporting.waiting_roles import what_waits
from rftdata.pipeline.records import Verdicts, concatenated, dropped, kept
from rftdata.pipeline.verdicts import commit_verdicts
from rftdata.processes import pid_space, started_at
from rftdata.reports.progress import EqualRewards, Progress, Queue, steps_to_repeat
from tests.support.store_roles import Roles
from tests.support.stored_run import StoredRun


@pytest.fixture
def run(buffer: rftdata.Buffer) -> StoredRun:
    run = StoredRun(buffer, steps=10)
    run.attempt()
    return run


def drawn(buffer: rftdata.Buffer, run: StoredRun, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(block(Progress(run.run).snapshot(), width))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_snapshot_of_a_run_at_work(buffer: rftdata.Buffer, run: StoredRun) -> None:
    run.train_step(1, loss=0.5)
    run.train_step(2, outcome="skipped", reason="nothing survived")
    run.policy(0)
    run.policy(2)
    run.group(0, [1.0, 0.0])
    run.group(1, [1.0, 1.0, 1.0, 0.0], trainable=False, is_refill=True)
    for status in ("planned", "planned", "claimed", "sealed"):
        run.group(2, [], status=status)
    run.worker("explorer", progress={"tokens_per_s": 200.0, "policy_step": 1})
    run.worker("explorer", progress={"tokens_per_s": 100.0, "policy_step": 2})
    snapshot = Progress(run.run).snapshot()
    assert (snapshot.step, snapshot.planned_steps, snapshot.num_skipped) == (2, 10, 1)
    assert (snapshot.mean_reward, snapshot.pass_rate, snapshot.reward_step) == (0.75, 0.75, 1)
    assert snapshot.rewards == [0.5, 0.75]
    assert (snapshot.tokens_per_s, snapshot.policy_step, snapshot.published_step) == (300.0, 1, 2)
    assert snapshot.queue == Queue(planned=2, claimed=1, sealed=1, ready=0, ready_later=0)
    assert (snapshot.refills, snapshot.closed_groups) == (1, 1)


def test_ready_groups_are_those_the_trainer_could_draw(buffer: rftdata.Buffer, run: StoredRun) -> None:
    group = run.group(0, [1.0, 0.0])
    buffer.sql(
        "INSERT INTO rft.worklist (run_id, consumer, item_id, sort_key) VALUES (%s, 'trainer', %s, 0)",
        [run.run_id, group],
    )
    assert Progress(run.run).snapshot().queue.ready == 1


def test_rewards_that_come_later_are_seen(buffer: rftdata.Buffer, run: StoredRun) -> None:
    progress = Progress(run.run)
    assert progress.snapshot().mean_reward is None
    run.group(0, [0.0, 0.0])
    assert progress.snapshot().rewards == [0.0]
    run.group(0, [1.0, 1.0])
    run.group(1, [1.0, 0.0])
    assert progress.snapshot().rewards == [0.5, 0.5]


def test_the_block_names_what_each_process_waits_for(buffer: rftdata.Buffer, run: StoredRun) -> None:
    run.group(0, [1.0, 0.0])
    run.evaluation(0, {1: 0.0, 2: 1.0})
    run.worker("trainer", state="waiting", waiting_for="2 more groups of step 1")
    run.worker("pipeline", seconds_ago=300, seconds=5, error="OperatorError: stage 2")
    text = drawn(buffer, run)
    assert "waits for 2 more groups of step 1" in text
    assert "ended: OperatorError: stage 2" in text
    assert "val, greedy: 0.500 at step 0 (2 questions)" in text


CONFIG = {"sync": {"interval": 1, "offset": 0}, "run": {"mode": "both"}}


def test_a_line_names_what_waits_for_what_and_why(buffer: rftdata.Buffer, run: StoredRun) -> None:
    def said(config: dict[str, Any] = CONFIG) -> str | None:
        return what_waits(Progress(run.run).snapshot(), config)

    assert said() is None, "no process is at work"
    run.worker("trainer", state="waits", waiting_for="4 ready groups for step 3")
    for status in ("planned", "planned", "planned", "sealed"):
        run.group(2, [], status=status)
    assert said() == (
        "waits: the trainer for 4 ready groups for step 3 (0 ready for it, 0 being sampled, 1 await verdicts, 3 planned; "
        "no explorer is at work: rft explore CONFIG; no pipeline is at work: rft process CONFIG)"
    )
    run.group(2, [], status="claimed")
    run.worker("pipeline", state="waits", waiting_for="sealed groups")
    run.worker("explorer", state="samples 1 groups")
    assert said() == (
        "waits: the trainer for 4 ready groups for step 3 (0 ready for it, 1 being sampled, 1 await verdicts, 3 planned); the pipeline for sealed groups"
        " | at work: the explorer samples 1 groups"
    )
    assert "no explorer" not in str(what_waits(Progress(run.run).snapshot(), {"run": {"mode": "train"}}))


def test_groups_that_are_ready_for_later_steps_are_not_what_the_trainer_waits_for(
    buffer: rftdata.Buffer, run: StoredRun
) -> None:
    run.train_step(1)
    run.worker("trainer", state="waits", waiting_for="2 ready groups for step 2")
    run.worker("explorer", state="samples 1 groups")
    run.worker("pipeline", state="waits", waiting_for="sealed groups")
    put = "INSERT INTO rft.worklist (run_id, consumer, item_id, sort_key) VALUES (%s, 'trainer', %s, %s::bigint << 32)"
    for explore_step in (1, 2, 2, 3):
        buffer.sql(put, [run.run_id, run.group(explore_step, [1.0, 0.0]), explore_step])
    snapshot = Progress(run.run).snapshot()
    assert (snapshot.queue.ready, snapshot.queue.ready_later) == (4, 3)
    assert "(1 ready for it, 3 ready for later steps, which sampling.over_sampling would let it take, 0 being" in str(
        what_waits(snapshot, CONFIG)
    )
    assert "3 ready for later steps, 0 being" in str(
        what_waits(snapshot, {**CONFIG, "sampling": {"over_sampling": 0.5}})
    )


def test_drops_of_the_chain_are_reported_with_a_remedy(
    buffer: rftdata.Buffer, run: StoredRun, capsys: pytest.CaptureFixture[str]
) -> None:
    roles = Roles(buffer, batch_groups=4, group_size=4)
    with roles.attempt():
        roles.plan()
        roles.explore()
        batch = roles.claim_sealed()
        assert batch is not None
        gone = dropped(batch.table.slice(0, 12), "drop_truncated#2", "finish_reason is length")
        commit_verdicts(
            roles.run, roles.worker_id, "p1", batch, Verdicts(concatenated([gone, kept(batch.table.slice(12))]))
        )
        view = LineView(quiet_s=0)
        for _ in range(2):
            view.update(Progress(roles.run).snapshot())
    sentence = (
        "75% of the newest rows are dropped by drop_truncated#2 (finish_reason is length): raise explorer.max_tokens"
    )
    assert capsys.readouterr().out.count(sentence) == 1, "once"
    shown = Console(file=io.StringIO(), width=200)
    shown.print(block(Progress(roles.run).snapshot(), 200))
    assert sentence in shown.file.getvalue()  # type: ignore[attr-defined]


EQUAL = "all 4 groups so far have equal rewards in each group (0 to 1) and train nothing: look at answers and rewards with `rft try CONFIG`; correct"


def test_rewards_that_are_all_equal_are_reported_once_nothing_was_trained(
    buffer: rftdata.Buffer, run: StoredRun, capsys: pytest.CaptureFixture[str]
) -> None:
    view, progress = LineView(quiet_s=0), Progress(run.run)

    def said() -> bool:
        view.update(progress.snapshot())
        return EQUAL in capsys.readouterr().out

    for rewards in ([0.0, 0.0], [1.0, 1.0, None], [0.0, 0.0], [0.5]):
        run.group(0, rewards)
    run.train_step(1, grad_norm=0.0)
    assert not said(), "three groups may be equal by chance, and one rollout is compared with none"
    run.group(1, [0.0, 0.0])
    assert said() and not said(), "once"
    assert " ".join(drawn(buffer, run, 400).split()).count(EQUAL) == 1
    run.train_step(2, grad_norm=0.5)
    assert progress.snapshot().equal_rewards is None, "the algorithm does not compare rewards"


def test_equal_rewards_whose_groups_are_dropped_are_reported_before_the_first_step(
    buffer: rftdata.Buffer,
) -> None:
    roles = Roles(buffer, batch_groups=4, group_size=2)
    with roles.attempt():
        roles.plan()
        roles.explore(lambda group: [0.0] * group.group_size)
        snapshot = Progress(roles.run).snapshot()
        assert snapshot.equal_rewards is None, "it is not known whether the algorithm compares rewards"
        batch = roles.claim_sealed()
        assert batch is not None
        gone = dropped(batch.table, "drop_zero_variance_groups", "reward is 0 in all 2 rollouts of the group")
        commit_verdicts(roles.run, roles.worker_id, "p1", batch, Verdicts(gone))
        assert Progress(roles.run).snapshot().equal_rewards == EqualRewards(num_groups=4, lowest=0.0, highest=0.0)


def test_a_resumed_run_does_not_go_back(
    buffer: rftdata.Buffer, run: StoredRun, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run.attempt_id
    run.train_step(1, loss=0.25)
    checkpoint = run.checkpoint(1)
    for step in (2, 3):
        run.train_step(step)
    stored = run.run.refreshed()
    assert steps_to_repeat(stored) == (1, 3)
    resumed = Progress(stored, resumes=True)
    steps = [resumed.snapshot().step]
    run.attempt(parent=first, checkpoint=checkpoint)
    steps.append(resumed.snapshot().step)
    run.train_step(2, loss=0.125)
    steps.append(resumed.snapshot().step)
    assert steps == [1, 1, 2]
    LineView().update(resumed.snapshot())
    assert re.search(r"step 2/10 .* loss 0.125  groups: none open", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("sync", "policy_step", "why"),
    [
        ({}, 2, "explorer step 3 needs the policy of trainer step 3, and has that of step 2: on-policy"),
        ({"offset": 1}, 2, "explorer step 4 needs the policy of trainer step 3, and has that of step 2: one step off"),
        (
            {"interval": 4},
            5,
            "explorer step 8 needs the policy of trainer step 8, and has that of step 5: sync.interval 4, sync.offset 0",
        ),
        (
            {"offset": 3},
            2,
            "explorer step 6 needs the policy of trainer step 3, and has that of step 2: sync.interval 1, sync.offset 3",
        ),
    ],
)
def test_the_line_names_the_step_that_the_rule_of_sync_holds_back(
    buffer: rftdata.Buffer, run: StoredRun, sync: dict[str, int], policy_step: int, why: str
) -> None:
    run.worker("trainer", state=f"trains step {policy_step + 1} on 8 experiences")
    waits = f"the policy after trainer step {policy_step + 1}, or a group to refill"
    for _ in range(2):
        run.worker("explorer", state="waits", waiting_for=waits, progress={"policy_step": policy_step})
    run.worker("explorer", state="samples 2 groups", progress={"policy_step": policy_step})
    assert what_waits(Progress(run.run).snapshot(), {"sync": sync}) == (
        f"waits: 2 of 3 explorers for {waits} ({why}) | at work: the trainer trains step {policy_step + 1} on 8 experiences"
    )
    buffer.sql("UPDATE rft.worker SET state = 'samples', waiting_for = NULL WHERE role = 'explorer'")
    assert str(what_waits(Progress(run.run).snapshot(), {"sync": sync})).startswith(
        "nothing waits: the trainer trains step"
    )


def test_rows_that_wait_for_a_person_are_reported_once_and_when_their_number_changes(
    buffer: rftdata.Buffer, run: StoredRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.group(0, [1.0, 0.0], status="sealed")
    progress, people = Progress(run.run), OpenReviews(LineView(), quiet_s=0.0)

    def printed() -> str:
        people.update(progress.snapshot())
        return capsys.readouterr().out

    assert printed() == ""
    buffer.sql(
        "INSERT INTO rft.review (experience_id, group_id, run_id, name, question, deadline, otherwise)"
        " SELECT experience_id, group_id, %s, 'tone', 'Is it polite?', now() + interval '1 h', 'pass' FROM rft.experience",
        [run.run_id],
    )
    assert printed().startswith("2 experiences wait for a person: `rft label queue --run ")
    assert printed() == ""
    buffer.sql(
        "UPDATE rft.review SET answer = 'pass' WHERE experience_id = (SELECT min(experience_id) FROM rft.review)"
    )
    assert printed().startswith("1 experience waits for a person")
    buffer.sql("UPDATE rft.review SET answer = 'drop' WHERE answer IS NULL")
    assert printed() == "no experience waits for a person any more\n"


def test_a_replay_that_failed_is_no_part_of_the_run(buffer: rftdata.Buffer, run: StoredRun) -> None:
    run.worker("trainer", state="training")
    run.worker("replay", seconds_ago=300, seconds=5, error="StageError: stage 2")
    text = drawn(buffer, run)
    assert "training" in text and "replay" not in text and "StageError" not in text
    assert "replay" not in line(Progress(run.run).snapshot())
    run.worker("replay", state="replays version strict")  # one at work is shown
    assert "replays version strict" in drawn(buffer, run)
    snapshot = Progress(run.run).snapshot()
    # `rft status --all` and `--json` have it.
    assert [w.error for w in snapshot.workers if w.error] == ["StageError: stage 2"]


def test_a_process_that_fell_silent_is_shown_as_such(buffer: rftdata.Buffer, run: StoredRun) -> None:
    run.worker("trainer", state="training", seconds_ago=60)
    buffer.sql("UPDATE rft.worker SET heartbeat_at = now() - interval '40 s'")
    assert "silent since it was training" in drawn(buffer, run)


def test_a_process_that_was_killed_here_is_known_to_have_ended_at_once(buffer: rftdata.Buffer, run: StoredRun) -> None:
    trainer = run.worker("trainer", state="training")
    name = "UPDATE rft.worker SET host = %(host)s, pid = %(pid)s, pid_space = %(pid_space)s, pid_started = %(pid_started)s WHERE worker_id = %(id)s"
    with subprocess.Popen(["sleep", "1000"]) as process:
        named = {
            "host": socket.gethostname(),
            "pid": process.pid,
            "pid_space": pid_space(),
            "pid_started": started_at(process.pid),
            "id": trainer,
        }
        with buffer.database.connection() as connection:
            connection.execute(name, named)
        assert [worker.liveness for worker in Progress(run.run).snapshot().workers] == ["alive"]
        process.kill()
    snapshot = Progress(run.run).snapshot()
    assert [worker.liveness for worker in snapshot.workers] == ["gone"] and snapshot.workers[0].heartbeat_age_s < 15
    assert "its process has ended while it was training" in drawn(buffer, run)
    buffer.sql("UPDATE rft.worker SET heartbeat_at = now() - interval '40 s'")
    assert [worker.liveness for worker in Progress(run.run).snapshot().workers] == ["gone"]


@pytest.mark.parametrize("width", [60, 200])
def test_the_block_fits_its_terminal(buffer: rftdata.Buffer, run: StoredRun, width: int) -> None:
    run.worker(
        "explorer", state="sampling", progress={"tokens_per_s": 200.0, "policy_step": 1, "num_generated_tokens": 12345}
    )
    assert max(map(len, drawn(buffer, run, width).splitlines())) <= width


def test_a_run_that_has_not_begun_can_be_drawn(buffer: rftdata.Buffer) -> None:
    run = StoredRun(buffer, "empty", steps=0)
    assert "step 0 of 0" in drawn(buffer, run)
    assert line(Progress(run.run).snapshot()).startswith("step 0/0")


def test_a_pipe_gets_one_line_per_step(
    buffer: rftdata.Buffer, run: StoredRun, capsys: pytest.CaptureFixture[str]
) -> None:
    progress, view = Progress(run.run), LineView(quiet_s=1000)
    for _ in range(3):
        view.update(progress.snapshot())
    run.train_step(1)
    view.update(progress.snapshot())
    lines = capsys.readouterr().out.splitlines()
    assert [text.split("  ")[0] for text in lines] == ["step 0/10", "step 1/10"]


def test_a_long_silence_is_broken(buffer: rftdata.Buffer, run: StoredRun, capsys: pytest.CaptureFixture[str]) -> None:
    progress, view = Progress(run.run), LineView(quiet_s=0)
    for _ in range(2):
        view.update(progress.snapshot())
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_terminal_gets_a_block_that_is_redrawn(buffer: rftdata.Buffer, run: StoredRun) -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True, highlight=False)
    progress = Progress(run.run)
    with LiveView(console) as view:
        view.message("set up")
        view.update(progress.snapshot())
        view.message("in between")
        view.update(progress.snapshot())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.startswith("set up\n") and "in between" in text and "step 0 of 10" in text
