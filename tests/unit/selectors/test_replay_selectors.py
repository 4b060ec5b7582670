"""GRESO and prioritised level replay against their formulas; easy to hard; restarts of all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rftdata.errors import ConfigError
from rftdata.selectors import Observation, Selector, build_selector
from rftdata.selectors.greso import Greso
from rftdata.selectors.plr import PrioritizedLevelReplay


def built(name: str, num_tasks: int, seed: int = 0, **args: Any) -> Any:
    return build_selector(name, args, range(num_tasks), seed)


def outcome(task_id: int, successes: float, trials: float = 4, group: int = 0, seq: int = 1) -> Observation:
    return Observation(task_id, successes, trials, kind="explicit", group=group, seq=seq)


def test_greso_skips_by_the_streak_of_groups_that_taught_nothing() -> None:
    selector: Greso = built("greso", 5, explore_easy=0.4, explore_hard=0.5, adjust=0.0)
    history = {1: [4, 4], 2: [0, 0, 0], 3: [4, 2], 4: [2, 4]}
    for task_id, successes in history.items():
        for group, s in enumerate(successes):
            selector.observe([outcome(task_id, s, group=10 * task_id + group)])
    assert selector.skip_probability(np.arange(5)) == pytest.approx([0, 1 - 0.4**2, 1 - 0.5**3, 0, 1 - 0.4])
    # A relabel breaks a streak where it is.
    selector.observe([Observation(2, 1.0, 0, kind="correction", group=21, seq=9, corrects=1)])
    assert selector.skip_probability(np.array([2])) == pytest.approx([1 - 0.5])
    selector.observe([Observation(3, 2.0, 0, kind="correction", group=31, seq=10, corrects=1)])
    assert selector.skip_probability(np.array([3])) == pytest.approx([1 - 0.4**2])


@pytest.mark.parametrize("name", ["greso", "plr"])
def test_what_a_person_states_changes_what_is_known_of_a_task(name: str) -> None:
    """A pass rate of one half instead of 0 of 8 is eight more successes in eight more trials."""

    def worth(*observations: Observation) -> float:
        """What these make known of their task, the only one of the selector's tasks that was tried."""
        selector = built(name, 4, **({"adjust": 0.0} if name == "greso" else {}))
        for observation in observations:
            selector.observe([observation])
        if isinstance(selector, Greso):
            return float(1 - selector.skip_probability(np.array([observations[0].task_id]))[0])
        assert selector.metrics()["tried"] == 1
        return float(selector.metrics()["mean_score"])

    stated = Observation(1, 8, 8, kind="manual", group=None, seq=2)
    assert worth(outcome(1, 0, 8), stated) == (1.0 if name == "greso" else 0.5)  # as good as any
    taken_back = Observation(2, -4, -4, kind="manual", group=None, seq=2)
    assert worth(outcome(2, 4, 8), taken_back) == (0.5 if name == "greso" else 0.0)  # 0 of 4
    assert worth(Observation(3, 8, 8, kind="manual", group=None, seq=3)) == (0.5 if name == "greso" else 0.0)


def test_greso_passes_over_as_many_as_it_states() -> None:
    selector: Greso = built("greso", 4000, adjust=0.0)
    selector.observe([outcome(i, 0, group=i) for i in range(4000)])
    selector.observe([outcome(i, 0, group=4000 + i) for i in range(2000)])
    chosen = np.array(selector.select(1000))  # 2000 · 0.25 + 2000 · 0.5 of an epoch would come
    assert (chosen < 2000).mean() == pytest.approx(1 / 3, abs=0.06)
    assert selector.metrics()["epoch"] == pytest.approx(1000 / 1500, abs=0.06)


def test_greso_moves_towards_its_targets() -> None:
    selector: Greso = built("greso", 9, target_easy=0.25, target_hard=0.25)
    selector.groups_per_step = 4
    selector.observe([outcome(0, 4), outcome(1, 4), outcome(2, 2), outcome(3, 2)])
    assert (selector.metrics()["explore_easy"], selector.metrics()["explore_hard"]) == pytest.approx((0.49, 0.51))
    selector.observe([outcome(0, 2), outcome(1, 0)])
    assert (selector.metrics()["explore_easy"], selector.metrics()["explore_hard"]) == pytest.approx((0.495, 0.505))


def test_greso_takes_every_task_when_nearly_all_are_skipped() -> None:
    selector: Greso = built("greso", 6, explore_hard=0.0, adjust=0.0)
    selector.observe([outcome(i, 0, group=i) for i in range(6)])
    assert len(set(selector.select(4))) == 4


