"""Which taskset is next: weights, schedules, temperature; and what a configuration says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rftcore.config.run import parse_config
from rftcore.resolved import ResolvedRun
from rftdata.config import MixingConfig, TasksetConfig
from rftdata.errors import ConfigError
from rftdata.planning.mixing import check_weights, mix, weight_at
from tests.support.checking import refuse_names


def tasksets(*weights: Any) -> list[TasksetConfig]:
    return [TasksetConfig(name=f"set{i}", source="none", weight=weight) for i, weight in enumerate(weights)]


def mixed(
    steps: list[int],
    *weights: Any,
    sizes: list[int] | None = None,
    temperature: float | None = None,
    room: dict[str, int] | None = None,
) -> list[str]:
    sets = tasksets(*weights)
    names = [t.name for t in sets]
    return mix(
        steps,
        sets,
        MixingConfig(temperature=temperature),
        dict(zip(names, sizes or [1] * len(sets), strict=True)),
        {**dict.fromkeys(names), **(room or {})},
        {},
    )


def test_a_weight_is_a_line_between_its_points() -> None:
    schedule = ((10, 1.0), (20, 0.5), (40, 0.0))
    assert [weight_at(schedule, step) for step in (0, 10, 12, 15, 20, 30, 40, 99)] == [1, 1, 0.9, 0.75, 0.5, 0.25, 0, 0]
    assert weight_at(2.5, 7) == 2.5


def test_proportions_hold_in_every_stretch() -> None:
    names = mixed([0] * 90, 2.0, 1.0)
    for start in range(88):
        assert names[start : start + 3].count("set0") == 2


def test_a_schedule_changes_the_proportions_without_making_up_for_the_past() -> None:
    steps = [step for step in range(300) for _ in range(10)]
    names = mixed(steps, ((0, 1.0), (100, 1.0), (200, 0.25)), ((0, 0.0), (100, 0.0), (200, 0.75)))
    share = [names[10 * step : 10 * (step + 20)].count("set1") / 200 for step in (0, 80, 140, 200, 280)]
    assert share == pytest.approx([0, 0, 0.375, 0.75, 0.75], abs=0.06)
    assert names[1000:2000].count("set1") == pytest.approx(sum(0.075 * step for step in range(100)), abs=1)


def test_temperature_mixes_by_size() -> None:
    for temperature, expected in ((1.0, 800), (2.0, 667), (1000.0, 501)):
        names = mixed([0] * 1000, 1.0, 1.0, sizes=[400, 100], temperature=temperature)
        assert names.count("set0") == pytest.approx(expected, abs=1)
    assert mixed([0] * 90, 2.0, 1.0, sizes=[100, 100], temperature=1).count("set0") == 60
    assert mixed([0] * 9, 1.0, 1.0, sizes=[2000, 1000], temperature=0.01) == ["set0"] * 9
    assert mixed([0] * 3, 1.0, 1.0, sizes=[2000, 1], temperature=0.001, room={"set0": 1}) == ["set0", "set1", "set1"]
    assert mixed([0] * 100, 1.0, 1.0, sizes=[400, 100]).count("set0") == 50


def test_a_taskset_with_nothing_left_leaves_its_places_to_the_others() -> None:
    names = mixed([0] * 10, 1.0, 1.0, room={"set0": 2})
    assert names.count("set0") == 2 and names.count("set1") == 8
    assert mixed([0] * 10, 1.0, 1.0, room={"set0": 2, "set1": 3}).count("set1") == 3


@pytest.mark.parametrize(
    "weight", [0, -1, [[0, 1.0], [0, 2.0]], [[0.5, 1]], [[0, -1]], [], [[1]], "much", True, [[0, 1], 3]]
)
def test_a_wrong_weight_is_refused(weight: Any) -> None:
    with pytest.raises(ValueError, match="weight"):
        tasksets(weight)


def test_weights_that_are_all_0_at_a_step_are_refused() -> None:
    with pytest.raises(ConfigError, match="at explorer step 10 every taskset has the weight 0"):
        check_weights(tasksets([[0, 1], [10, 0]], [[10, 0], [20, 1]]))
    check_weights(tasksets([[0, 1], [10, 0]], [[5, 0], [20, 1]]))


RUN: dict[str, Any] = {
    "run": {"name": "mixed"},
    "model": {"path": "nowhere"},
    "tasks": [{"name": "sums", "source": "none"}],
    "algorithm": {"name": "grpo", "group_size": 8},
    "trainer": {"batch_groups": 2},
    "explorer": {"engine": "transformers", "reward": ["exact_match"]},
    "steps": 4,
}


def configured(*, algorithm: dict[str, Any] | None = None, **taskset: Any) -> None:
    raw = {**RUN, "tasks": [{**RUN["tasks"][0], **taskset}], "algorithm": {**RUN["algorithm"], **(algorithm or {})}}
    refuse_names(ResolvedRun(parse_config(raw, Path.cwd(), "test")))


@pytest.mark.parametrize(
    ("taskset", "algorithm", "said"),
    [
        ({"weight": [[0, 1], [5, 0]]}, {}, "at explorer step 5 every taskset has the weight 0"),
        ({"group_size": 1}, {}, r"group_size \(1\) of the taskset 'sums' is below algorithm.min_group_size \(2\)"),
        ({"group_size": 1}, {"min_group_size": 1}, "too small for grpo"),
        ({"selector": {"type": "speed"}, "group_size": 4}, {}, "1 to 3, below the group's size"),
        ({"selector": {"type": "speed", "screen_rollout": 2}}, {}, "did you mean 'screen_rollouts'"),
        ({"selector": {"type": "easy_to_hard"}}, {}, "needs 'features'"),
        ({"max_repeats": 0}, {}, "max_repeats"),
        ({"selector": {"type": "difficult"}}, {}, "did you mean 'difficulty'"),
    ],
)
def test_what_cannot_be_tried_is_refused_before_anything_starts(
    taskset: dict[str, Any], algorithm: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        configured(algorithm=algorithm, **taskset)


def test_sizes_and_selectors_of_tasksets_are_taken() -> None:
    configured(group_size=4, max_repeats=3, selector={"type": "speed", "screen_rollouts": 2}, weight=[[0, 1], [5, 0.5]])


def test_evaluations_have_no_weights() -> None:
    raw = {**RUN, "eval": {"every": 10, "tasks": [{"name": "val", "source": "none", "group_size": 4}]}}
    with pytest.raises(ConfigError, match="group_size of the taskset 'val' has no effect in evaluations"):
        parse_config(raw, Path.cwd(), "test")
