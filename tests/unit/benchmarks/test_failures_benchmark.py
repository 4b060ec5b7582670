"""Effective training time, computed by hand, and a benchmark that is called wrongly."""

from __future__ import annotations

import sys

import pytest

from benchmarks import failures
from benchmarks.failures import Step, effective


def test_seconds_of_steps_that_count_over_the_wall_clock() -> None:
    # Steps of 2 s; after step 3, at second 6, a failure costs 10 s, and step 4 is done at second 18.
    history = [Step(1, 2.0, 2.0), Step(2, 4.0, 2.0), Step(3, 6.0, 2.0), Step(4, 18.0, 2.0), Step(5, 20.0, 1.5)]
    assert effective(history, 0.0, 20.0) == pytest.approx(9.5 / 20)
    assert effective(history, 2.0, 18.0) == pytest.approx(6.0 / 16), "a step counts where it ends"
    assert effective(history, 6.0, 17.0) == 0


def test_an_unknown_kind_of_failure_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["failures", "--kinds", "trainer,router"])
    with pytest.raises(SystemExit):
        failures.main()
    assert "unknown kinds router; allowed: explorer, pipeline, database, gcs_server, raylet, trainer, rft run" in (
        capsys.readouterr().err
    )
