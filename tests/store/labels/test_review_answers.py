"""Answers to reviews name what their author saw: stored once, never over what was not seen, and withdrawn whole."""

from __future__ import annotations

import pytest

import rftdata
from rftdata import labels, reviews
from rftdata.errors import ConflictError, QueryError
from rftdata.postgres.database import queries
from tests.support import studio_run


@pytest.fixture
def asked(buffer: rftdata.Buffer) -> rftdata.Buffer:
    studio_run.ask(buffer, studio_run.store(buffer, num_sums=1))
    return buffer


def reward(buffer: rftdata.Buffer, experience: int) -> float:
    return float(
        buffer.sql("SELECT reward FROM rft.experience WHERE experience_id = %s", [experience])["reward"][0].as_py()
    )


def given(choice: reviews.Choice = "pass", **fields: float | int | str | None) -> reviews.ReviewAnswer:
    return reviews.ReviewAnswer(review_id=1, choice=choice, **fields)  # type: ignore[arg-type]


def test_the_queue_is_walked_through_by_deadline(asked: rftdata.Buffer) -> None:
    first, second = reviews.next_reviews(asked, 2)
    place = reviews.QueuePlace(first["deadline"], first["review_id"])
    assert reviews.next_reviews(asked, 1, after=place)[0]["review_id"] == second["review_id"]
    assert reviews.next_reviews(asked, 1, run_id=999) == []


def test_a_page_of_the_queue_sorts_nothing(asked: rftdata.Buffer) -> None:
    first = reviews.next_reviews(asked, 1)[0]
    values = {"after_deadline": first["deadline"], "after_id": first["review_id"], "run_id": None, "count": 4}
    with asked.database.transaction() as connection:
        connection.execute(queries()["plan_by_index"])
        rows = connection.execute(f"EXPLAIN {queries()['next_reviews']}", values).fetchall()
    plan = "\n".join(row["QUERY PLAN"] for row in rows)
    assert "Index Scan using review_open" in plan and "Sort" not in plan, plan


def test_an_answer_is_stored_once_and_withdrawn_with_its_reward(asked: rftdata.Buffer) -> None:
    before = reward(asked, 1)
    receipt = reviews.answer(asked, given(reward=0.25, reason="half"), author="ada")
    again = reviews.answer(asked, given(reward=0.25, reason="half"), author="ada")
    assert reward(asked, 1) == 0.25 and again.is_repeated and again.label_batch_id == receipt.label_batch_id
    assert len(labels.history(asked, 1)) == 1
    for _ in range(2):  # withdrawing twice is withdrawing
        reviews.withdraw(asked, receipt, author="ada")
    assert reward(asked, 1) == before and reviews.review(asked, 1)["answer"] is None


def test_what_was_not_seen_is_not_overwritten(asked: rftdata.Buffer) -> None:
    labels.set_rewards(asked, {2: 0.75}, author="bob")
    with pytest.raises(ConflictError, match="bob"):
        reviews.answer(asked, reviews.ReviewAnswer(review_id=2, choice="pass", reward=0.1), author="ada")
    reviews.answer(asked, given("drop"), author="ada")
    with pytest.raises(ConflictError, match="answered by ada meanwhile: drop"):
        reviews.answer(asked, given(reward=1.0), author="bob")


def test_a_later_label_keeps_an_answer_from_being_withdrawn(asked: rftdata.Buffer) -> None:
    receipt = reviews.answer(asked, given(reward=0.25), author="ada")
    labels.set_rewards(asked, {1: 0.5}, author="bob")
    with pytest.raises(ConflictError, match=r"bob has set its reward to 0\.5"):
        reviews.withdraw(asked, receipt, author="ada")
    assert reward(asked, 1) == 0.5 and reviews.review(asked, 1)["answer"] == "pass"


def test_an_answer_without_its_receipt_is_withdrawn_with_its_reward(asked: rftdata.Buffer) -> None:
    before = reward(asked, 1)
    reviews.answer(asked, given(reward=0.125), author="ada")
    lost = reviews.AnswerReceipt(1, None)
    reviews.withdraw(asked, lost, author="ada")
    assert reward(asked, 1) == before and reviews.review(asked, 1)["answer"] is None


