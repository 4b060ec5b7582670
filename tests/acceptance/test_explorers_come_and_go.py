"""A run with two explorers: one is killed, a third is started by hand, leaves, and comes again to be killed; the run does every step once.

Another run, whose only explorer is killed by its engine again and again, ends with a sentence and the last lines of the explorer's log.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rftdata
from rftcore.launch.restarts import MAX_IN_A_ROW
from rftdata.maintenance.verification import verify
from rftdata.postgres.embedded import EmbeddedServer
from tests.support.command_line import Rft, report, rows
from tests.support.small_runs import RUN, settings, start
from tests.support.waiting import PATIENCE_S, printed_by, wait_until
from tests.support.warm_up import Warm

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

STEPS = 120
# Each rollout takes two seconds until the test lets go, so that the steps last for minutes; the test needs a handful of them.
PACED = """
import asyncio
from pathlib import Path

from rftcore.workflows.single_turn import single_turn


async def paced(task, model, score):
    if not (Path(__file__).parent / "go").exists():
        await asyncio.sleep(2)
    return await single_turn(task, model, score)
"""
ENGINES = """
import os
import signal
import sys
import time

from rftcore.engines.no_engine import NoEngine


class Fragile(NoEngine):
    def __init__(self, *arguments):
        print("the device fell off the bus", file=sys.stderr, flush=True)
        time.sleep(5)  # long enough for `rft run` to watch it
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def buffer(server_folders: Path) -> Iterator[Path]:
    buffer = server_folders / "come_and_go" / "buffer"
    yield buffer
    EmbeddedServer(buffer).stop()


def workers(buffer: Path) -> list[dict[str, Any]]:
    """The explorers in the order in which they joined, with the groups that each has finished."""
    return rows(
        buffer,
        """select pid, stopped_at is null as works, error,
               (select count(*) from rft.rollout_group g where g.claimed_by = w.worker_id and g.sealed_at is not null) as finished,
               (select count(*) from rft.rollout_group g where g.claimed_by = w.worker_id and g.status = 'claimed') as held
           from rft.worker w where role = 'explorer' order by worker_id""",
    )


def wait_for_work(buffer: Path, pid: int, process: subprocess.Popen[str]) -> None:
    """Wait until an explorer has finished a group and holds another."""

    def works() -> bool:
        return any(row["pid"] == pid and row["finished"] and row["held"] for row in workers(buffer))

    wait_until(works, f"explorer {pid} works", process=process, pause_s=0.2)


def test_explorers_that_are_killed_join_or_leave_under_load_cost_the_run_nothing(
    buffer: Path, warm: Warm, rft: Rft
) -> None:
    folder = buffer.parent
    folder.mkdir()
    (folder / "paced.py").write_text(PACED)
    options = settings(
        warm,
        f"steps={STEPS}",
        "explorer.num_explorers=2",
        f"explorer.workflow={folder}/paced.py:paced",
        "explorer.claim_groups=1",
        "eval.every=60",
        "trainer.checkpoint_every=20",
        "sync.offset=1",
        "sampling.max_staleness=2",
        "pipelines.experience=[]",
    )
    process = start("run", "--plain", "--buffer", buffer, *options)
    by_hand: list[subprocess.Popen[str]] = []
    try:
        wait_until((buffer / "host").exists, "there is a buffer", process=process)
        wait_until(lambda: len(workers(buffer)) == 2, "both explorers have joined", process=process, pause_s=0.2)
        by_hand += [start("explore", "--buffer", buffer, *options) for _ in range(2)]  # they join while the others work
        killed = workers(buffer)[0]["pid"]
        wait_for_work(buffer, killed, process)
        os.kill(killed, signal.SIGKILL)
        for third in by_hand:
            wait_for_work(buffer, third.pid, process)
        by_hand[0].send_signal(signal.SIGINT)
        by_hand[1].kill()
        left, _ = by_hand[0].communicate(timeout=PATIENCE_S)
        assert "Traceback" not in left, left
        by_hand[1].communicate()
        wait_until(lambda: len(workers(buffer)) == 5, "the first explorer is there again", process=process, pause_s=0.2)
        (folder / "go").touch()
        output = printed_by(process)
    finally:
        for one in (process, *by_hand):
            if one.poll() is None:
                one.kill()
                one.communicate()
    assert process.returncode == 0, output
    assert (
        f"killed by signal 9, possibly for lack of memory (process {killed}); it is started again in 1 s (1)" in output
    )
    result = report(rft, buffer, RUN)
    assert (result["status"], result["steps"]["done"]) == ("finished", STEPS)
    steps = rows(buffer, "select trainer_step, num_groups from rft.v_train_step order by 1")
    assert [row["trainer_step"] for row in steps] == list(range(1, STEPS + 1))
    assert {row["num_groups"] for row in steps} == {4}
    assert rows(buffer, "select experience_id from rft.v_consumption group by 1 having count(*) > 1") == []
    assert rows(buffer, "select * from rft.rollout_group where status = 'claimed'") == []
    joined = {row["pid"]: row for row in workers(buffer)}
    assert len(joined) == 5 and all(row["finished"] for row in joined.values())
    assert joined[killed]["error"].startswith("the process was killed by signal 9")
    with rftdata.open(str(buffer)) as opened:
        assert list(verify(opened)) == []


def test_an_explorer_that_dies_again_and_again_ends_the_run_with_the_end_of_its_log(buffer: Path, warm: Warm) -> None:
    folder = buffer.parent
    folder.mkdir(exist_ok=True)
    (folder / "engines.py").write_text(ENGINES)
    options = settings(warm, f"explorer.engine={folder}/engines.py:Fragile", "eval.tasks=[]", "run.name=fragile")
    process = start("run", "--plain", "--buffer", buffer, *options)
    output = printed_by(process)
    assert process.returncode == 1, output
    (said,) = [line for line in output.splitlines() if line.startswith("rft: ")]
    assert "the explorer of the run 'fragile' was killed by signal 9" in said
    assert f"{MAX_IN_A_ROW} processes in a row ended before they had finished anything; continue from the last" in said
    assert "the explorer: its log (" in output and "\nthe device fell off the bus\n" in output
    dead = rows(
        buffer, "select pid from rft.worker join rft.run using (run_id) where name = 'fragile' and role = 'explorer'"
    )
    assert len(dead) == MAX_IN_A_ROW
    assert rows(buffer, "select status::text as status from rft.run where name = 'fragile'") == [{"status": "failed"}]
