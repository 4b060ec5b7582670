"""A batch that is drawn while the step before it is trained: a full one or none, given up if anything that it depends on has changed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rftcore.algorithms import build_algorithm
from rftcore.config.run import RunConfig, parse_config
from rftcore.trainer.batches.next_batch import NextBatch, PreparedBatch, draws_ahead
from rftdata import Buffer
from rftdata.attempts import stored_selection
from rftdata.attempts.attempt import Attempt
from rftdata.attempts.batch import Batch
from rftdata.errors import FencedError, RoleFailedError
from rftdata.maintenance import purge
from rftdata.run import Run
from tests.store.pipeline.test_pipeline_worker import rows
from tests.support.store_roles import Roles, own_group, selecting
from tests.support.waiting import wait_until


def ids(batch: Batch | None) -> list[int]:
    assert batch is not None
    return sorted(set(batch.rows["group_id"].to_pylist()))


def label(buffer: Buffer, experience_id: int, reward: float) -> None:
    buffer.sql(f"UPDATE rft.experience SET reward = {reward} WHERE experience_id = {experience_id}")


def never() -> bool:
    return False


def silent(reason: str | None) -> None:
    pass


def num_drawn(buffer: Buffer) -> list[dict[str, Any]]:
    return rows(buffer, "SELECT trainer_step, count(*) AS n FROM rft.draw GROUP BY 1 ORDER BY 1")


def test_where_explorers_are_a_step_ahead_the_next_batch_is_drawn_before_the_step_is_published(buffer: Buffer) -> None:
    roles = Roles(buffer, offset=1)
    with roles.attempt() as attempt:
        for step in (1, 2, 3):
            roles.work()
            batch = attempt.draw(step, 2, timeout_s=5)
            ahead = attempt.draw_ahead(step + 1, 2)
            assert ids(ahead) == [2 * step + 1, 2 * step + 2]
            assert ahead is not None and ahead.short_reason is None
            assert set(ahead.rows["staleness"].to_pylist()) <= {0, 1}
            assert roles.plan() == 0  # the step that was drawn ahead has its groups
            assert batch is not None and ids(batch) == [2 * step - 1, 2 * step]
            roles.publish(attempt, step)
            assert attempt.is_current(ahead)
            again = attempt.draw(step + 1, 2, timeout_s=5)
            assert again is not None and again.rows.equals(ahead.rows)
    assert roles.planned() == [(0, 2), (1, 2), (2, 2), (3, 2)]


def test_on_policy_nothing_is_drawn_until_the_policy_that_samples_it_is_published(buffer: Buffer) -> None:
    roles = Roles(buffer, max_refill=0)
    with roles.attempt() as attempt:
        roles.work()
        roles.train(attempt, 1, publish=False)
        assert attempt.draw_ahead(2, 2) is None and roles.work() == 0 and attempt.draw_ahead(2, 2) is None
        roles.publish(attempt, 1)
        assert attempt.draw_ahead(2, 2) is None
        roles.work()
        assert ids(attempt.draw_ahead(2, 2)) == [3, 4]


def test_groups_that_will_be_too_old_are_replaced_only_when_their_step_begins(buffer: Buffer) -> None:
    roles = Roles(buffer, offset=1, max_staleness=0, max_refill=2)
    with roles.attempt() as attempt:
        roles.work()
        for _ in range(3):  # each would use up refill for groups of the same policy
            assert attempt.draw(1, 2, timeout_s=5) is not None
            assert attempt.draw_ahead(2, 2) is None
            assert roles.work() == 0
        assert rows(buffer, "SELECT count(*) AS n FROM rft.rollout_group WHERE NOT trainable") == [{"n": 0}]
        roles.publish(attempt, 1)
        assert attempt.draw(2, 2, timeout_s=0) is None  # those of before are replaced by groups of the new policy
        roles.work()
        batch = attempt.draw(2, 2, timeout_s=5)
        assert batch is not None and len(ids(batch)) == 2 and set(batch.rows["staleness"].to_pylist()) == {0}


def test_a_batch_that_will_stay_short_is_left_to_its_step(buffer: Buffer) -> None:
    roles = Roles(buffer, offset=1, max_refill=0)
    with roles.attempt() as attempt:
        roles.plan()
        roles.explore()
        roles.decide(lambda row: row["group_id"] != 4)
        roles.train(attempt, 1)
        assert attempt.draw_ahead(2, 2) is None
        assert [row["trainer_step"] for row in num_drawn(buffer)] == [1]
        batch = attempt.draw(2, 2, timeout_s=5)
        assert ids(batch) == [3] and batch is not None and "max_refill is used up" in str(batch.short_reason)


def test_what_was_labelled_after_the_draw_is_drawn_again_with_the_label(buffer: Buffer) -> None:
    roles = Roles(buffer, offset=1)
    with roles.attempt() as attempt:
        roles.work()
        attempt.draw(1, 2, timeout_s=5)
        ahead = attempt.draw_ahead(2, 2)
        assert ids(ahead) == [3, 4] and ahead is not None
        label(buffer, 1, 0.5)  # of the batch that is trained on: nothing that the next one reads
        assert attempt.is_current(ahead)
        label(buffer, 5, 0.25)
        assert not attempt.is_current(ahead)
        attempt.release(ahead)
        assert attempt.draw_ahead(2, 2) is None and attempt.draw(2, 2, timeout_s=0.1) is None  # its verdicts are stale
        assert roles.plan() == 0
        assert roles.decide() == [3]
        again = attempt.draw_ahead(2, 2)
        assert again is not None and again.rows["reward"].to_pylist() == [0.25, 1.0, 0.0, 1.0]
        assert attempt.is_current(again)


def test_a_reward_set_back_to_what_it_was_is_decided_on_again(buffer: Buffer) -> None:
    roles = Roles(buffer, offset=1)
    with roles.attempt() as attempt:
        roles.work()
        ahead = attempt.draw_ahead(1, 2)
        assert ahead is not None
        label(buffer, 1, 0.25)
        label(buffer, 1, 0.0)
        assert not attempt.is_current(ahead)


def test_a_purge_or_another_pipeline_also_makes_a_prepared_batch_stale(buffer: Buffer) -> None:
    roles = Roles(buffer, offset=1)
    with roles.attempt() as attempt:
        roles.work()
        ahead = attempt.draw_ahead(1, 2)
        assert ahead is not None
        buffer.sql("UPDATE rft.run SET pipeline_version = 'p2'")
        assert not attempt.is_current(ahead)
        buffer.sql("UPDATE rft.run SET pipeline_version = 'p1'")
        assert attempt.is_current(ahead)
    # No live trainer reads the rows any more.
    purge.purge(buffer, "experience_id = 1", reason="asked to", author="ada")
    assert rows(buffer, "SELECT count(*) AS n FROM rft.purged_experience") == [{"n": 1}]
    with roles.attempt(publish=False) as again:
        buffer.sql("UPDATE rft.draw SET attempt_id = %s", [again.attempt_id])
        assert not again.is_current(ahead)


def test_an_attempt_that_was_replaced_learns_it_from_the_batch_it_drew_ahead(buffer: Buffer) -> None:
    roles = Roles(buffer, offset=1)
    attempt = roles.attempt()
    roles.work()
    attempt.draw(1, 2, timeout_s=5)
    ahead = attempt.draw_ahead(2, 2)
    assert ids(ahead) == [3, 4] and ahead is not None
    buffer.sql("UPDATE rft.run_attempt SET lease_until = now() - interval '1 s', pid = 0")
    # A crash before anything was recorded: the next attempt draws the groups of both steps again.
    with roles.attempt() as newer:
        with pytest.raises(FencedError):
            attempt.is_current(ahead)
        with pytest.raises(FencedError):
            attempt.draw_ahead(3, 2)
        with pytest.raises(FencedError):
            attempt.release(ahead)
        assert ids(newer.draw(1, 2, timeout_s=5)) == [1, 2]
        assert ids(newer.draw_ahead(2, 2)) == [3, 4]
    attempt.close()


@pytest.mark.parametrize("is_pinned", [True, False])
def test_of_a_stored_selection_labels_count_unless_they_are_pinned(buffer: Buffer, is_pinned: bool) -> None:
    first = buffer.create_run(name="first", config={}, seed=1, steps=1, pipeline_version="none")
    with buffer.writer(first) as writer:
        writer.insert(own_group((0.0, 1.0)), own_group((0.0, 1.0), task_key="two"))
    chosen = "SELECT experience_id FROM rft.experience"
    run = buffer.create_run(
        name="second",
        config={},
        seed=1,
        steps=9,
        pipeline_version="none",
        mode="train",
        selected=stored_selection.select(buffer.database, chosen, pin_labels=is_pinned),
    )
    with buffer.attempt(run) as attempt:
        batch = attempt.draw(1, 3, timeout_s=5)
        ahead = attempt.draw_ahead(2, 3)  # the last row: short, because the selection ends
        assert batch is not None and ahead is not None and len(ahead) == 1 and ahead.short_reason is not None
        label(buffer, ahead.rows["experience_id"][0].as_py(), 0.75)
        assert attempt.is_current(ahead) == is_pinned
        if not is_pinned:
            attempt.release(ahead)
            again = attempt.draw(2, 3, timeout_s=5)
            assert again is not None and again.rows["reward"].to_pylist() == [0.75]
            assert again.rows["experience_id"].equals(ahead.rows["experience_id"])


def drawing(attempt: Attempt, algorithm: str = "grpo") -> NextBatch:
    return NextBatch(attempt, build_algorithm(algorithm), 2)


def drawn_and_left(batches: NextBatch, buffer: Buffer, step: int) -> None:
    """Begin to draw a step ahead, and return when it is drawn."""
    batches.draw_ahead(step)
    drawn = f"SELECT slot FROM rft.draw WHERE trainer_step = {step}"
    wait_until(lambda: rows(buffer, drawn), f"the draw of step {step}", pause_s=0.02)


class Waits:
    """Does something when a trainer waits for groups the second time: it has looked for them, and found none."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.reported: list[str | None] = []
        self._act = act

    def __call__(self, reason: str | None) -> None:
        self.reported.append(reason)
        if len(self.reported) == 2:
            self._act()