def test_a_reward_that_was_set_before_the_answer_and_not_by_it_stays(asked: rftdata.Buffer) -> None:
    reviews.answer(asked, given(), author="ada")
    labels.set_rewards(asked, {1: 0.5}, author="ada")
    lost = reviews.AnswerReceipt(1, None)
    reviews.withdraw(asked, lost, author="ada")
    seen = reviews.review(asked, 1)["label_id"]
    reviews.answer(asked, given(seen_label_id=seen), author="ada")
    reviews.withdraw(asked, lost, author="ada")
    assert reward(asked, 1) == 0.5 and reviews.review(asked, 1)["answer"] is None


def written_anew(buffer: rftdata.Buffer) -> None:
    """Write all labels and reviews again in one transaction, as the restoring of a backup does."""
    with buffer.database.transaction() as connection:
        for table, column in (("rft.label", "reason"), ("rft.review", "question")):
            connection.execute(f"ALTER TABLE {table} DISABLE TRIGGER USER")
            connection.execute(f"UPDATE {table} SET {column} = {column}")
            connection.execute(f"ALTER TABLE {table} ENABLE TRIGGER USER")


def test_after_a_backup_was_restored_an_answer_takes_its_own_reward_back_and_no_other(asked: rftdata.Buffer) -> None:
    answered = reviews.answer(asked, given(reward=0.25), author="ada")
    reviews.withdraw(asked, answered, author="ada")
    labels.set_rewards(asked, {1: 0.5}, author="bob")  # answers it, too
    reviews.withdraw(asked, reviews.AnswerReceipt(1, None), author="ada")
    before = reward(asked, 1)
    newest = reviews.review(asked, 1)["label_id"]
    reviews.answer(asked, given(seen_label_id=newest), author="ada")  # keeps the reward as it is
    written_anew(asked)
    reviews.withdraw(asked, reviews.AnswerReceipt(1, None), author="ada")
    assert reward(asked, 1) == before and reviews.review(asked, 1)["label_id"] == newest
    reviews.answer(asked, given(reward=0.75, seen_label_id=newest), author="ada")
    written_anew(asked)
    reviews.withdraw(asked, reviews.AnswerReceipt(1, None), author="ada")
    assert reward(asked, 1) == before and reviews.review(asked, 1)["answer"] is None


def test_a_receipt_of_an_earlier_answer_withdraws_nothing(asked: rftdata.Buffer) -> None:
    earlier = reviews.answer(asked, given(reward=0.125), author="ada")
    reviews.withdraw(asked, earlier, author="ada")
    seen = reviews.review(asked, 1)["label_id"]
    reviews.answer(asked, given(reward=0.25, seen_label_id=seen), author="ada")
    with pytest.raises(ConflictError, match="answered again since"):
        reviews.withdraw(asked, earlier, author="ada")
    assert reward(asked, 1) == 0.25


def test_an_answer_by_rewards_of_several_experiences_is_withdrawn_as_a_whole(asked: rftdata.Buffer) -> None:
    rows = reviews.next_reviews(asked, 2)
    batch = labels.set_rewards(asked, {row["experience_id"]: 0.125 for row in rows}, author="ada")
    with pytest.raises(QueryError, match=f"rft label undo {batch.label_batch_id}"):
        reviews.withdraw(asked, reviews.AnswerReceipt(rows[0]["review_id"], None), author="ada")
    assert [reward(asked, row["experience_id"]) for row in rows] == [0.125, 0.125]


def test_late_unknown_and_wrong_answers_change_nothing(asked: rftdata.Buffer) -> None:
    with pytest.raises(QueryError, match="no such review"):
        reviews.answer(asked, reviews.ReviewAnswer(review_id=999, choice="pass"), author="ada")
    with pytest.raises(QueryError, match="finite"):
        reviews.answer(asked, given(reward=float("nan")), author="ada")
    with pytest.raises(QueryError, match="gets no reward"):
        reviews.answer(asked, given("drop", reward=1.0), author="ada")
    name = asked.sql("SELECT current_database() AS name")["name"][0].as_py()
    asked.sql(f"""ALTER DATABASE "{name}" SET rft.clock_shift = '90000 s'""")
    with rftdata.open(asked.config) as later, pytest.raises(QueryError, match="deadline of review 1 has passed"):
        reviews.answer(later, given(), author="ada")
    assert labels.batches(asked) == []
