"""`rft run --resume --at-step N`, `--keep-rollouts` and `--fork`, as typed by a user."""

from __future__ import annotations

from pathlib import Path

import pytest

import rftdata
from rftdata.maintenance.verification import verify
from tests.support.command_line import Rft, report, rows
from tests.support.small_runs import RUN, STEPS, settings, start
from tests.support.waiting import printed_by
from tests.support.warm_up import Warm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def used(buffer: Path, run: str) -> dict[int, set[int]]:
    """The experiences of each step of a run's present history."""
    found: dict[int, set[int]] = {}
    query = (
        f"select trainer_step, experience_id from rft.v_consumption join rft.run using (run_id) where name = '{run}'"
    )
    for row in rows(buffer, query):
        found.setdefault(row["trainer_step"], set()).add(row["experience_id"])
    return found


def test_going_back_and_forking(warm: Warm, rft: Rft, tmp_path: Path) -> None:
    buffer = tmp_path / "buffer"
    first = start("run", "--plain", "--buffer", buffer, *settings(warm))
    output = printed_by(first)
    assert first.returncode == 0, output
    before = used(buffer, RUN)
    assert set(before) == set(range(1, STEPS + 1))

    refused = rft("run", "--resume", "--at-step", "3", "--plain", "--buffer", buffer, check=False)
    assert refused.returncode == 2
    assert "has no checkpoint of step 3 (got 3); allowed: 0, 2, 4" in refused.stderr
    nothing = rft("run", "--resume", "--at-step", "4", "--plain", "--buffer", buffer, check=False)
    assert nothing.returncode == 2 and "raise steps" in nothing.stderr
    alone = rft("run", "--resume", "--keep-rollouts", "--plain", "--buffer", buffer, check=False)
    assert alone.returncode == 2 and "--at-step N" in alone.stderr
    assert used(buffer, RUN) == before

    forked = rft("run", "--resume", "--at-step", "2", "--fork", "other", "--plain", "--buffer", buffer).stdout
    assert "other begins at step 2" in forked
    assert used(buffer, RUN) == before, "the parent stays as it was"
    in_fork = used(buffer, "other")
    assert [in_fork[step] == before[step] for step in range(1, STEPS + 1)] == [True, True, False, False]
    other = report(rft, buffer, "other")
    assert other["status"] == "finished" and other["steps"]["done"] == STEPS

    again = rft("run", "--resume", RUN, "--at-step", "2", "--keep-rollouts", "--plain", "--buffer", buffer).stdout
    assert f"{RUN} begins at step 2; the groups of later steps are used" in again
    kept = used(buffer, RUN)
    assert kept[1] == before[1] and kept[2] == before[2]
    assert kept[3] == before[3], "its groups are drawn again, in their order"
    # Both can be resumed; they have done what was planned.
    for run in (RUN, "other"):
        assert "nothing is left to do" in rft("run", "--resume", run, "--plain", "--buffer", buffer).stdout
    with rftdata.open(str(buffer)) as opened:
        assert list(verify(opened)) == []