def rewards(prepared: PreparedBatch | None) -> list[float]:
    assert prepared is not None and prepared.train is not None
    found = prepared.train.rewards_B.tolist()
    assert found == prepared.drawn.rows["reward"].to_pylist()
    return found


def test_an_unchanged_batch_is_used_as_it_was_prepared_and_a_changed_one_is_not(buffer: Buffer) -> None:
    roles = Roles(buffer, offset=1)
    with roles.attempt() as attempt, drawing(attempt) as batches:
        roles.work()
        assert rewards(batches.draw(1, stop=never, waiting=silent)) == [0.0, 1.0, 0.0, 1.0]
        drawn_and_left(batches, buffer, 2)
        reported: list[str | None] = []
        prepared = batches.draw(2, stop=never, waiting=reported.append)
        assert rewards(prepared) == [0.0, 1.0, 0.0, 1.0] and reported == []  # it did not wait
        numbers = rows(buffer, "SELECT count(*) AS n, max(draw_id) AS last FROM rft.draw")
        assert numbers == [{"n": 8, "last": 8}]  # nothing was drawn twice
        roles.publish(attempt, 1)
        roles.work()
        drawn_and_left(batches, buffer, 3)
        label(buffer, 9, 0.25)
        assert rewards(batches.draw(3, stop=never, waiting=Waits(roles.decide))) == [0.25, 1.0, 0.0, 1.0]
    assert rows(buffer, "SELECT reward_used FROM rft.draw WHERE experience_id = 9") == [{"reward_used": 0.25}]


