"""Sampling policies: what each order draws, how often, from where; the same for many readers and after a crash."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from rftdata import Buffer
from rftdata.attempts.attempt import Attempt
from rftdata.attempts.batch import Batch
from rftdata.errors import FencedError, QueryError
from tests.support.store_roles import Roles, own_group


def stored(buffer: Buffer, num: int, *, batch_groups: int = 1, source: str = "import", **sampling: Any) -> Roles:
    """A run on `num` stored groups, drawable as they are."""
    roles = Roles(buffer, batch_groups=batch_groups, sampling={"max_staleness": 1000, **sampling})
    buffer.sql("UPDATE rft.run SET mode = 'train', pipeline_version = 'none' WHERE run_id = %s", [roles.run_id])
    add(roles, num, source=source)
    return roles


def add(
    roles: Roles, num: int, *, source: str = "import", taskset: str = "mine", rewards: Sequence[float] = (0.0, 1.0)
) -> list[int]:
    groups = [own_group(rewards, task_key=str(i)) for i in range(num)]
    for group in groups:
        object.__setattr__(group, "source", source)
        object.__setattr__(group, "taskset", taskset)
    return roles.insert(*groups)


def draw(attempt: Attempt, step: int, num_groups: int = 1) -> Batch:
    batch = attempt.draw(step, num_groups, timeout_s=0)
    assert batch is not None, f"step {step} would wait"
    return batch


def groups_of(batch: Batch) -> list[int]:
    """In the order they were drawn."""
    return list(dict.fromkeys(batch.rows["group_id"].to_pylist()))


def chi_square(counts: Counter[int], expected: dict[int, float]) -> float:
    return sum((counts[key] - mean) ** 2 / mean for key, mean in expected.items())


def test_newest_draws_the_last_ones_in_first(buffer: Buffer) -> None:
    roles = stored(buffer, 5, order="newest")
    with roles.attempt() as attempt:
        assert groups_of(draw(attempt, 1, 2)) == [5, 4]
        (late,) = add(roles, 1)
        assert groups_of(draw(attempt, 2, 3)) == [late, 3, 2]


def test_fifo_with_reuse_draws_the_oldest_until_it_is_used_up(buffer: Buffer) -> None:
    """As Reverb's Fifo selector with max_times_sampled."""
    roles = stored(buffer, 4, max_times_sampled=2)
    with roles.attempt() as attempt:
        assert [groups_of(draw(attempt, step, 2)) for step in range(1, 5)] == [[1, 2], [1, 2], [3, 4], [3, 4]]
        last = draw(attempt, 5, 2)
        assert (last.num_groups, last.short_reason) == (
            0,
            "0 of 2 groups survived: the stored experiences are used up",
        )


def test_uniform_draws_every_group_with_the_same_chance(buffer: Buffer) -> None:
    roles = stored(buffer, 20, order="uniform", max_times_sampled=0)
    with roles.attempt() as attempt:
        counts = Counter(groups_of(draw(attempt, step))[0] for step in range(1, 601))
    assert chi_square(counts, dict.fromkeys(range(1, 21), 30.0)) < 43.8  # p = 0.001 at 19 degrees of freedom


def test_uniform_order_gives_new_groups_the_same_chance_as_waiting_ones(buffer: Buffer) -> None:
    """Each round: 6 waited through a draw, 6 come in, one is drawn; fixed random keys would favour the new ones."""
    roles = stored(buffer, 12, order="uniform")
    new = {*range(7, 13)}
    num_new = 0
    with roles.attempt() as attempt:
        for step in range(1, 201):
            group = groups_of(draw(attempt, step))[0]
            num_new += group in new
            old = buffer.sql("SELECT item_id FROM rft.worklist WHERE available ORDER BY 1")["item_id"].to_pylist()
            # Back to 6 and 6: all but six leave, and six come.
            buffer.sql(
                "UPDATE rft.worklist SET available = false WHERE available AND item_id <> ALL (%s)", [old[::2][:6]]
            )
            new = set(add(roles, 6))
    assert abs(num_new - 100) < 3.3 * 50**0.5, num_new


def test_prioritized_draws_in_proportion_to_the_weight(buffer: Buffer) -> None:
    roles = stored(buffer, 10, order="prioritized", max_times_sampled=0, priority={"exponent": 2.0})
    with roles.attempt() as attempt:
        assert attempt.set_priorities({group: group / 2 for group in range(1, 11)}) == 10
        counts = Counter(groups_of(draw(attempt, step))[0] for step in range(1, 801))
    total = sum(group**2 for group in range(1, 11))
    expected = {group: 800 * group**2 / total for group in range(2, 11)}
    assert chi_square(counts, expected) < 26.1  # p = 0.001 at 8 degrees of freedom


