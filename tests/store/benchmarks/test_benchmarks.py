"""Benchmarks of buffer and pipeline at their smallest, without peers: the figures that they print, and that everything arrived once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.buffer.throughput import main
from benchmarks.peers.catalogue import PEERS
from benchmarks.pipeline import stages as pipeline
from operators import OPERATORS

CHECKOUT = Path(__file__).resolve().parents[3]
KEYS = (
    "write_experiences_per_s",
    "end_to_end_experiences_per_s",
    "commit_to_batch_ms_p50",
    "commit_to_batch_ms_p99",
    "fraction_of_disk_bandwidth",
)


def printed_by(name: str, folder: Path, *options: str) -> dict[str, Any]:
    """The JSON that a benchmark prints, which must be all that it prints."""
    command = [sys.executable, "-m", "benchmarks", name, "--folder", str(folder), *options]
    ended = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    printed: dict[str, Any] = json.loads(ended.stdout)
    return printed


@pytest.mark.long
def test_the_buffer_benchmark_prints_nothing_but_json(server_folders: Path) -> None:
    printed = printed_by("buffer", server_folders, "--skip-peers", "--rounds", "1", "--samples", "1024")
    for results in (printed["results"], printed["peers"]["bare_layout"]):
        # An experience that came twice or not at all would be an error here.
        assert results["error"] is None
        assert all(results[key] > 0 for key in KEYS)
    assert set(printed["peers"]) == {"bare_layout"}
    assert printed["limits"]["flush_ms_p50"]["median"] > 0
    compared = printed["peers"]["bare_layout"]["ours_compared"]["write_256"]["median"]
    ours, bare = printed["results"], printed["peers"]["bare_layout"]
    assert compared == pytest.approx(ours["write_experiences_per_s"] / bare["write_experiences_per_s"])


@pytest.mark.long
def test_the_sampling_benchmark_measures_every_requested_policy(server_folders: Path) -> None:
    options = ["--rows", "8192", "--draws", "5", "--policies", "fifo,rank,mixture"]
    policies = printed_by("sampling", server_folders, *options)["rows"]["8192"]["policies"]
    assert set(policies) == {"fifo", "rank", "mixture"}
    for figures in policies.values():
        assert figures["num_draws"] == 5 and figures["pages_per_draw"] > 0
        assert all(figures[f"{name}_ms"]["p99"] > 0 for name in ("draw", "decode", "set_priorities", "commit"))


@pytest.mark.long
def test_the_pipeline_benchmark_measures_every_stage_and_what_the_chain_adds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "pipeline", "--rounds", "1", "--rows", "64"]
    command += ["--skip-data-juicer", "--skip-workers", "--skip-trinity"]
    ended = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    printed = json.loads(ended.stdout)
    results = printed["results"]
    assert set(results["operators"]) == {*pipeline.FILTERS, *pipeline.OTHERS}
    assert all(figures["rows_per_s_per_core"]["median"] > 0 for figures in results["operators"].values())
    assert results["slowest_filter"]["name"] in pipeline.FILTERS
    assert [one["rows"] for one in results["chain_overhead"]] == [64, 256]
    theirs = printed["peers"]["datasets"]
    rate = "rows_per_s_per_core"
    for name, ratio in theirs["ours_compared"].items():
        ours = results["operators"][name][rate]["median"]
        assert ratio == pytest.approx(ours / theirs["operators"][name][rate]["median"], abs=0.006)
    assert set(theirs["ours_compared"]) == {"reward_threshold", "sql_filter", "reward_shaping"}


def test_the_pipeline_benchmark_covers_every_built_in_stage_that_needs_no_model_and_no_person() -> None:
    measured = {name for stage in (*pipeline.FILTERS.values(), *pipeline.OTHERS.values()) for name in stage}
    asks = {"human_review", "llm_judge", "pairwise_judge", "rubric", "ruler", "synthesize"}
    of_tasks = {name for name, target in OPERATORS.builtins.items() if target.startswith("operators.task")}
    assert measured == set(OPERATORS.builtins) - asks - of_tasks


def test_an_unknown_peer_is_refused_with_the_allowed_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--peers", "trinity_sql,redis"])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert "unknown: redis" in said and all(name in said for name in PEERS)
