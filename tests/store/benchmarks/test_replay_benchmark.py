"""`rft bench replay` on a tiny course: groups are used as often as a variant says, and a run begins with another run's groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import rftdata
from benchmarks.runs import replay, replay_variants
from benchmarks.runs.algorithms import prepare_seed
from benchmarks.runs.replay_variants import ReplayBudget
from rftdata.postgres.embedded import EmbeddedServer

BUDGET = ReplayBudget(batch_groups=4, group_size=2, steps=6, window=3, evaluate_every=2, smoothing=2, target=0.0)


@pytest.fixture(scope="module")
def folder(server_folders: Path) -> Iterator[Path]:
    threads = torch.get_num_threads()
    folder = server_folders / "course"
    folder.mkdir()
    prepare_seed((folder, 0, True))
    yield folder
    for data in folder.glob("*/postgres"):
        EmbeddedServer(data.parent).stop()
    torch.set_num_threads(threads)  # the learner sets one


def test_groups_are_drawn_again_within_their_window(folder: Path) -> None:
    record = replay.run("twice_prioritized", 0, BUDGET, folder, True)
    assert record["error"] is None and record["to_target"] is not None
    assert [(point["step"], point["rollouts"]) for point in record["points"]] == [(0, 0), (2, 8), (4, 16), (6, 24)]
    with rftdata.open(str(folder / "twice_prioritized"), create=False) as buffer:
        drawn = buffer.sql(
            "SELECT trainer_step, count(DISTINCT item_id) AS n, max(staleness) AS age FROM rft.draw GROUP BY 1 ORDER BY 1"
        )
    assert [row["n"] for row in drawn.to_pylist()] == [2, 4, 4, 4, 4, 4]
    assert max(row["age"] for row in drawn.to_pylist()) == 2


def test_a_run_begins_with_the_groups_of_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tiny model answers nothing right, so groups of mixed answers do not exist.
    monkeypatch.setattr(replay_variants, "_SELECTION", "select {columns} from rft.v_group where run = 'replay'")
    assert replay.run("once", 0, BUDGET, folder, True)["error"] is None
    record = replay.run("stored", 0, BUDGET, folder, True)
    assert record["error"] is None
    assert [(point["step"], point["rollouts"]) for point in record["points"]] == [
        (0, 0),
        (2, 0),
        (4, 0),
        (6, 0),
        (8, 16),
        (10, 32),
        (12, 48),
    ]


def test_the_target_applies_to_smoothed_scores() -> None:
    budget = ReplayBudget(smoothing=2, target=0.5)
    scores = [0.4, 0.7, 0.2, 0.5, 0.55]
    points = [{"rollouts": i, "step": 2 * i, "seconds": 3.0 * i, "score": score} for i, score in enumerate(scores)]
    assert replay.to_target(points, budget) == {"rollouts": 1, "step": 2, "seconds": 3.0}
    assert replay.to_target(points[2:], budget) == {"rollouts": 4, "step": 8, "seconds": 12.0}
    assert replay.to_target(points[:1], budget) is None
