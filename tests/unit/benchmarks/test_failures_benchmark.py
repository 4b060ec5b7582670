"""Effective training time, computed by hand, and a kind of failure that does not exist."""

from __future__ import annotations

import pytest

from benchmarks.runs import failures
from benchmarks.runs.failures import Step, effective


def test_effective_time_is_the_seconds_of_counted_steps_over_the_wall_clock() -> None:
    # Steps of 2 s; after step 3, at second 6, a failure costs 10 s, and step 4 is done at second 18.
    history = [Step(1, 2.0, 2.0), Step(2, 4.0, 2.0), Step(3, 6.0, 2.0), Step(4, 18.0, 2.0), Step(5, 20.0, 1.5)]
    assert effective(history, 0.0, 20.0) == pytest.approx(9.5 / 20)
    assert effective(history, 2.0, 18.0) == pytest.approx(6.0 / 16), "a step counts where it ends"
    assert effective(history, 6.0, 17.0) == 0


def test_an_unknown_kind_of_failure_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        failures.main(["--kinds", "trainer,router"])
    assert "unknown: router; allowed: explorer, pipeline, database, gcs_server, raylet, trainer, rft run" in (
        capsys.readouterr().err
    )
