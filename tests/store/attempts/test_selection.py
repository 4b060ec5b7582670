"""Training from a stored selection: what a query may select, and that a run draws the same of it whatever happens to it."""

from __future__ import annotations

import threading
from collections import Counter
from itertools import chain
from typing import Any

import psycopg
import pytest

from rftdata import Buffer
from rftdata.attempts import stored_selection
from rftdata.attempts.attempt import Attempt
from rftdata.attempts.label_cut import at_label_cut
from rftdata.errors import FencedError, QueryError, RftError, SelectionChangedError
from rftdata.run import Run
from tests.store.pipeline.test_review_locks import wait_for_waiting
from tests.support.store_roles import LEASE_S, own_group

ALL = "select experience_id from rft.experience"


@pytest.fixture
def stored(buffer: Buffer) -> Buffer:
    """Twelve groups of two experiences, ids 1 to 24, with rewards 0 and 1."""
    run = buffer.create_run(name="source", config={}, seed=1, steps=1, pipeline_version="none", mode="train")
    with buffer.writer(run) as writer:
        writer.insert(*[own_group(task_key=str(i)) for i in range(12)])
    return buffer


def selecting(
    buffer: Buffer, sql: str = ALL, *, seed: int = 1, epochs: int = 1, pin_labels: bool = True, name: str = "selecting"
) -> Run:
    selected = stored_selection.select(buffer.database, sql, pin_labels=pin_labels, epochs=epochs)
    return buffer.create_run(
        name=name,
        config={},
        seed=seed,
        steps=100,
        pipeline_version="none",
        mode="train",
        selected=selected,
    )


def ids(attempt: Attempt, step: int, count: int = 5) -> list[int]:
    batch = attempt.draw(step, count, timeout_s=5)
    assert batch is not None
    found: list[int] = batch.rows["experience_id"].to_pylist()
    return found


def rewards(attempt: Attempt, step: int, count: int = 24) -> dict[int, float]:
    batch = attempt.draw(step, count, timeout_s=5)
    assert batch is not None
    return {row["experience_id"]: row["reward"] for row in batch.rows.to_pylist()}


def pair(buffer: Buffer, chosen: int, rejected: int) -> int:
    found = buffer.sql(
        "INSERT INTO rft.preference_pair (chosen_id, rejected_id, source) VALUES (%s, %s, 'rewards') RETURNING pair_id",
        [chosen, rejected],
    )
    return int(found["pair_id"][0].as_py())


class TestWhatIsStored:
    def test_the_run_row_states_what_was_selected(self, stored: Buffer) -> None:
        stored.sql("UPDATE rft.experience SET reward = 0.5 WHERE experience_id = 3")
        sql = f"{ALL} where reward > 0 order by random()"
        run = selecting(stored, sql, epochs=2)
        assert (run.source_sql, run.source_kind, run.source_rows, run.source_epochs) == (
            sql,
            "experience",
            13,
            2,
        )
        assert run.source_hash is not None and len(run.source_hash) == 64 and run.label_cut == 1

    def test_the_same_selection_has_the_same_hash_and_another_has_another(self, stored: Buffer) -> None:
        one = stored_selection.select(stored.database, ALL)
        assert (
            stored_selection.select(stored.database, f"{ALL} order by random() -- any order;").content_hash
            == one.content_hash
        )
        assert (
            stored_selection.select(stored.database, f"{ALL} where experience_id > 1").content_hash != one.content_hash
        )
        stored.sql("UPDATE rft.experience SET reward = 0.5 WHERE experience_id = 3")
        assert stored_selection.select(stored.database, ALL).content_hash != one.content_hash

    def test_queries_are_written_as_for_rft_sql(self, stored: Buffer) -> None:
        found = stored_selection.select(
            stored.database, "select experience_id from v_experience where prompt like '%+ 1%' and reward = 1;"
        )
        assert found.item_ids == tuple(range(2, 25, 2))

    def test_rewards_that_do_not_count_are_not_in_the_hash(self, stored: Buffer) -> None:
        one = stored_selection.select(stored.database, ALL, pin_labels=False)
        stored.sql("UPDATE rft.experience SET reward = 0.5 WHERE experience_id = 3")
        assert stored_selection.select(stored.database, ALL, pin_labels=False) == one


