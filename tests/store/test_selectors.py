"""Selectors: five methods, a state that is JSON, every task once per epoch. Plug-ins pass the same tests."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rftdata.errors import ConfigError
from rftdata.selectors import SELECTORS, Observation, Selector, build_selector

KINDS = pytest.mark.parametrize("kind", SELECTORS)


def build(kind: str, num_tasks: int, seed: int = 0) -> Selector:
    return build_selector(kind, {}, num_tasks, seed)


@KINDS
def test_every_task_comes_once_per_epoch(kind: str) -> None:
    selector = build(kind, 7)
    for _ in range(3):
        assert sorted(selector.select(7)) == list(range(7))


@KINDS
@settings(max_examples=30, deadline=None)
@given(
    counts=st.lists(st.integers(0, 9), max_size=8),
    cut=st.integers(0, 8),
    num_tasks=st.integers(1, 6),
    seed=st.integers(0, 2**31),
)
def test_a_restart_from_the_saved_state_changes_nothing(
    kind: str, counts: list[int], cut: int, num_tasks: int, seed: int
) -> None:
    through = build(kind, num_tasks, seed)
    wanted = [through.select(count) for count in counts]
    first = build(kind, num_tasks, seed)
    got = [first.select(count) for count in counts[:cut]]
    second = build(kind, num_tasks, seed)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    got += [second.select(count) for count in counts[cut:]]
    assert got == wanted


@KINDS
def test_choosing_does_not_depend_on_how_it_is_cut_into_calls(kind: str) -> None:
    once, often = build(kind, 5), build(kind, 5)
    assert once.select(12) == [position for _ in range(12) for position in often.select(1)]


@KINDS
def test_outcomes_are_taken_and_metrics_are_numbers(kind: str) -> None:
    selector = build(kind, 4)
    selector.select(6)
    selector.observe([Observation(position=2, successes=1.0, trials=4.0, kind="explicit")])
    assert selector.metrics() == {"epoch": 1.5}


def test_sequential_keeps_loading_order() -> None:
    assert build("sequential", 3).select(5) == [0, 1, 2, 0, 1]


def test_shuffle_orders_every_epoch_and_every_seed_anew() -> None:
    selector = build("shuffle", 50)
    first, second = selector.select(50), selector.select(50)
    assert first != second and first != build("shuffle", 50, seed=1).select(50)


def test_arguments_a_selector_does_not_take_are_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="'shuffle' does not take these arguments"):
        build_selector("shuffle", {"speed": 3}, 4, 0)
