"""The weights benchmark on a tiny model: what it reports follows from what it measured, and weights that differ are an error."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.layout import Layout, layouts
from benchmarks.harness.shapes import SHAPES
from benchmarks.weights import results
from benchmarks.weights.case import Case
from benchmarks.weights.receivers import Place, Probe, agrees
from benchmarks.weights.speed import reason_not_to_run
from tests.support.waiting import PATIENCE_S

CHECKOUT = Path(__file__).resolve().parents[3]
CASE = Case("tiny", ranks=1, engines=1, tensor_parallel=1, receivers="plain", following=2)
LIMIT = {"shape": "tiny", "num_ranks": 2, "broadcast_gb_per_s": 4.0}


@pytest.mark.long
def test_two_plain_receivers_receive_the_weights_that_were_sent() -> None:
    options = ["--shapes", "tiny", "--layouts", "2+2", "--receivers", "plain"]
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks",
            "weights",
            *options,
            "--following",
            "2",
            "--case-seconds",
            str(PATIENCE_S),
        ],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    result = json.loads(ended.stdout)
    (measured,), (limit,) = result["rows"], result["limits"]
    assert measured["status"] == "ok" and measured["hashes_agree"] and len(measured["transfers"]) == 3
    assert (measured["backend"], measured["dtype"], limit["num_ranks"]) == ("gloo", "bfloat16", 3)
    assert measured["first_seconds"] > measured["first_join_seconds"] > 0, "the first transfer forms the group"
    assert measured["gb_per_s"] == pytest.approx(measured["num_bytes"] / measured["transfer_seconds"] / 1e9)
    assert measured["of_broadcast"] == pytest.approx(measured["gb_per_s"] / limit["broadcast_gb_per_s"])
    # Tied embeddings travel once.
    assert measured["num_bytes"] == 2 * SHAPES["tiny"].num_parameters


def lines(seconds: float, **end: Any) -> list[dict[str, Any]]:
    line = {
        "seconds": seconds,
        "join_seconds": 0.5,
        "send_seconds": seconds,
        "trainer_seconds": seconds,
        "pause_seconds": seconds + 0.1,
        "num_bytes": 2_000_000_000,
        "num_tensors": 3,
        "dtype": "bfloat16",
        "backend": "gloo",
        "backend_reason": "",
        "hashes_agree": True,
    }
    return [line | {"seconds": 9.0}, line, line | {"seconds": seconds + 0.2}, line | end]


def row(case: Case, seconds: float, **end: Any) -> dict[str, Any]:
    return results.row_of(case, lines(seconds, **end)) | {"status": "ok", "error": None}


def test_landing_is_the_time_of_an_engine_beyond_that_of_a_plain_receiver() -> None:
    engine = replace(CASE, receivers="engines")
    rows = [row(engine, 3.0, probes_differ=True, weights_agree=True), row(CASE, 1.0)]
    results.complete(rows, [LIMIT])
    for each in rows:
        assert (each["first_seconds"], each["transfer_seconds"], each["gb_per_s"], each["of_broadcast"]) == (
            9,
            1,
            2,
            0.5,
        )
    assert rows[0]["landing_seconds"] == 2.0 and rows[1]["landing_seconds"] is None
    assert not any(map(results.is_wrong, rows))


def test_weights_that_differ_are_an_error() -> None:
    engine = replace(CASE, receivers="engines")
    good = {"probes_differ": True, "weights_agree": True}
    assert results.is_wrong(row(CASE, 1.0, hashes_agree=False))
    assert results.is_wrong(row(engine, 1.0, **good | {"weights_agree": False}))
    assert results.is_wrong(row(engine, 1.0, **good | {"probes_differ": False}))
    assert results.is_wrong(row(engine, 1.0)), "an engine that was not examined"
    assert results.is_wrong(row(CASE, 1.0) | {"status": "failed"})
    assert results.is_wrong(results.row_of(CASE, []) | {"status": "ok"})


def test_engines_agree_up_to_the_order_of_their_sums() -> None:
    expected: Probe = [(10 + i, -8.0 - 0.1 * i) for i in range(8)]
    nearly = [(token, logprob + 0.01) for token, logprob in expected]
    assert agrees(nearly, expected) and agrees([(1, -8.0), *nearly[1:]], expected)
    assert not agrees([(token, logprob + 0.05) for token, logprob in expected], expected)
    assert not agrees([(token + 1, logprob) for token, logprob in expected], expected)


def test_cases_that_do_not_fit_have_a_reason() -> None:
    two_gpus = {"num_gpus": 2, "memory_bytes": 10**12}
    on_gpu = replace(CASE, shape="8B", on_gpu=True)
    assert reason_not_to_run(on_gpu, two_gpus) is None
    assert reason_not_to_run(replace(on_gpu, ranks=2), two_gpus) == "needs 3 GPUs, the machine has 2"
    assert "GB are free" in (
        reason_not_to_run(replace(CASE, shape="8B"), {"num_gpus": 0, "memory_bytes": 10**10}) or ""
    )
    divided = replace(on_gpu, receivers="engines", tensor_parallel=2)
    assert reason_not_to_run(divided, two_gpus) == "needs 3 GPUs, the machine has 2"
    assert reason_not_to_run(divided, two_gpus | {"num_gpus": 3}) is None
    assert reason_not_to_run(replace(divided, shape="135M"), two_gpus) == "9 heads cannot be divided among 2 processes"


def test_gpus_of_a_layout_follow_those_of_the_ranks() -> None:
    assert layouts("4+4,2x2+4") == (Layout(4, 1, 4), Layout(2, 2, 4))
    assert [str(layout) for layout in layouts("4+4,2x2+4")] == ["4+4", "2x2+4"]
    with pytest.raises(argparse.ArgumentTypeError, match=r"not a layout: '2x\+1'; allowed: engines\+ranks"):
        layouts("1+1,2x+1")
    case = replace(
        CASE, shape="8B", ranks=4, engines=2, tensor_parallel=2, receivers="engines", on_gpu=True, threads=16
    )
    assert case.num_devices == 8
    assert [case.place(number) for number in (0, 1)] == [Place((4, 5), 2, 2), Place((6, 7), 2, 2)]
    plain = replace(case, receivers="plain")
    assert [plain.place(number).gpus for number in range(4)] == [(4,), (5,), (6,), (7,)]


def test_layouts_are_compared_with_the_first() -> None:
    rows = [row(replace(CASE, ranks=2, engines=2), 2.0), row(replace(CASE, ranks=4, engines=4), 3.0)]
    results.complete(rows, [])
    assert [each["of_first"] for each in rows] == [1.0, 1.5]
