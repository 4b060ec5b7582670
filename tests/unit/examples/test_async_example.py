"""examples/async compares nothing but the modes, and says when a run has reached its target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rftcore.config.run import load_config
from rftcore.reporting.equal_score import to_target

ASYNC = Path(__file__).resolve().parents[3] / "examples" / "async"
MODES = ("on_policy", "every_four", "one_step_off", "asynchronous")


def test_the_files_differ_in_the_mode_alone_and_drop_nothing_that_the_mode_samples() -> None:
    rest = []
    for mode in MODES:
        config = load_config(ASYNC / f"{mode}.yaml")
        assert config.sampling.max_staleness == config.sync.interval - 1 + config.sync.offset
        plain = config.model_dump(mode="json")
        assert ("correction" in plain["algorithm"]) == (config.sampling.max_staleness > 0)
        plain["algorithm"].pop("correction", None)
        del plain["run"]["name"], plain["sync"], plain["sampling"]
        rest.append(plain)
    assert rest[1:] == rest[:-1]
    assert {load_config(ASYNC / f"{mode}.yaml").run.name for mode in MODES} == {
        mode.replace("_", "-") for mode in MODES
    }


def points(*scores: float) -> list[dict[str, Any]]:
    return [{"step": 5 * place, "seconds": 2.0 * place, "score": score} for place, score in enumerate(scores)]


def test_two_evaluations_together_reach_the_target() -> None:
    assert to_target(points(0.6, 0.9, 0.7, 0.8, 0.85), 0.82) == {"step": 20, "seconds": 8.0}
    assert to_target(points(0.6, 0.9, 0.7), 0.82) is None
    assert to_target([], 0.82) is None
