"""What a worker did when: stored with its heartbeats, counted by `rft report`, drawn as an image and as a trace."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import pytest

import rftdata
from rftcore.cli import run_command
from rftcore.reporting.report import build_report
from rftcore.reporting.table import print_report
from rftcore.reporting.timeline import write_timeline
from rftdata.errors import QueryError
from rftdata.reports.results import RunResults
from rftdata.reports.timeline import Timeline, timeline_of
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


def role(timeline: Timeline, name: str) -> dict[str, float]:
    """The seconds of a role's activities; those that wait by what they wait for."""
    (own,) = [each for each in timeline.roles if each.role == name]
    return {each.detail or each.activity: each.seconds for each in own.activities}


def adds_up(timeline: Timeline) -> bool:
    return all(
        sum(each.seconds for each in own.activities) == pytest.approx(timeline.seconds, abs=0.01)
        and sum(each.share for each in own.activities) == pytest.approx(1.0, abs=0.001)
        for own in timeline.roles
    )


def test_the_activities_of_each_role_add_up_to_the_run(run: StoredRun) -> None:
    with Worker(run.run, "supervisor", phases=[("modules are imported", time.monotonic() - 1.0)]):
        worked(run)
    timeline = timeline_of(run.run)
    assert adds_up(timeline)
    assert timeline.seconds == pytest.approx(1.6, abs=0.3)
    assert role(timeline, "supervisor")["modules are imported"] == pytest.approx(1.0, abs=0.1)
    trainer = role(timeline, "trainer")
    assert trainer["training"] == pytest.approx(0.2, abs=0.1)
    assert trainer["not started"] == pytest.approx(1.0, abs=0.1)
    assert trainer["ready groups"] == pytest.approx(0.2, abs=0.1)
    assert trainer["ended"] < 0.3


def stored_spans(run: StoredRun, worker: int, *spans: tuple[str, str | None, float, float]) -> None:
    """Spans of a worker: activity, detail, begin and end in seconds after it joined."""
    for ordinal, (activity, detail, begun, ended) in enumerate(spans):
        run.buffer.sql(
            "INSERT INTO rft.worker_span SELECT worker_id, %s, %s, %s, started_at + %s * interval '1 s', started_at + %s * interval '1 s'"
            " FROM rft.worker WHERE worker_id = %s",
            [ordinal, activity, detail, begun, ended, worker],
        )


def at(run: StoredRun, worker: int, begun: float, seconds: float | None, ended: float | None = None) -> int:
    """Let a worker live from `begun` seconds before its run was stored, its last heartbeat after `seconds` (None: it lives), found ended after `ended`."""
    run.buffer.sql(
        "UPDATE rft.worker w SET started_at = t.at, heartbeat_at = coalesce(t.at + %s * interval '1 s', rft.clock()),"
        " stopped_at = t.at + %s * interval '1 s' FROM (SELECT run_id, date_trunc('s', created_at) - %s * interval '1 s' AS at FROM rft.run) t"
        " WHERE t.run_id = w.run_id AND worker_id = %s",
        [seconds, ended if ended is not None else seconds, begun, worker],
    )
    return worker


def test_explorers_side_by_side_share_the_seconds_of_the_run(run: StoredRun) -> None:
    one, other, trainer = (at(run, run.worker(name), 1000, 100) for name in ("explorer", "explorer", "trainer"))
    at(run, other, 950, 50)
    stored_spans(run, one, ("starting", None, 0, 30), ("sampling", None, 30, 100))
    stored_spans(run, other, ("starting", None, 0, 20), ("waiting", "the policy after trainer step 3", 20, 40))
    stored_spans(
        run, trainer, ("waiting", "6 ready groups for step 1", 0, 60), ("waiting", "6 ready groups for step 2", 60, 100)
    )
    timeline = timeline_of(run.run)
    assert adds_up(timeline) and timeline.seconds == pytest.approx(100)
    # Alone for 50 s, then half of each second.
    assert role(timeline, "explorer") == pytest.approx(
        {"starting": 40.0, "sampling": 45.0, "the policy after trainer step …": 10.0, "not recorded": 5.0}
    )
    assert role(timeline, "trainer") == pytest.approx({"6 ready groups for step …": 100.0})
    assert [each.num_processes for each in timeline.roles] == [2, 1]


def test_a_resumed_run_has_neither_the_pause_nor_the_time_until_a_crash_was_found(run: StoredRun) -> None:
    killed = at(run, run.worker("trainer", error="the process is gone"), 90_000, 60, ended=86_000)
    stored_spans(run, killed, ("training", None, 0, 59))
    at(run, run.worker("supervisor", error="the process is gone"), 90_000, 60, ended=86_000)
    at(run, run.worker("supervisor"), 4_000, 100)
    again = at(run, run.worker("trainer"), 3_990, 80)
    stored_spans(run, again, ("starting", None, 0, 10), ("training", None, 10, 80))
    timeline = timeline_of(run.run)
    assert adds_up(timeline) and timeline.seconds == pytest.approx(175)
    assert role(timeline, "trainer") == pytest.approx(
        {"training": 129.0, "starting": 10.0, "no process": 10.0, "ended": 10.0, "not recorded": 16.0}
    )
    assert build_report(run.buffer).wall_seconds == pytest.approx(175)


def test_a_replay_counts_in_no_time_of_the_run(run: StoredRun) -> None:
    run.worker("trainer", seconds_ago=100, seconds=10)
    run.worker("replay", seconds_ago=50, seconds=20)
    assert RunResults(run.run).totals().seconds == pytest.approx(10, abs=0.01)
    assert timeline_of(run.run).seconds == pytest.approx(10, abs=0.01)


def test_a_running_run_s_timeline_ends_now(run: StoredRun) -> None:
    at(run, run.worker("supervisor"), 50, None)
    trainer = at(run, run.worker("trainer"), 40, None)
    stored_spans(run, trainer, ("starting", None, 0, 5), ("training", None, 5, 38))
    timeline = timeline_of(run.run)
    assert adds_up(timeline) and timeline.seconds == pytest.approx(50, abs=2)
    assert role(timeline, "trainer") == pytest.approx(
        {"training": 33.0, "starting": 5.0, "not started": 10.0, "not recorded": 2.0}, abs=2
    )


def test_the_command_prints_the_timeline_as_a_table_and_as_json(
    run: StoredRun, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = run.buffer.config.uri
    assert run_command(["report", "sums", "--buffer", uri, "--timeline"]) == 0
    assert "no timeline yet" in capsys.readouterr().out
    trainer = at(run, run.worker("trainer"), 1000, 100)
    stored_spans(run, trainer, ("training", None, 0, 90))
    run.train_step(1)
    run.train_step(2)
    assert run_command(["report", "sums", "--buffer", uri, "--timeline"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "trainer training 90.0 90.0 % 45.00" in lines
    assert "not recorded 10.0 10.0 % 5.00" in lines
    assert "total 100.0 100.0 % 50.00" in lines
    assert run_command(["report", "sums", "--buffer", uri, "--timeline", "--json"]) == 0
    timeline = json.loads(capsys.readouterr().out)["timeline"]
    assert timeline["seconds"] == pytest.approx(100) and timeline["num_steps"] == 2
    assert timeline["roles"][0]["activities"][0] == {
        "activity": "training",
        "detail": None,
        "seconds": pytest.approx(90),
        "share": pytest.approx(0.9),
        "step_seconds": pytest.approx(45),
    }
    assert run_command(["report", "other", "--buffer", uri, "--timeline"]) == 2
    assert "no such run (got 'other')" in capsys.readouterr().err


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
