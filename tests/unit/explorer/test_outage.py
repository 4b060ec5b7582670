"""An explorer whose rollouts fail for a while pauses, and ends the run only when nothing has succeeded for longer than it is patient."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from rftcore.explorer.outage import Outage


@dataclass
class Explorer:
    """Time, and what all explorers of the run achieved."""

    now: float = 0.0
    num_succeeded: int = 5

    def outage(self, patience_s: float = 100.0, groups_per_step: int = 2) -> Outage:
        return Outage(patience_s, groups_per_step, lambda: self.num_succeeded, lambda: self.now)


def test_a_group_that_fails_alone_is_no_outage() -> None:
    outage = Explorer().outage()
    assert outage.failed("hard") is None
    assert not outage.lasts and outage.room(16, 3) == 16


def test_pauses_grow_and_one_group_is_tried_after_each() -> None:
    explorer = Explorer()
    outage = explorer.outage()
    pauses = []
    for _ in range(9):
        while outage.room(16, 0) == 0:
            explorer.now += 0.5
        pauses.append(explorer.now)
        outage.failed("no judge")
        if not outage.lasts:
            continue
        assert outage.room(16, 0) == 0
    gaps = [after - before for before, after in itertools.pairwise(pauses)]
    assert gaps == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0]
    explorer.now += 60.0
    assert outage.room(16, 0) == 1 and outage.room(16, 1) == 0
    outage.passed()
    assert outage.room(16, 0) == 16


def test_groups_that_were_claimed_before_the_pause_do_not_prolong_it() -> None:
    outage = Explorer().outage()
    for _ in range(20):
        outage.failed("no judge")
    assert "20 groups in a row failed, the last with no judge; tries one group after 1 s" in str(outage)


def test_only_an_outage_of_all_explorers_is_too_long() -> None:
    explorer = Explorer()
    outage = explorer.outage()

    def try_after(seconds: float) -> float | None:
        explorer.now += seconds
        outage.claimed()
        explorer.now += 50.0
        return outage.failed("no judge")

    outage.failed("no judge")
    outage.failed("no judge")
    assert try_after(1.0) is None
    explorer.num_succeeded = 6
    assert try_after(2.0) is None, "another explorer had success meanwhile"
    assert try_after(4.0) is None
    assert try_after(8.0) == 50.0 + 4.0 + 50.0 + 8.0


def test_time_in_which_there_is_nothing_to_claim_is_no_outage() -> None:
    explorer = Explorer()
    outage = explorer.outage(groups_per_step=1)
    outage.failed("hard")
    explorer.now += 1900.0  # it waits for the policy
    outage.claimed()
    assert outage.failed("hard") is None
