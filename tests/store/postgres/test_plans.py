"""Statements cost only the rows they touch, even if a session planned them when the tables were nearly empty and not analysed."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

import rftdata
from rftdata import Buffer, exchange, labels
from rftdata.attempts.sampling import SamplingConfig
from rftdata.config import BufferConfig
from tests.support.store_roles import Roles, own_group, tokens
from tests.support.waiting import wait_until

NUM_GROUPS = 4000
BATCH = 50
LIMIT_S = 20
NUM_SESSIONS = 8  # as many as the buffer's pool may have


@pytest.fixture
def hasty(database_uri: str, tmp_path: Any) -> Iterator[Buffer]:
    """A buffer without autovacuum (and so without ANALYZE), whose statements are cut off after `LIMIT_S`."""
    options = BufferConfig(
        uri=f"{database_uri}&options=-c%20statement_timeout%3D{LIMIT_S}s",
        segments=str(tmp_path / "s"),
        min_free_bytes=0,
    )
    with rftdata.open(options) as opened:
        with opened.database.connection() as connection:
            for table in (
                "rollout_group",
                "worklist",
                "experience",
                "rollout",
                "task",
                "draw",
                "verdict",
                "task_stat",
                "task_observation",
            ):
                connection.execute(f"ALTER TABLE rft.{table} SET (autovacuum_enabled = false)")
        yield opened


def rows_read(buffer: Buffer, work: Callable[[], object]) -> int:
    """Rows of tables that `work` fetched; it is done 6 times, which is what is counted: the lesser of two counts, since the server's
    own housekeeping reads rows, too.
    """

    def read() -> int:
        work()
        # A session reports at the end of a statement, but not twice within a second if it need not; the next statement may be another's.
        with contextlib.ExitStack() as held:
            for _ in range(NUM_SESSIONS):
                held.enter_context(buffer.database.connection()).execute("SELECT pg_stat_force_next_flush()")
        with buffer.database.connection() as connection:
            (row,) = connection.execute(
                "SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0))::bigint AS n FROM pg_stat_user_tables WHERE schemaname = 'rft'"
            )
            return int(row["n"])

    def count() -> int:
        before = read()
        for _ in range(5):
            work()
        return read() - before

    return min(count(), count())


def groups(first: int, num: int) -> list[rftdata.Group]:
    return [own_group([0.5], task_key=str(key)) for key in range(first, first + num)]


def test_a_write_and_a_draw_read_no_more_rows_when_the_queue_is_long(hasty: Buffer) -> None:
    hasty.create_run(name="r", config={}, seed=1, steps=10**6, pipeline_version="none")
    keys, steps = itertools.count(0, BATCH), itertools.count(1)
    with hasty.writer("r") as writer, hasty.attempt("r") as attempt:

        def write() -> None:
            writer.insert(*groups(next(keys), BATCH))

        def draw() -> None:
            batch = attempt.draw_ahead(next(steps), BATCH // 2)
            assert batch is not None and attempt.is_current(batch)

        for _ in range(10):
            write()
        early, early_draws = rows_read(hasty, write), rows_read(hasty, draw)
        while next(keys) < NUM_GROUPS:
            write()
        late, late_draws = rows_read(hasty, write), rows_read(hasty, draw)
    assert 0 < late < 1.5 * early, (early, late)
    assert 0 < late_draws < 1.5 * early_draws, (early_draws, late_draws)


def test_the_states_of_all_experiences_cost_as_much_for_each_when_they_are_many(hasty: Buffer) -> None:
    roles = Roles(hasty)
    written, pages_of_each = 0, []
    with roles.attempt() as attempt:
        for step, num in ((1, 100), (2, 300)):
            roles.insert(*(own_group([0.5] * 64, task_key=str(written + i)) for i in range(num)))
            while roles.decide(keep=lambda row: row["group_id"] % 5 > 0):
                pass
            assert attempt.draw(step, num // 2) is not None
            written += num
            plan = _explained(hasty, "SELECT state, count(*) FROM rft.v_experience GROUP BY 1")
            pages_of_each.append((plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]) / written)
    assert 0 < pages_of_each[1] < 1.5 * pages_of_each[0], pages_of_each
    # Experiences, verdicts and draws are each read once, and not for every experience again.
    with hasty.database.connection() as connection:
        connection.execute("ANALYZE")
    scans = _scans(_explained(hasty, "SELECT state, count(*) FROM rft.v_experience GROUP BY 1"))
    assert {"experience", "verdict", "draw", "rollout_group", "run"} <= scans.keys() and max(scans.values()) < 10, scans


def test_a_question_reads_only_the_tables_of_its_columns(buffer: Buffer) -> None:
    for question, tables in {
        "SELECT finish_reason, avg(reward) FROM rft.v_experience GROUP BY 1": set(),
        "SELECT taskset, avg(reward) FROM rft.v_experience GROUP BY 1": {"task"},
        "SELECT response_hash, count(*) FROM rft.v_experience GROUP BY 1": set(),
        "SELECT times_sampled, count(*) FROM rft.v_experience GROUP BY 1": {"draw"},
        "SELECT state, count(*) FROM rft.v_experience GROUP BY 1": {"verdict", "draw"},
    }.items():
        found = _scans(_explained(buffer, question)).keys() - {"experience", "rollout_group", "run"}
        assert found == tables, question


def _explained(buffer: Buffer, question: str) -> dict[str, Any]:
    with buffer.database.connection() as connection:
        (row,) = connection.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {question}")
    plan: dict[str, Any] = row["QUERY PLAN"][0]["Plan"]
    return plan


def _scans(plan: dict[str, Any]) -> dict[str, int]:
    """How often each table of a plan was scanned."""
    found = {plan["Relation Name"]: int(plan["Actual Loops"])} if "Relation Name" in plan else {}
    for part in plan.get("Plans", []):
        for name, loops in _scans(part).items():
            found[name] = found.get(name, 0) + loops
    return found


@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"order": "prioritized"},
        {"order": "prioritized", "priority": {"formula": "mean_reward / (1 + times_sampled)"}, "max_times_sampled": 2},
        {"order": "rank"},
        {"mixture": [{"source": "import", "ratio": 1, "order": "uniform"}, {"source": "human", "ratio": 1}]},
    ],
)
def test_an_attempt_begins_on_a_long_queue_and_the_next_one_rewinds_it(hasty: Buffer, policy: dict[str, Any]) -> None:
    hasty.create_run(name="r", config={}, seed=1, steps=10**6, pipeline_version="none")
    with hasty.writer("r") as writer:
        for first in range(0, NUM_GROUPS, 500):
            writer.insert(*groups(first, 500))
    sampling = SamplingConfig.model_validate(policy)
    with hasty.attempt("r", sampling=sampling) as attempt:
        first_batch = attempt.draw(1, 1000, timeout_s=10)
        assert first_batch is not None and first_batch.num_groups == 1000
    with hasty.attempt("r", sampling=sampling) as attempt:
        again = attempt.draw(1, 1000, timeout_s=10)
        assert again is not None and again.rows["group_id"].to_pylist() == first_batch.rows["group_id"].to_pylist()


def test_verdicts_read_no_more_rows_when_many_groups_wait_and_all_can_be_relabelled_at_once(hasty: Buffer) -> None:
    roles = Roles(hasty)
    keys = itertools.count(0, BATCH)

    def decide() -> None:
        roles.insert(*groups(next(keys), BATCH))
        assert len(roles.decide()) == BATCH  # the batch just written: earlier ones are decided

    for _ in range(10):
        decide()
    early = rows_read(hasty, decide)
    while next(keys) < NUM_GROUPS:
        decide()
    late = rows_read(hasty, decide)
    assert 0 < late < 1.5 * early, (early, late)
    hasty.sql("UPDATE rft.experience SET reward = 0.25")
    (counts,) = hasty.sql(
        "SELECT (SELECT count(*) FROM rft.label) AS labels, (SELECT count(*) FROM rft.experience) AS experiences"
    ).to_pylist()
    assert counts["labels"] == counts["experiences"] > NUM_GROUPS // 2


def test_verdicts_on_a_long_queue_read_no_more_rows_from_batch_to_batch(hasty: Buffer) -> None:
    roles = Roles(hasty)
    for first in range(0, NUM_GROUPS, 500):
        roles.insert(*groups(first, 500))

    def decide() -> None:
        assert len(roles.decide()) == 100

    early = rows_read(hasty, decide)
    for _ in range(12):  # 14 batches are read before and after, of 40
        decide()
    late = rows_read(hasty, decide)
    assert 0 < late < 1.5 * early, (early, late)


def test_copies_of_some_experiences_are_found_without_reading_all_others(hasty: Buffer) -> None:
    hasty.create_run(name="r", config={}, seed=1, steps=10**6, pipeline_version="none")
    ids = list(range(1, BATCH + 1))

    def find() -> None:
        assert hasty.database.fetch("sharers_of_arrays", experience_ids=ids) == []
        assert hasty.database.fetch("unpurged_sharers", experience_ids=ids) == []

    with hasty.writer("r") as writer:
        writer.insert(*groups(0, 10 * BATCH))
        early = rows_read(hasty, find)
        writer.insert(*groups(10 * BATCH, NUM_GROUPS))
        late = rows_read(hasty, find)
    assert 0 < late < 1.5 * early, (early, late)


def test_labels_read_no_more_rows_when_many_groups_can_be_drawn_and_none_could_when_tables_were_analysed(
    hasty: Buffer,
) -> None:
    roles = Roles(hasty)
    roles.insert(*groups(NUM_GROUPS, BATCH))
    roles.decide()
    with hasty.database.connection() as connection:
        connection.execute("UPDATE rft.worklist SET available = false")
        connection.execute("ANALYZE rft.worklist")
    ids = itertools.count(1, BATCH)

    def label() -> None:
        first = next(ids)
        labels.set_rewards(hasty, dict.fromkeys(range(first, first + BATCH), 0.25), author="ada")

    def store(first: int, end: int) -> int:
        for key in range(first, end, 100):
            roles.insert(*groups(key, 100))
        while roles.decide():
            pass
        return rows_read(hasty, label)

    few, many = store(0, 800), store(800, 3000)
    assert 0 < many < 1.5 * few, (few, many)


def test_an_export_reads_rows_in_proportion_to_what_it_writes(hasty: Buffer, tmp_path: Path) -> None:
    files = itertools.count()

    def cost(run: str, num: int) -> int:
        hasty.create_run(name=run, config={}, seed=1, steps=1, pipeline_version="none")
        with hasty.writer(run) as writer:
            writer.insert(*groups(0, num))
        return rows_read(hasty, lambda: exchange.export(hasty, tmp_path / f"{next(files)}.parquet", runs=[run]))

    few, many = cost("few", 128), cost("many", 1280)
    assert 0 < many < 1.3 * 10 * few, (few, many)


def _export(options: BufferConfig, num: int, file: Path) -> pyarrow.Table:
    """An export of groups of one experience each; for every fourth there is one made of it, every fifth is labelled."""
    with rftdata.open(options, application="rft export") as buffer:
        buffer.create_run(name="source", config={}, seed=1, steps=1, pipeline_version="none")
        with buffer.writer("source") as writer:
            writer.insert(*groups(0, num))
            ids = buffer.sql("SELECT experience_id FROM rft.experience ORDER BY 1")["experience_id"].to_pylist()
            made = [own_group([0.5], task_key=f"made-{key}") for key in range(0, num, 4)]
            for group, parent_id in zip(made, ids[::4], strict=True):
                group.rollouts[0].sequences[0] = tokens(0.5, parent_id=parent_id)
            writer.insert(*made)
        labels.set_rewards(buffer, dict.fromkeys(ids[::5], 0.25), author="ada")
        exchange.export(buffer, file)
    table = pyarrow.parquet.read_table(file)
    # Each beside what it was made of, so that a slice has both.
    first = [
        row["parent_id"] or row["experience_id"] for row in table.select(["parent_id", "experience_id"]).to_pylist()
    ]
    return table.take(sorted(range(table.num_rows), key=lambda row: (first[row], row)))


def _rows_of_import(buffer: Buffer, file: Path, run: str) -> int:
    """Rows of tables that an import fetched. Sessions report before they end, so whatever reads much has a buffer of its own."""

    def read() -> int:
        others = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name <> 'rft'"
        wait_until(lambda: buffer.sql(others).num_rows == 0, "the sessions that were closed have ended")
        rows = buffer.sql(
            "SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0))::bigint AS n FROM pg_stat_user_tables WHERE schemaname = 'rft'"
        )
        return int(rows["n"][0].as_py())

    before = read()
    with rftdata.open(buffer.config, application="rft import") as opened:
        exchange.load(opened, file, run=run)
    return read() - before


def test_an_import_reads_rows_in_proportion_to_its_file_whatever_is_there_already(
    hasty: Buffer, tmp_path: Path
) -> None:
    table = _export(hasty.config, 560, tmp_path / "all.parquet")
    files = {"small": table.slice(0, 100), "large": table.slice(0, 600), "further": table.slice(600, 100)}
    for name, part in files.items():
        pyarrow.parquet.write_table(part, tmp_path / f"{name}.parquet")
    small = _rows_of_import(hasty, tmp_path / "small.parquet", "a")
    large = _rows_of_import(hasty, tmp_path / "large.parquet", "b")
    further = _rows_of_import(hasty, tmp_path / "further.parquet", "b")
    assert 0 < large < 1.3 * 6 * small, (small, large)
    assert 0 < further < 1.5 * small, (small, further)
    (counts,) = hasty.sql(
        "SELECT count(*) AS experiences, count(e.parent_id) AS made FROM rft.experience e JOIN rft.run USING (run_id) WHERE name = 'b'"
    ).to_pylist()
    assert counts == {"experiences": 700, "made": 140}
