"""`rft bench selection_cost` measures the selectors and sizes of its options."""

from __future__ import annotations

import json

import pytest

from benchmarks.selection.cost import CASES, main


def test_every_selector_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--tasks", "300,600", "--tried", "64", "--groups", "8", "--steps", "3"])
    found = json.loads(capsys.readouterr().out)
    assert set(found["tasks"]) == {"300", "600"} and set(found["tasks"]["300"]) == set(CASES)
    assert all(
        times["p50"] > 0 for case in found["tasks"]["600"].values() for times in (case["select_ms"], case["observe_ms"])
    )


def test_the_planners_transaction_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    main(
        [
            "--tasks",
            "300",
            "--tried",
            "64",
            "--groups",
            "8",
            "--steps",
            "3",
            "--selectors",
            "difficulty_anchored,plr",
            "--store",
        ]
    )
    found = json.loads(capsys.readouterr().out)["plan"]
    assert found["num_tasks"] == 300
    assert all(
        found[case]["plan_ms"]["p50"] > 0 and found[case]["commit_ms"]["p50"] > 0
        for case in ("difficulty_anchored", "plr")
    )


def test_an_unknown_selector_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--selectors", "best"])
    assert "unknown: best; allowed: sequential" in capsys.readouterr().err