class TestDraws:
    def test_every_row_is_drawn_once_in_an_epoch_in_the_order_of_the_seed(self, stored: Buffer) -> None:
        orders = []
        for seed in (1, 1, 2):
            with stored.attempt(selecting(stored, seed=seed)) as attempt:
                orders.append([ids(attempt, step) for step in range(1, 6)])
        assert orders[0] == orders[1] != orders[2]
        for batches in orders:
            assert [len(batch) for batch in batches] == [5, 5, 5, 5, 4]
            assert sorted(chain.from_iterable(batches)) == list(range(1, 25))

    def test_epochs_are_shuffled_again_and_no_row_is_twice_in_a_batch(self, stored: Buffer) -> None:
        with stored.attempt(selecting(stored, epochs=3)) as attempt:
            batches = [ids(attempt, step, 7) for step in range(1, stored_selection.num_steps(24, 7, 3) + 1)]
            assert ids(attempt, len(batches) + 1, 7) == []
        assert all(len(set(batch)) == len(batch) for batch in batches)
        drawn = list(chain.from_iterable(batches))
        assert Counter(drawn) == dict.fromkeys(range(1, 25), 3)
        assert drawn[:24] != drawn[24:48] != drawn[48:]
        assert len(set(drawn[:24])) == 24

    @pytest.mark.parametrize(
        ("rows", "batch", "epochs", "steps"), [(24, 5, 1, 5), (24, 8, 2, 6), (3, 8, 2, 2), (10, 4, 3, 8)]
    )
    def test_a_selection_lasts_as_many_steps_as_it_states(
        self, stored: Buffer, rows: int, batch: int, epochs: int, steps: int
    ) -> None:
        assert stored_selection.num_steps(rows, batch, epochs) == steps
        with stored.attempt(selecting(stored, f"{ALL} where experience_id <= {rows}", epochs=epochs)) as attempt:
            lengths = [len(ids(attempt, step, batch)) for step in range(1, steps + 2)]
        assert lengths[-1] == 0 and 0 not in lengths[:-1] and sum(lengths) == rows * epochs

    def test_a_short_batch_states_why(self, stored: Buffer) -> None:
        with stored.attempt(selecting(stored, f"{ALL} where experience_id <= 3")) as attempt:
            batch = attempt.draw(1, 8, timeout_s=5)
            again = attempt.draw(1, 8, timeout_s=5)
        assert batch is not None and again is not None
        assert batch.short_reason == again.short_reason == "3 of 8: the stored selection has no more"
        assert again.rows.equals(batch.rows)

    def test_pairs_are_drawn_whole_the_chosen_one_first(self, stored: Buffer) -> None:
        pairs = {pair(stored, 2 * i, 2 * i - 1): (2 * i, 2 * i - 1) for i in range(1, 8)}
        with stored.attempt(selecting(stored, "select pair_id from rft.v_pair where margin > 0")) as attempt:
            drawn = []
            for step, size in ((1, 4), (2, 3)):
                batch = attempt.draw(step, 4, timeout_s=5)
                assert batch is not None and len(batch) == 2 * size
                found = batch.rows.to_pylist()
                for chosen, rejected in zip(found[::2], found[1::2], strict=True):
                    assert chosen["pair_id"] == rejected["pair_id"]
                    assert pairs[chosen["pair_id"]] == (chosen["experience_id"], rejected["experience_id"])
                    assert (chosen["reward"], rejected["reward"]) == (1.0, 0.0)
                    drawn.append(chosen["pair_id"])
        assert sorted(drawn) == sorted(pairs)

    def test_groups_written_into_the_run_are_not_part_of_its_selection(self, stored: Buffer) -> None:
        run = selecting(stored, f"{ALL} where experience_id <= 4")
        with stored.writer(run) as writer:
            writer.insert(own_group(task_key="late"))
        with stored.attempt(run) as attempt:
            assert sorted(ids(attempt, 1, 10)) == [1, 2, 3, 4]

    def test_a_batch_given_back_is_drawn_again(self, stored: Buffer) -> None:
        with stored.attempt(selecting(stored, epochs=2)) as attempt:
            before = [ids(attempt, 1), ids(attempt, 2)]
            batch = attempt.draw(2, 5)
            assert batch is not None
            attempt.release(batch)
            assert [ids(attempt, 2), ids(attempt, 1)] == before[::-1]

    def test_an_attempt_that_was_replaced_draws_nothing(self, stored: Buffer) -> None:
        run = selecting(stored)
        with stored.attempt(run, lease_s=LEASE_S) as old:
            ids(old, 1)
            stored.sql("UPDATE rft.run_attempt SET lease_until = now() - interval '1 s', pid = 0")
            with stored.attempt(run) as new:
                for act in (lambda: old.draw(2, 5), lambda: old.draw(1, 5)):
                    with pytest.raises(FencedError):
                        act()
                assert ids(new, 1)


