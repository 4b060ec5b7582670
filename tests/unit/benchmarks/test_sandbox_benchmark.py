"""`rft bench sandbox` measures executions in sandboxes."""

from __future__ import annotations

import json

import pytest

from benchmarks.runs.sandbox import main


def test_it_measures_a_bare_subprocess_and_each_tier_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--executions", "1", "--threads", "1"]) == 0
    figures = json.loads(capsys.readouterr().out)
    rows = figures["executions"]
    assert rows["bare"]["ratio"] == 1.0
    assert {"bare", *figures["tiers"]} <= rows.keys()