def test_what_cannot_be_trained_on_is_an_error_only_once_its_step_begins(buffer: Buffer) -> None:
    roles = Roles(buffer, offset=1)
    with roles.attempt() as attempt, drawing(attempt) as batches:
        roles.plan()
        roles.explore(lambda group: [None, 1.0] if group.group_id in (3, 5) else [0.0, 1.0])
        roles.decide()
        batches.draw(1, stop=never, waiting=silent)
        drawn_and_left(batches, buffer, 2)
        label(buffer, 5, 0.5)
        assert rewards(batches.draw(2, stop=never, waiting=Waits(roles.decide))) == [0.5, 1.0, 0.0, 1.0]
        roles.publish(attempt, 1)
        roles.plan()
        roles.explore(lambda group: [None, 1.0] if group.group_id == 5 else [0.0, 1.0])
        roles.decide()
        drawn_and_left(batches, buffer, 3)
        with pytest.raises(RoleFailedError, match="experience 9 was drawn without a reward"):
            batches.draw(3, stop=never, waiting=silent)


def fail_after_a_draw(attempt: Attempt, buffer: Buffer) -> None:
    with drawing(attempt) as batches:
        drawn_and_left(batches, buffer, 2)
        raise RuntimeError("stop here")


def test_what_is_not_trained_on_is_released(buffer: Buffer) -> None:
    roles = Roles(buffer, offset=1)
    with roles.attempt() as attempt:
        with drawing(attempt) as batches:
            roles.work()
            batches.draw(1, stop=never, waiting=silent)
            drawn_and_left(batches, buffer, 2)
        assert num_drawn(buffer) == [{"trainer_step": 1, "n": 4}]
        with pytest.raises(RuntimeError, match="stop here"):
            fail_after_a_draw(attempt, buffer)
        assert num_drawn(buffer) == [{"trainer_step": 1, "n": 4}]
        assert ids(attempt.draw(2, 2, timeout_s=5)) == [3, 4]