class TestResume:
    @pytest.mark.parametrize("checkpoint", [0, 1, 4, 7])
    def test_a_rewound_history_draws_the_same_again(self, stored: Buffer, checkpoint: int) -> None:
        with stored.attempt(selecting(stored, epochs=2)) as straight:
            expected = [ids(straight, step, 7) for step in range(1, 8)]
        run = selecting(stored, epochs=2)
        first = stored.attempt(run)
        for step in range(1, min(checkpoint + 3, 7) + 1):
            assert ids(first, step, 7) == expected[step - 1]
            if step == checkpoint:
                first.commit_checkpoint(step, "/nowhere")
        first.close()
        with stored.attempt(run) as second:
            assert second.start_step == checkpoint
            drawn = [ids(second, step, 7) for step in range(checkpoint + 1, 8)]
            assert drawn == expected[checkpoint:]
            second.commit_checkpoint(7, "/nowhere")
        used = stored.sql(
            "SELECT experience_id, count(*) AS n FROM rft.v_consumption WHERE run_id = %s GROUP BY 1", [run.run_id]
        )
        assert set(used["n"].to_pylist()) == {2} and used.num_rows == 24

    def test_a_label_after_the_cut_changes_nothing_in_a_pinned_run_and_counts_in_a_new_one(
        self, stored: Buffer
    ) -> None:
        stored.sql("UPDATE rft.experience SET reward = 0.25 WHERE experience_id = 1")
        sql = f"{ALL} where reward = 0.25 or experience_id = 2"
        run = selecting(stored, sql)
        for value in (0.5, 0.75):
            stored.sql("UPDATE rft.experience SET reward = %s WHERE experience_id <= 3", [value])
        with stored.attempt(run) as attempt:
            assert rewards(attempt, 1) == {1: 0.25, 2: 1.0}
        with stored.attempt(run) as again:
            assert rewards(again, 1) == {1: 0.25, 2: 1.0}
        new = selecting(stored, f"{ALL} where experience_id <= 2")
        assert new.source_hash != run.source_hash
        with stored.attempt(new) as attempt:
            assert rewards(attempt, 1) == {1: 0.75, 2: 0.75}

    def test_a_run_that_is_not_pinned_uses_current_rewards(self, stored: Buffer) -> None:
        run = selecting(stored, f"{ALL} where experience_id <= 2", pin_labels=False)
        stored.sql("UPDATE rft.experience SET reward = 0.5 WHERE experience_id = 1")
        with stored.attempt(run) as attempt:
            assert rewards(attempt, 1) == {1: 0.5, 2: 1.0}

    def test_a_changed_selection_is_reported_and_not_trained_on(self, stored: Buffer) -> None:
        run = selecting(stored)
        with stored.attempt(run):
            pass
        # Nothing of ours does this: a file was replaced, a back-up of half the database was played in.
        stored.sql("UPDATE rft.segment SET checksum = 'another'")
        with pytest.raises(SelectionChangedError, match=r"the run 'selecting'.*24 of 24 rows, hash .* instead of"):
            stored.attempt(run)
        stored.sql("DELETE FROM rft.segment")
        with pytest.raises(SelectionChangedError, match="experience 1 has no token arrays any more"):
            stored.attempt(run)
        assert stored.sql("SELECT count(*) AS n FROM rft.run_attempt")["n"][0].as_py() == 1

    def test_the_queue_itself_is_part_of_the_check(self, stored: Buffer) -> None:
        run = selecting(stored)
        stored.sql(
            "DELETE FROM rft.worklist WHERE run_id = %s AND consumer = 'selection' AND item_id = 7", [run.run_id]
        )
        with pytest.raises(SelectionChangedError, match="23 of 24 rows"):
            stored.attempt(run)


