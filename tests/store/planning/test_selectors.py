"""Selectors: five methods, a state that is JSON, no task twice in a choice; those by epochs every task once per epoch."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rftdata.errors import ConfigError
from rftdata.selectors import SELECTORS, Observation, Selector, build_selector

BY_EPOCHS = pytest.mark.parametrize("kind", ["sequential", "shuffle", "easy_to_hard", "speed"])
KINDS = pytest.mark.parametrize("kind", [*SELECTORS.builtins, "thompson"])
ARGS = {
    "easy_to_hard": {"features": ["easy", "-hard"]},
    "difficulty": {"features": ["easy", "hard"], "temperature": 0.1},
}


def build_over(kind: str, task_ids: Sequence[int], seed: int = 0) -> Selector:
    """A selector; features follow from a task's id."""
    name = "difficulty" if kind == "thompson" else kind
    selector = build_selector(name, ARGS.get(kind, {}), task_ids, seed)
    ids = np.array(task_ids)
    if selector.feature_keys:
        selector.set_features({"easy": ids % 3 / 4, "hard": ids % 7 / 10 + 0.3})
    return selector


def build(kind: str, num_tasks: int, seed: int = 0) -> Selector:
    return build_over(kind, range(num_tasks), seed)


@BY_EPOCHS
def test_every_task_comes_once_per_epoch(kind: str) -> None:
    selector = build(kind, 7)
    for _ in range(3):
        assert sorted(selector.select(7)) == list(range(7))


@KINDS
@settings(max_examples=30, deadline=None)
@given(
    counts=st.lists(st.integers(1, 9), max_size=8),
    cut=st.integers(0, 8),
    num_tasks=st.integers(1, 12),
    seed=st.integers(0, 2**31),
)
def test_a_restart_that_learns_again_and_takes_the_saved_state_changes_nothing(
    kind: str, counts: list[int], cut: int, num_tasks: int, seed: int
) -> None:
    def outcomes(plan: int, chosen: list[int]) -> list[Observation]:
        learned = [
            Observation(i, float((i + plan) % 5), 4.0, kind="explicit", group=100 * plan + g, seq=plan)
            for g, i in enumerate(chosen)
        ]
        return [
            *learned,
            Observation(chosen[0], -0.5, 0.0, kind="correction", group=100 * plan, seq=plan, corrects=plan),
        ]

    selector = build(kind, num_tasks, seed)
    history: list[list[Observation]] = []
    again: Selector | None = None
    for plan, count in enumerate(counts, start=1):
        if plan == cut:
            again = build(kind, num_tasks, seed)
            for observations in history:
                again.observe(observations)
            again.load_state_dict(json.loads(json.dumps(selector.state_dict())))
        chosen = selector.select(count)
        assert again is None or again.select(count) == chosen
        history.append(outcomes(plan, chosen))
        for one in (selector, again):
            if one is not None:
                one.observe(history[-1])
        assert again is None or again.state_dict() == selector.state_dict()


@KINDS
@settings(max_examples=30, deadline=None)
@given(counts=st.lists(st.integers(1, 20), max_size=8), num_tasks=st.integers(1, 20), seed=st.integers(0, 2**31))
def test_no_task_comes_twice_in_a_choice_unless_there_are_too_few(
    kind: str, counts: list[int], num_tasks: int, seed: int
) -> None:
    selector = build(kind, num_tasks, seed)
    for plan, count in enumerate(counts, start=1):
        chosen = selector.select(count)
        assert len(chosen) == count and (count > num_tasks or len(set(chosen)) == count)
        selector.observe(
            [Observation(i, 4.0 * (i % 2), 4.0, kind="explicit", group=g, seq=plan) for g, i in enumerate(chosen)]
        )


@BY_EPOCHS
@settings(max_examples=40, deadline=None)
@given(counts=st.lists(st.integers(1, 7), min_size=1, max_size=12), seed=st.integers(0, 2**31))
def test_epochs_stay_whole_where_choices_reach_from_one_into_the_next(kind: str, counts: list[int], seed: int) -> None:
    """A task that the choice already contains is put off to the next choice; no task is more than one epoch ahead."""
    selector = build(kind, 7, seed)
    times = dict.fromkeys(range(7), 0)
    for count in counts:
        for task_id in selector.select(count):
            times[task_id] += 1
        assert max(times.values()) - min(times.values()) <= 2


@BY_EPOCHS
def test_choosing_does_not_depend_on_how_it_is_cut_into_calls(kind: str) -> None:
    once, often = build(kind, 5), build(kind, 5)
    assert once.select(12) == [task_id for _ in range(12) for task_id in often.select(1)]


@KINDS
def test_outcomes_are_taken_and_metrics_are_numbers(kind: str) -> None:
    selector = build(kind, 4)
    selector.select(6)
    selector.observe([Observation(task_id=2, successes=1.0, trials=4.0, kind="explicit")])
    selector.observe([Observation(task_id=99, successes=1.0, trials=4.0, kind="explicit")])  # not active
    found = selector.metrics()
    assert found and all(isinstance(value, float) for value in found.values())
    if "epoch" in found:
        assert found["epoch"] == 1.5


def restarted(kind: str, before: Selector, task_ids: list[int]) -> Selector:
    """The same selector in another process, over the tasks there are by now."""
    after = build_over(kind, task_ids, before.seed)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    return after


@BY_EPOCHS
@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_no_task_comes_twice_in_an_epoch_when_tasks_are_excluded_and_added(
    kind: str, data: st.DataObject, seed: int
) -> None:
    ids = data.draw(st.lists(st.integers(1, 10**9), min_size=2, max_size=30, unique=True).map(sorted))
    selector = build_over(kind, ids, seed)
    first = selector.select(data.draw(st.integers(1, len(ids) - 1)))
    assert len(set(first)) == len(first)
    excluded = data.draw(st.sets(st.sampled_from(ids), max_size=len(ids) - 1))
    added = [max(ids) + n for n in range(1, data.draw(st.integers(1, 5)))]
    left = [task_id for task_id in ids if task_id not in excluded]
    selector = restarted(kind, selector, left + added)
    rest = [task_id for task_id in left if task_id not in first]
    assert sorted(selector.select(len(rest))) == rest
    assert sorted(selector.select(len(left + added))) == left + added


@BY_EPOCHS
def test_excluding_tasks_moves_no_other(kind: str) -> None:
    ids = list(range(40))
    order = build_over(kind, ids, 5).select(40)
    fewer = build_over(kind, [i for i in ids if i % 4], 5).select(30)
    assert fewer == [i for i in order if i % 4]


def test_shuffle_favours_no_place() -> None:
    """Over many epochs every task stands on average in the middle."""
    epochs = [build("shuffle", 20, seed).select(20) for seed in range(400)]
    means = [sum(order.index(i) for order in epochs) / len(epochs) for i in range(20)]
    assert max(abs(mean - 9.5) for mean in means) < 1.2  # four standard errors


def test_sequential_keeps_loading_order() -> None:
    assert build("sequential", 3).select(5) == [0, 1, 2, 0, 1]


def test_shuffle_orders_every_epoch_and_every_seed_again() -> None:
    selector = build("shuffle", 50)
    first, second = selector.select(50), selector.select(50)
    assert first != second and first != build("shuffle", 50, seed=1).select(50)


def test_arguments_a_selector_does_not_take_are_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="the selector 'shuffle' has no argument 'speed'; allowed: none"):
        build_selector("shuffle", {"speed": 3}, range(4), 0)