def test_importance_weights_undo_the_priorities(buffer: Buffer) -> None:
    roles = stored(buffer, 3, order="prioritized", priority={"exponent": 1.0, "importance_exponent": 0.5})
    with roles.attempt() as attempt:
        attempt.set_priorities({1: 1.0, 2: 4.0, 3: 16.0})
        batch = draw(attempt, 1, 3)
        weights = {row["group_id"]: row["importance_weight"] for row in batch.rows.to_pylist()}
        assert weights == pytest.approx({1: 1.0, 2: 0.5, 3: 0.25})
        assert draw(attempt, 1, 3).rows.equals(batch.rows)
    noted = buffer.sql("SELECT DISTINCT item_id, importance_weight FROM rft.draw").to_pylist()
    assert {row["item_id"]: row["importance_weight"] for row in noted} == weights


def test_rank_draws_in_proportion_to_a_power_of_the_rank_however_far_apart_priorities_are(buffer: Buffer) -> None:
    roles = stored(
        buffer, 10, order="rank", max_times_sampled=0, priority={"exponent": 1.0, "importance_exponent": 0.5}
    )
    with roles.attempt() as attempt:
        attempt.set_priorities({group: 10.0 ** (10 - group) for group in range(1, 11)})
        counts = Counter(groups_of(draw(attempt, step))[0] for step in range(1, 801))
        batch = draw(attempt, 801, 3)
    total = sum(1 / rank for rank in range(1, 11))
    expected = {rank: 800 / rank / total for rank in range(1, 11)}
    assert chi_square(counts, expected) < 27.9  # p = 0.001 at 9 degrees of freedom
    weights = {row["group_id"]: row["importance_weight"] for row in batch.rows.to_pylist()}
    worst = max(weights)  # of all ten, rank = number
    assert weights == pytest.approx({rank: (rank / worst) ** 0.5 for rank in weights})


def test_a_rewind_from_a_replay_lane_restores_the_priority_that_ranks_use(buffer: Buffer) -> None:
    lanes = [
        {"source": "import", "ratio": 1, "order": "rank"},
        {"source": "replay", "ratio": 1, "order": "uniform", "max_times_sampled": 3},
    ]
    roles = stored(buffer, 6, mixture=lanes)
    weights = "SELECT item_id, lane, draw_weight, available FROM rft.worklist ORDER BY item_id"
    with roles.attempt() as attempt:
        attempt.set_priorities({group: 10.0 * group for group in range(1, 7)})
        before = buffer.sql(weights).to_pylist()
        for step in range(1, 4):
            draw(attempt, step, 2)
        assert buffer.sql(weights).to_pylist() != before
    with roles.attempt():
        assert buffer.sql(weights).to_pylist() == before


def test_rank_in_a_long_queue_reaches_all_and_prefers_the_best(buffer: Buffer) -> None:
    roles = stored(buffer, 2000, order="rank", max_times_sampled=0, priority={"exponent": 0.5})
    quantiles: list[float] = []
    with roles.attempt() as attempt:
        attempt.set_priorities({group: float(2001 - group) for group in range(1, 2001)})
        for step in range(1, 101):
            quantiles += [group / 2000 for group in groups_of(draw(attempt, step, 8))]
    # The density of the quantile q is (1 - α) / q^α; its mean is (1 - α) / (2 - α) = 1/3, its deviation 0.298.
    assert abs(sum(quantiles) / 800 - 1 / 3) < 4 * 0.298 / 800**0.5
    assert max(quantiles) > 0.99 and len(set(quantiles)) > 500


@pytest.mark.parametrize("priority", [-1.0, float("nan"), float("inf")])
def test_a_priority_that_is_none_is_refused(buffer: Buffer, priority: float) -> None:
    roles = stored(buffer, 1, order="prioritized")
    with roles.attempt() as attempt, pytest.raises(QueryError, match="priority of group 1"):
        attempt.set_priorities({1: priority})


def test_a_fenced_trainer_sets_no_priorities(buffer: Buffer) -> None:
    roles = stored(buffer, 1, order="prioritized")
    old = roles.attempt()
    buffer.sql("UPDATE rft.run_attempt SET lease_until = now() - interval '1 s'")
    with roles.attempt(), pytest.raises(FencedError):
        old.set_priorities({1: 1.0})
    old.close()