class TestTheCut:
    def test_a_label_under_way_is_waited_for(self, stored: Buffer) -> None:
        """Its id is lower than that of a label committed meanwhile: a cut at the newest committed one would miss it."""
        uri = stored.config.uri
        with psycopg.connect(uri) as early:
            early.execute("UPDATE rft.experience SET reward = 0.5 WHERE experience_id = 1")
            stored.sql("UPDATE rft.experience SET reward = 0.5 WHERE experience_id = 5")
            found: list[stored_selection.Selection] = []
            thread = threading.Thread(
                target=lambda: found.append(stored_selection.select(stored.database, f"{ALL} where reward = 0.5"))
            )
            thread.start()
            wait_for_waiting(stored, 1, behind=early.info.backend_pid)
            assert not found
            early.commit()
            thread.join()
        assert found[0].item_ids == (1, 5) and found[0].label_cut == 2

    def test_people_continue_labelling_while_the_query_runs_and_it_does_not_see_them(self, stored: Buffer) -> None:
        with at_label_cut(stored.database) as (connection, cut):
            stored.sql("UPDATE rft.experience SET reward = 0.5 WHERE experience_id = 1")
            row = connection.execute(
                "SELECT reward, rft.reward_at(1, %s) AS at FROM rft.experience WHERE experience_id = 1", [cut]
            ).fetchone()
        assert cut == 0 and row == {"reward": 0.0, "at": 0.0}
        after = stored.sql(
            "SELECT reward, rft.reward_at(1, %s) AS at FROM rft.experience WHERE experience_id = 1", [cut]
        )
        assert after.to_pylist() == [{"reward": 0.5, "at": 0.0}]