def test_plr_mixes_rank_and_staleness() -> None:
    selector: PrioritizedLevelReplay = built("plr", 10, temperature=0.5, staleness=0.3)
    selector.observe([outcome(7, 2), outcome(2, 4), outcome(5, 1)])  # scores 0.5, 0, 0.375 at times 1, 2, 3
    positions, probabilities = selector.probabilities()
    by_rank = np.array([1, 1 / 9, 1 / 4]) / (1 + 1 / 9 + 1 / 4)
    assert positions.tolist() == [7, 2, 5]
    assert probabilities == pytest.approx(0.7 * by_rank + 0.3 * np.array([2, 1, 0]) / 3)
    selector.observe([Observation(2, -2.0, 0, kind="correction", group=0, seq=2, corrects=1)])  # now 0.5, too
    assert selector.probabilities()[1] == pytest.approx(
        0.7 * np.array([1, 1 / 4, 1 / 9]) / (1 + 1 / 9 + 1 / 4) + 0.3 * np.array([2, 1, 0]) / 3
    )


def test_plr_draws_by_these_probabilities() -> None:
    counts = np.zeros(4)
    for seed in range(3000):
        selector: PrioritizedLevelReplay = built("plr", 4, seed, temperature=1.0, staleness=0.5, replay=1.0)
        selector.observe([outcome(i, s) for i, s in enumerate([2, 1, 4])])
        counts[selector.select(1)] += 1
    expected = 3000 * np.array([*selector.probabilities()[1], 0])
    assert np.all(np.abs(counts - expected) <= 4 * np.sqrt(expected + 1))


def test_plr_replays_as_often_as_asked() -> None:
    for replay, expected in ((None, 0.2), (0.7, 0.7)):
        replayed = []
        for seed in range(300):
            selector: PrioritizedLevelReplay = built("plr", 500, seed, replay=replay)
            selector.observe([outcome(i, 2, group=i) for i in range(100)])
            replayed.append(np.mean(np.array(selector.select(20)) < 100))
        assert np.mean(replayed) == pytest.approx(expected, abs=4 * np.std(replayed) / np.sqrt(300))


def test_plr_takes_new_tasks_while_there_is_none_to_replay_and_old_ones_when_none_is_new() -> None:
    selector = built("plr", 6, replay=1.0)
    assert len(set(selector.select(6))) == 6
    selector = built("plr", 6, replay=0.0)
    selector.observe([outcome(i, 2) for i in range(6)])
    assert len(set(selector.select(6))) == 6


def test_easy_tasks_come_first_by_the_first_feature_then_by_the_second() -> None:
    selector = built("easy_to_hard", 5, features=["rate", "-length"])
    selector.set_features({"rate": np.array([0.5, 0.9, 0.5, 0.1, 0.5]), "length": np.array([7.0, 9, 3, 1, 7])})
    assert selector.select(7) == [1, 2, 0, 4, 3, 1, 2]
    with pytest.raises(ConfigError, match="a list of one or more keys"):
        built("easy_to_hard", 5, features=[])


def test_an_order_by_other_features_begins_again() -> None:
    numbers = {"rate": np.array([0.5, 0.9, 0.5, 0.1, 0.5]), "length": np.array([7.0, 9, 3, 1, 7])}
    selector = built("easy_to_hard", 5, features=["rate"])
    selector.set_features(numbers)
    assert selector.select(2) == [1, 0]
    for features in (["rate", "length"], ["-length"], ["rate"]):
        resumed = built("easy_to_hard", 5, features=features)
        resumed.set_features(numbers)
        resumed.load_state_dict(selector.state_dict())
        expected = {2: [1, 0], 1: [3, 2]}[len(features)] if features != ["rate"] else [2, 4]
        assert resumed.select(2) == expected


@pytest.mark.parametrize("name", ["shuffle", "random", "difficulty", "greso", "plr"])
def test_retired_tasks_come_no_more(name: str) -> None:
    selector: Selector = built(name, 30)
    selector.observe([outcome(i, i % 5, group=i) for i in range(0, 30, 2)])
    assert selector.retire(list(range(10)))
    for _ in range(8):
        assert min(selector.select(6)) >= 10
    assert selector.retire(list(range(10, 29)))
    assert selector.select(3) == [29] * 3


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("greso", {"adjust": 2}),
        ("plr", {"temperature": 0}),
        ("speed", {"low": 0.5, "high": 0.5}),
        ("speed", {"screen_rollouts": 0}),
        ("plr", {"replay": "often"}),
    ],
)
def test_wrong_values_are_refused(name: str, args: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"the selector '{name}'"):
        built(name, 3, **args)