def test_reuse_waits_for_the_cooldown(buffer: Buffer) -> None:
    roles = stored(buffer, 3, max_times_sampled=3, cooldown_steps=3)
    with roles.attempt() as attempt:
        drawn = [groups_of(draw(attempt, step)) for step in range(1, 10)]
    assert drawn == [[1], [2], [3]] * 3


def test_a_crash_returns_uses_and_the_resumed_steps_draw_the_same(buffer: Buffer) -> None:
    roles = stored(buffer, 12, order="uniform", max_times_sampled=3, cooldown_steps=2)
    attempt = roles.attempt()
    first = []
    for step in range(1, 9):
        first.append(groups_of(draw(attempt, step, 3)))
        if step == 4:
            attempt.commit_checkpoint(4, "/checkpoints/4")
            before = state(buffer)
    buffer.sql("UPDATE rft.run_attempt SET lease_until = now() - interval '1 s'")
    with roles.attempt() as again:
        assert state(buffer) == before
        assert [groups_of(draw(again, step, 3)) for step in range(5, 9)] == first[4:]
    attempt.close()
    assert max(Counter(group for groups in first for group in groups).values()) <= 3


def state(buffer: Buffer) -> list[dict[str, Any]]:
    return buffer.sql(
        "SELECT item_id, available, times_sampled, resume_step, CASE WHEN available THEN draw_key END AS draw_key"
        " FROM rft.worklist ORDER BY item_id"
    ).to_pylist()


@pytest.mark.parametrize("order", ["uniform", "prioritized", "rank"])
def test_a_batch_given_back_is_drawn_again(buffer: Buffer, order: str) -> None:
    roles = stored(buffer, 9, order=order, max_times_sampled=2)
    with roles.attempt() as attempt:
        draw(attempt, 1, 3)
        before = state(buffer)
        batch = draw(attempt, 2, 3)
        attempt.release(batch)
        again = draw(attempt, 2, 3)
        assert groups_of(again) == groups_of(batch)
        attempt.release(again)
        after = {row["item_id"]: row["times_sampled"] for row in state(buffer)}
        assert after == {row["item_id"]: row["times_sampled"] for row in before}


def test_a_mixture_keeps_its_ratio_at_every_step_and_fills_a_dry_source(buffer: Buffer) -> None:
    mixture = [{"source": "import", "ratio": 5}, {"source": "human", "ratio": 3}]
    roles = stored(buffer, 40, mixture=mixture)
    people = set(add(roles, 9, source="human"))
    made = set(add(roles, 5, source="synthesis"))
    human = total = 0
    with roles.attempt() as attempt:
        for step in range(1, 9):
            groups = groups_of(draw(attempt, step, 3))
            human, total = human + len(people & {*groups}), total + 3
            assert abs(human - 3 / 8 * total) < 1
        assert human == 9  # dry from here on
        (late,) = add(roles, 1, source="human")
        drawn = [groups_of(draw(attempt, step, 3)) for step in range(9, 18)]
        assert [len(groups) for groups in drawn] == [3] * 8 + [2]
        # A missed share is not made up for: the late group was drawn, and the rest came from the other source.
        assert [group for groups in drawn for group in groups if group in people | {late}] == [late]
        assert not made & {group for groups in drawn for group in groups}
        # A source that has things again gets its ratio, no more.
        more = set(add(roles, 20, source="human")) | set()
        add(roles, 20)
        counts = [len(more & {*groups_of(draw(attempt, step, 4))}) for step in range(18, 24)]
        assert sum(counts) == 9 and max(counts) <= 2


def test_orders_and_reuse_may_differ_between_sources_and_what_was_drawn_can_be_replayed(buffer: Buffer) -> None:
    mixture = [
        {"source": "import", "ratio": 1},
        {"source": "replay", "ratio": 1, "order": "uniform", "max_times_sampled": 0, "cooldown_steps": 2},
    ]
    roles = stored(buffer, 30, mixture=mixture)
    with roles.attempt() as attempt:
        drawn = [groups_of(draw(attempt, step, 2)) for step in range(1, 13)]
        assert drawn[:2] == [[1, 2], [3, 4]]  # nothing to replay yet: fresh ones in its place
        fresh: list[int] = []
        for groups in drawn[2:]:
            new, old = groups
            assert new not in fresh and old in [g for before in drawn for g in before]
            fresh.append(new)
        assert fresh == list(range(5, 15))