def is_within(thread_id: int, function: Any) -> bool:
    """Whether a thread is in a call of a function."""
    frame = sys._current_frames().get(thread_id)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


def test_a_draw_that_is_under_way_at_the_end_is_waited_for_and_released(buffer: Buffer) -> None:
    roles = Roles(buffer, offset=1)

    def let_go(thread_id: int) -> None:
        wait_until(lambda: is_within(thread_id, NextBatch.__exit__), "the end of the context")
        holder.execute("COMMIT")

    with roles.attempt() as attempt, buffer.database.dedicated() as holder:
        roles.work()
        holder.execute("BEGIN; LOCK TABLE rft.draw IN SHARE MODE")  # no row can be inserted
        with drawing(attempt) as batches:
            batches.draw_ahead(1)
            waits = "SELECT 1 FROM pg_locks WHERE relation = 'rft.draw'::regclass AND NOT granted"
            wait_until(lambda: rows(buffer, waits), "a draw that waits")
            ended = threading.Thread(target=let_go, args=[threading.get_ident()])
            ended.start()
        assert num_drawn(buffer) == []
        ended.join()
        assert ids(attempt.draw(1, 2, timeout_s=5)) == [1, 2]


def test_a_step_that_begins_before_its_groups_are_there_waits_for_them_itself(buffer: Buffer) -> None:
    roles = Roles(buffer)
    with roles.attempt() as attempt, drawing(attempt) as batches:
        batches.draw_ahead(1)
        assert batches.draw(1, stop=lambda: True, waiting=silent) is None
        waits = Waits(roles.work)
        assert len(rewards(batches.draw(1, stop=never, waiting=waits))) == 4
        assert waits.reported[0] is None


def configured(buffer: Buffer, **sections: Any) -> tuple[RunConfig, Run]:
    raw = {
        "run": {"name": "r"},
        "model": {"path": "."},
        "tasks": [{"name": "t", "source": "./none.py:none"}],
        "algorithm": {"name": "grpo", "group_size": 2},
        "explorer": {"reward": "exact_match"},
        "trainer": {},
        "steps": 9,
        **sections,
    }
    return parse_config(raw, Path("."), "the test"), Roles(buffer).run


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"sync": {"interval": 1, "offset": 0}}, [False, False, False]),
        ({"sync": {"interval": 1, "offset": 1}}, [True, True, True]),
        ({"sync": {"interval": 2, "offset": 0}}, [True, False, True]),
        ({"sync": {"offset": 1}, "sampling": {"order": "newest"}}, [False, False, False]),
        ({"sync": {"offset": 1}, "sampling": {"order": "prioritized"}}, [False, False, False]),
        (
            {
                "sync": {"offset": 1},
                "sampling": {
                    "mixture": [
                        {"source": "explorer", "ratio": 1},
                        {"source": "replay", "ratio": 1, "order": "uniform"},
                    ]
                },
            },
            [False, False, False],
        ),
    ],
)
def test_steps_are_drawn_ahead_only_where_later_groups_could_not_be_chosen_instead(
    buffer: Buffer, sections: dict[str, Any], expected: list[bool]
) -> None:
    config, run = configured(buffer, **sections)
    assert [draws_ahead(config, run, step) for step in (2, 3, 4)] == expected


def test_every_step_of_a_stored_selection_is_drawn_ahead(buffer: Buffer) -> None:
    first = buffer.create_run(name="first", config={}, seed=1, steps=1, pipeline_version="none")
    with buffer.writer(first) as writer:
        writer.insert(own_group((0.0, 1.0)))
    run = selecting(buffer, "SELECT experience_id FROM rft.experience", "second")
    config, _ = configured(buffer, sampling={"order": "prioritized"})
    assert draws_ahead(config, run, 2)
