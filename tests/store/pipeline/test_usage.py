"""What stages spend on model calls is counted in the database: for all workers of a run, and across restarts."""

from __future__ import annotations

import threading

from rftdata import Buffer
from rftdata.pipeline.budget import Limits, MemoryUsage, RunUsage, Usage, UsageLedger
from tests.support.stored_run import StoredRun


def test_a_budget_survives_the_process_that_spent_it(buffer: Buffer) -> None:
    run = StoredRun(buffer).run
    first = RunUsage(run)
    assert first.reserve("judge", Usage(1, 100, 0.5), Limits(max_calls=2))
    first.settle("judge", Usage(1, 100, 0.5), Usage(1, 30, 0.25))
    second = RunUsage(run)
    assert second.spent("judge") == Usage(1, 30, 0.25)
    assert second.reserve("judge", Usage(1, 100), Limits(max_calls=2))
    assert not second.reserve("judge", Usage(1, 100), Limits(max_calls=2))
    assert second.spent("judge") == Usage(2, 130, 0.25)


def test_budgets_of_runs_and_names_are_apart(buffer: Buffer) -> None:
    one, other = (RunUsage(StoredRun(buffer, name).run) for name in ("one", "other"))
    assert one.reserve("judge", Usage(1), Limits(max_calls=1))
    assert other.reserve("judge", Usage(1), Limits(max_calls=1))
    assert one.reserve("rubric", Usage(1), Limits(max_calls=1))
    assert one.spent("nothing yet") == Usage()


def test_workers_that_spend_together_keep_the_limit(buffer: Buffer) -> None:
    run = StoredRun(buffer).run
    granted: list[bool] = []

    def worker() -> None:
        ledger = RunUsage(run)
        for _ in range(25):
            granted.append(ledger.reserve("judge", Usage(1, 7, 0.01), Limits(max_tokens=350, max_cost=1.0)))

    threads = [threading.Thread(target=worker) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(granted) == 50
    assert RunUsage(run).spent("judge").tokens == 350


def test_both_ledgers_decide_alike(buffer: Buffer) -> None:
    ledgers: list[UsageLedger] = [MemoryUsage(), RunUsage(StoredRun(buffer).run)]
    limits = [Limits(), Limits(max_calls=0), Limits(max_calls=3), Limits(max_tokens=99), Limits(max_cost=0.35)]
    amounts = [Usage(1, 40, 0.1), Usage(1, 59, 0.25), Usage(1, 1, 0.0), Usage(1, 0, 0.1)]
    said = [
        [[ledger.reserve(str(n), amount, limit) for amount in amounts] for n, limit in enumerate(limits)]
        for ledger in ledgers
    ]
    assert said[0] == said[1]
    assert [sum(row) for row in said[0]] == [4, 0, 3, 3, 3]
