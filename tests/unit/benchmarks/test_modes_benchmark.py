"""`rft bench modes`: each layout gets its GPUs, runs differ in layout, mode and seed alone, and ratios compare what they name."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.harness.layout import Layout
from benchmarks.runs.modes import _CONFIG, settings, summary
from rftcore.config.run import load_config
from rftcore.run.placement import Machine, place


@pytest.mark.parametrize(
    ("layout", "gpus"),
    [
        (Layout(6, 1, 2), [1, 1, 1, 1, 1, 1, 2]),
        (Layout(4, 1, 4), [1, 1, 1, 1, 4]),
        (Layout(2, 2, 4), [2, 2, 4]),
        (Layout(7, 1, 1), [1] * 8),
    ],
)
@pytest.mark.parametrize("mode", ["on_policy", "one_step_off", "asynchronous"])
def test_eight_gpus_are_divided_as_the_layout_says(layout: Layout, gpus: list[int], mode: str) -> None:
    config = load_config(_CONFIG, settings(_CONFIG, layout, mode, 3))
    placement = place(config, [Machine("one", 8)])
    assert [bundle.num_gpus for bundle in placement.bundles] == gpus
    assert all(len(bundle.roles) == 1 for bundle in placement.bundles) and placement.bundles[-1].roles == ("trainer",)
    assert layout.num_gpus == 8
    # No explorer claims so much of a step that another has nothing to do.
    assert config.explorer.claim_groups * layout.engines <= config.trainer.batch_groups


def test_runs_differ_in_layout_mode_and_seed_alone() -> None:
    def rest(layout: Layout, mode: str) -> dict[str, Any]:
        plain = load_config(_CONFIG, settings(_CONFIG, layout, mode, 1)).model_dump(mode="json")
        stale = mode != "on_policy"
        assert ("correction" in plain["algorithm"]) == stale and (plain["sampling"]["max_staleness"] > 0) == stale
        plain["algorithm"].pop("correction", None)
        del plain["run"]["name"], plain["sync"], plain["sampling"]
        del plain["trainer"]["num_gpus"], plain["explorer"]["num_explorers"], plain["explorer"]["claim_groups"]
        return plain

    shared = rest(Layout(1, 1, 1, shares=True), "on_policy")
    assert (
        shared
        == rest(Layout(3, 1, 1), "on_policy")
        == rest(Layout(3, 1, 1), "one_step_off")
        == rest(Layout(6, 1, 2), "asynchronous")
    )


def test_ratios_compare_with_the_best_synchronous_layout_and_with_the_first() -> None:
    def row(layout: str, num_gpus: int, mode: str, seed: int, seconds: float | None) -> dict[str, Any]:
        reached = None if seconds is None else {"step": 10, "seconds": seconds}
        return {"layout": layout, "num_gpus": num_gpus, "mode": mode, "seed": seed, "to_target": reached}

    rows = [
        row("2+2", 4, "on_policy", 1, 400.0),
        row("3+1", 4, "on_policy", 1, 300.0),
        row("3+1", 4, "asynchronous", 1, 90.0),
        row("3+1", 4, "asynchronous", 2, 110.0),
        row("6+2", 8, "asynchronous", 1, 50.0),
        row("6+2", 8, "asynchronous", 2, None),
    ]
    found = {(each["layout"], each["mode"]): each for each in summary(rows)}
    four = found["3+1", "asynchronous"]
    assert (four["seconds_to_target"], four["of_on_policy"], four["of_first"]) == (100.0, 3.0, 1.0)
    eight = found["6+2", "asynchronous"]
    assert (eight["seconds_to_target"], eight["of_first"]) == (None, None), "a seed did not reach the target"
    assert found["2+2", "on_policy"]["of_on_policy"] == 0.75
    (alone,) = summary(rows[4:5])
    assert (alone["of_on_policy"], alone["of_first"]) == (None, 1.0)
