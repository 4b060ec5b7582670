"""`rft bench gateway` measures the endpoint."""

from __future__ import annotations

import json

import pytest

from benchmarks.runs.gateway import main


def test_requests_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--sessions", "5", "--turns", "2"])
    found = json.loads(capsys.readouterr().out)
    assert found["requests"] == 10
    assert all(found[name] > 0 for name in ("requests_per_s", "chat_per_s", "ratio", "p50_ms", "p99_ms", "alone_ms"))