BAD: dict[str, tuple[str, str]] = {
    "writes": ("delete from rft.task returning task_id as experience_id", "rejected the query"),
    "writes in a WITH": (
        "with gone as (delete from rft.task returning task_id) select task_id as experience_id from gone",
        "rejected the query",
    ),
    "calls what writes": ("select nextval('rft.label_label_id_seq') as experience_id", "writes"),
    "two statements": (
        "select 1 as experience_id) s; commit; delete from rft.taskset; select * from (select 1",
        "rejected the query",
    ),
    "no SQL": ("choose experience_id", "rejected the query"),
    "unknown table": ("select experience_id from rft.experiences", "rejected the query"),
    "other columns": (
        "select experience_id, reward from rft.experience",
        r"experience_id, reward.*allowed: experience_id, pair_id, or group_id",
    ),
    "another column": ("select rollout_id from rft.experience", r"got 'rollout_id'"),
    "no id": ("select response as experience_id from rft.experience", "is not an id"),
    "null": ("select null::bigint as experience_id", "is not an id"),
    "nothing": (f"{ALL} where reward > 7", "selects nothing"),
    "twice": (
        "select experience_id from rft.experience, generate_series(1, 2)",
        r"24 rows more than once; the first is experience_id 1",
    ),
    "unknown": (f"{ALL} union all select 991", r"1 of the 25 rows .* experience 991 does not exist"),
    "unknown pair": ("select 991 as pair_id", "pair 991 does not exist"),
    "unknown group": ("select 991 as group_id", "group 991 does not exist"),
    "a group several times": (
        "select group_id from rft.experience",
        r"12 rows more than once; the first is group_id 1",
    ),
    "priorities without an order": (
        "select group_id, 1 as priority from rft.v_group",
        "set sampling.order: prioritized",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_query_that_cannot_be_a_selection_is_refused(name: str, stored: Buffer) -> None:
    before = stored.sql("SELECT count(*) AS n FROM rft.task").to_pylist()
    sql, message = BAD[name]
    with pytest.raises(QueryError, match=message):
        selecting(stored, sql)
    assert stored.sql("SELECT count(*) AS n FROM rft.run").to_pylist() == [{"n": 1}]
    assert stored.sql("SELECT count(*) AS n FROM rft.task").to_pylist() == before


def test_experiences_without_arrays_cannot_be_selected(stored: Buffer) -> None:
    stored.sql("DELETE FROM rft.segment")
    with pytest.raises(QueryError, match="has no token arrays any more"):
        selecting(stored)


def test_a_pair_of_answers_to_different_prompts_cannot_be_selected(stored: Buffer) -> None:
    """Such a pair is refused when it is inserted; this one was stored by an owner who switched that off."""
    with stored.writer(stored.find_run("source")) as writer:
        writer.insert(_other_prompt())
    stored.sql("ALTER TABLE rft.preference_pair DISABLE TRIGGER pair_exists")
    wrong = pair(stored, 1, 25)
    with pytest.raises(
        QueryError, match=rf"pair {wrong} compares answers to different prompts \(experiences 1 and 25\)"
    ):
        selecting(stored, "select pair_id from rft.preference_pair")


@pytest.mark.parametrize("source", ["human", "rewards"])
def test_a_pair_of_answers_to_different_prompts_is_refused_when_it_is_inserted(stored: Buffer, source: str) -> None:
    with stored.writer(stored.find_run("source")) as writer:
        writer.insert(_other_prompt(), _other_prompt())
    insert = (
        "INSERT INTO rft.preference_pair (chosen_id, rejected_id, source) VALUES (2, 1, %(s)s), (%(a)s, %(b)s, %(s)s)"
    )
    with pytest.raises(
        QueryError, match=r"compares answers to different prompts \(experiences 25 and 1\).*answers to one prompt"
    ):
        stored.sql(insert, {"s": source, "a": 25, "b": 1})
    assert stored.sql("SELECT FROM rft.preference_pair").num_rows == 0
    stored.sql(insert, {"s": source, "a": 25, "b": 26})  # of different groups, whose prompts have one text
    assert len(stored_selection.select(stored.database, "select pair_id from rft.preference_pair").item_ids) == 2


def _other_prompt() -> Any:
    from rftdata import Group, Rollout
    from tests.support.store_roles import tokens

    return Group(
        [Rollout(0, "ok", 1.0, [tokens(1.0, prompt="2 + 2 =")])],
        source="import",
        taskset="mine",
        task_key="x",
        payload={},
    )


class TestPairs:
    @pytest.fixture
    def one(self, stored: Buffer) -> int:
        return pair(stored, 2, 1)

    def test_the_margin_of_a_built_pair_follows_the_rewards(self, stored: Buffer, one: int) -> None:
        facts = "SELECT margin, stands FROM rft.v_pair WHERE pair_id = %s"
        assert stored.sql(facts, [one]).to_pylist() == [{"margin": 1.0, "stands": True}]
        stored.sql("UPDATE rft.experience SET reward = -1 WHERE experience_id = 2")
        assert stored.sql(facts, [one]).to_pylist() == [{"margin": -1.0, "stands": False}]
        stored.sql("UPDATE rft.experience SET reward = NULL WHERE experience_id = 2")
        assert stored.sql(facts, [one]).to_pylist() == [{"margin": None, "stands": False}]

    @pytest.mark.parametrize("margin", [None, 0.25])
    def test_a_pair_of_a_person_stands_whatever_the_rewards_are(self, stored: Buffer, margin: float | None) -> None:
        stored.sql("INSERT INTO rft.preference_pair (chosen_id, rejected_id, margin) VALUES (3, 4, %s)", [margin])
        found = stored.sql("SELECT margin, stands, source::text FROM rft.v_pair").to_pylist()
        assert found == [{"margin": margin, "stands": True, "source": "human"}]

    @pytest.mark.parametrize(
        "statement",
        [
            "UPDATE rft.preference_pair SET chosen_id = 3",
            "DELETE FROM rft.preference_pair",
            "TRUNCATE rft.preference_pair",
        ],
    )
    def test_are_never_changed(self, stored: Buffer, one: int, statement: str) -> None:
        with pytest.raises(RftError, match=r"append-only.*other way round"):
            stored.sql(statement)

    @pytest.mark.parametrize(
        ("values", "message"),
        [("(1, 1)", "check constraint"), ("(2, 1), (1, 999)", "names experience 999, which does not exist")],
    )
    def test_compare_two_experiences_that_exist(self, stored: Buffer, values: str, message: str) -> None:
        with pytest.raises(QueryError, match=message):
            stored.sql(f"INSERT INTO rft.preference_pair (chosen_id, rejected_id) VALUES {values}")
        assert stored.sql("SELECT count(*) AS n FROM rft.preference_pair")["n"].to_pylist() == [0]
