"""What a worker did when: stored with its heartbeats, counted by `rft report`, drawn as an image and as a trace."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import pytest

import rftdata
from rftcore.reporting.report import build_report
from rftcore.reporting.table import print_report
from rftcore.reporting.timeline import write_timeline
from rftdata.errors import QueryError
from rftdata.reports.results import RunResults
from rftdata.workers.worker import Worker
from tests.support.stored_run import StoredRun
from tests.support.waiting import wait_until


@pytest.fixture
def run(buffer: rftdata.Buffer) -> StoredRun:
    run = StoredRun(buffer)
    run.attempt()
    return run


def worked(run: StoredRun) -> float:
    """A trainer that starts, trains and waits, for 0.2 s each; the seconds that all of it took."""
    begun = time.monotonic()
    with Worker(run.run, "trainer") as worker:
        time.sleep(0.2)
        worker.set_state("trains step 1 on 8 experiences", activity="training")
        time.sleep(0.1)
        worker.set_state("trains step 2 on 8 experiences", activity="training")
        time.sleep(0.1)
        worker.set_state("waits", "ready groups")
        time.sleep(0.2)
    return time.monotonic() - begun


def test_every_second_of_a_worker_is_stored(run: StoredRun) -> None:
    seconds = worked(run)
    spans = RunResults(run.run).spans()
    assert [(span.activity, span.detail) for span in spans] == [
        ("starting", None),
        ("training", None),
        ("waiting", "ready groups"),
    ]
    assert all(span.ended > span.started for span in spans)
    assert sum(span.ended - span.started for span in spans) < 1.01 * seconds
    assert all(after.started == pytest.approx(before.ended, abs=1e-3) for before, after in itertools.pairwise(spans))


def test_a_killed_worker_s_time_ends_with_its_last_heartbeat(run: StoredRun) -> None:
    worker = Worker(run.run, "explorer")
    worker.set_state("samples 2 groups", activity="sampling")

    def has_beaten() -> bool:
        spans = RunResults(run.run).spans()
        return len(spans) == 2 and spans[1].ended > spans[1].started

    wait_until(has_beaten, "a heartbeat")
    (_, before) = RunResults(run.run).spans()
    wait_until(lambda: RunResults(run.run).spans()[1].ended > before.ended, "the next heartbeat")
    (_, after) = RunResults(run.run).spans()
    assert after.started == before.started
    worker.stop()


def test_the_report_counts_the_time_of_each_role(
    buffer: rftdata.Buffer, run: StoredRun, capsys: pytest.CaptureFixture[str]
) -> None:
    worked(run)
    report = build_report(buffer)
    assert {each.activity for each in report.activities} == {"starting", "training", "waiting"}
    lengths = {span.activity: span.ended - span.started for span in RunResults(run.run).spans()}
    assert all(each.role == "trainer" for each in report.activities)
    assert {each.activity: each.seconds for each in report.activities} == pytest.approx(lengths, abs=1e-3)
    print_report([report])
    assert "time of trainer" in capsys.readouterr().out


def test_the_trace_has_every_span_in_microseconds(run: StoredRun, tmp_path: Path) -> None:
    worked(run)
    spans = RunResults(run.run).spans()
    write_timeline("mine", spans, tmp_path / "new" / "trace.json")
    events = json.loads((tmp_path / "new" / "trace.json").read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert [event["name"] for event in complete] == ["starting", "training", "waiting"]
    assert complete[0]["ts"] == 0
    assert [event["dur"] for event in complete] == pytest.approx(
        [1e6 * (span.ended - span.started) for span in spans], abs=2
    )
    assert complete[2]["args"] == {"for": "ready groups"}
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert names == [spans[0].host, f"trainer {spans[0].worker_id} (process {spans[0].pid})"]


def test_workers_are_shown_in_the_order_in_which_a_row_passes_them(run: StoredRun, tmp_path: Path) -> None:
    for role in ("trainer", "pipeline", "explorer"):
        with Worker(run.run, role):
            pass
    write_timeline("mine", RunResults(run.run).spans(), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert [name.partition(" ")[0] for name in names] == ["explorer", "pipeline", "trainer"]


def test_the_image_is_written_whole_or_not_at_all(run: StoredRun, tmp_path: Path) -> None:
    with pytest.raises(QueryError, match="has no timeline"):
        write_timeline("mine", RunResults(run.run).spans(), tmp_path / "early.png")
    worked(run)
    spans = RunResults(run.run).spans()
    write_timeline("mine", spans, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(QueryError, match="unknown image format"):
        write_timeline("mine", spans, tmp_path / "timeline.wrong")
    (tmp_path / "file").write_text("")
    with pytest.raises(QueryError, match="cannot be written"):
        write_timeline("mine", spans, tmp_path / "file" / "trace.json")
    assert sorted(path.name for path in tmp_path.glob("*e*.*")) == ["timeline.png"]