def test_stratified_batches_hold_the_same_number_of_each_taskset(buffer: Buffer) -> None:
    roles = stored(buffer, 0, stratify="taskset")
    roles.plan_config = type(roles.plan_config)(
        **{
            **vars(roles.plan_config),
            "tasksets": tuple(t.model_copy(update={"name": n}) for n in "ab" for t in roles.plan_config.tasksets),
        }
    )
    a, b = set(add(roles, 30, taskset="a")), set(add(roles, 6, taskset="b"))
    with roles.attempt() as attempt:
        for step in range(1, 4):
            groups = {*groups_of(draw(attempt, step, 4))}
            assert (len(groups & a), len(groups & b)) == (2, 2)
        assert len({*groups_of(draw(attempt, 4, 4))} & a) == 4


def test_a_lane_waits_for_explorers_where_they_can_still_bring_something(buffer: Buffer) -> None:
    mixture = [{"source": "explorer", "ratio": 1}, {"source": "import", "ratio": 1}]
    roles = Roles(buffer, batch_groups=4, max_refill=2, sampling={"mixture": mixture, "max_staleness": 100})
    with roles.attempt() as attempt:
        imported = set(roles.insert(*[own_group(task_key=str(i)) for i in range(20)]))
        roles.decide()
        assert attempt.draw(1, 4, timeout_s=0) is None
        roles.work()
        assert roles.planned() == [(0, 2 + 20)]  # half a batch of its own, and the imported ones
        batch = draw(attempt, 1, 4)
        assert len({*groups_of(batch)} & imported) == 2
        roles.publish(attempt, 1)
        roles.work(keep=lambda row: False)  # all dropped, refills too
        assert len({*groups_of(draw(attempt, 2, 4))} & imported) == 4


def test_staleness_binds_whatever_the_priority(buffer: Buffer) -> None:
    roles = Roles(
        buffer,
        batch_groups=2,
        offset=3,
        steps=8,
        max_refill=2,
        sampling={"order": "prioritized", "max_times_sampled": 0, "max_staleness": 1},
    )
    with roles.attempt() as attempt:
        roles.work()
        attempt.set_priorities({1: 1e6, 2: 1e6})
        assert groups_of(draw(attempt, 1, 1))[0] in (1, 2)
        for step in (1, 2):
            roles.publish(attempt, step)
        assert attempt.draw(3, 2, timeout_s=0) is None
        roles.work()
        batch = draw(attempt, 3, 2)
        assert max(batch.rows["staleness"].to_pylist()) <= 1 and not {1, 2} & {*groups_of(batch)}
        # What was drawn had its turn: only groups that never were are closed and planned again.
        drawn = buffer.sql("SELECT DISTINCT item_id FROM rft.draw WHERE trainer_step = 1")["item_id"].to_pylist()
        assert {roles.group(group)["trainable"] for group in drawn} == {True}


@pytest.mark.parametrize("order", ["fifo", "uniform", "prioritized", "rank"])
def test_many_readers_of_one_attempt_draw_each_group_once_and_a_step_once(buffer: Buffer, order: str) -> None:
    roles = stored(buffer, 60, order=order)
    found: list[tuple[int, list[int]]] = []
    with roles.attempt() as attempt:

        def read(steps: Sequence[int]) -> None:
            for step in steps:
                found.append((step, groups_of(draw(attempt, step, 3))))

        threads = [
            threading.Thread(target=read, args=[steps]) for steps in (range(1, 21), range(1, 21), range(20, 0, -1))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 60
    by_step: dict[int, list[int]] = {}
    for step, groups in found:
        assert by_step.setdefault(step, groups) == groups
    assert sorted(group for groups in by_step.values() for group in groups) == list(range(1, 61))


def test_many_readers_keep_the_ratio_of_a_mixture(buffer: Buffer) -> None:
    mixture = [{"source": "import", "ratio": 2, "order": "uniform"}, {"source": "human", "ratio": 1}]
    roles = stored(buffer, 60, mixture=mixture)
    people = set(add(roles, 40, source="human"))
    with roles.attempt() as attempt:
        found: list[int] = []
        threads = [
            threading.Thread(target=lambda s=s: [found.extend(groups_of(draw(attempt, k, 2))) for k in range(s, 31, 3)])
            for s in (1, 2, 3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(set(found)) == 60 and len(people & {*found}) == 20


def test_replay_starts_where_a_source_has_no_uses_left(buffer: Buffer) -> None:
    mixture = [
        {"source": "import", "ratio": 1, "max_times_sampled": 0},
        {"source": "human", "ratio": 1},
        {"source": "replay", "ratio": 1, "max_times_sampled": 2},
    ]
    roles = stored(buffer, 1, mixture=mixture)
    people = add(roles, 2, source="human")
    with roles.attempt() as attempt:
        drawn = [{*groups_of(draw(attempt, step, 3))} for step in range(1, 6)]
    assert drawn == [{1, *people}, {1, *people}, {1}, {1}, {1}]
