"""`rft bench environments` measures steps and starts."""

from __future__ import annotations

import json

import pytest

from benchmarks.runs.environments import main


def test_steps_and_starts_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--steps", "20", "--environments", "3"])
    found = json.loads(capsys.readouterr().out)
    assert all(found[name] > 0 for name in ("step_us", "pipe_us", "one_start_ms", "starts_s", "environment_mib"))
