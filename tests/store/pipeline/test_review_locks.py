"""Labels, answers and the questions of a pipeline meet on the same groups at the same moment, and none of them deadlocks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from operators.chain.build import build_chain
from rftdata import Buffer, labels
from rftdata.labels import RewardLabel
from rftdata.maintenance.purge import purge
from rftdata.pipeline.records import Question, Review
from rftdata.pipeline.verdicts import ask
from rftdata.postgres.database import execute
from tests.store.pipeline.test_pipeline_worker import rows, run_pipeline
from tests.support.store_roles import Roles, two_sealed_groups
from tests.support.waiting import wait_until

ASKS = [{"human_review": {"timeout": "1 h", "otherwise": "pass"}}]
ROUNDS = 60


@pytest.fixture
def asked(buffer: Buffer) -> Roles:
    """Groups 1 and 2 of two experiences each (1 to 4), sealed; all four are asked about. A deadlock shows at once."""
    name = rows(buffer, "SELECT current_database() AS name")[0]["name"]
    buffer.sql(f"""ALTER DATABASE "{name}" SET deadlock_timeout = '20 ms'""")
    roles = two_sealed_groups(buffer)
    assert run_pipeline(roles, build_chain(ASKS)) == []
    return roles


def at_once(*jobs: Callable[[int], object]) -> None:
    """Do every job in a thread of its own, for all rounds; raises what one of them raised."""

    def repeat(job: Callable[[int], object]) -> None:
        for turn in range(ROUNDS):
            job(turn)

    with ThreadPoolExecutor(len(jobs)) as pool:
        for done in [pool.submit(repeat, job) for job in jobs]:
            done.result()


def test_labels_of_several_groups_do_not_deadlock_with_verdicts_and_questions(buffer: Buffer, asked: Roles) -> None:
    def label(turn: int) -> None:
        reward = 0.25 + turn % 2 / 2
        # Rows with one reason are written together, in the order of reasons: the second group before the first.
        opinions = [RewardLabel(1, reward, reason="b"), RewardLabel(3, reward, reason="a")]
        labels.apply(buffer, opinions, author="ada", source="set")

    # One try: more of them would hide what happened.
    at_once(label, lambda turn: run_pipeline(asked, build_chain(ASKS), tries=1))
    told = rows(buffer, "SELECT experience_id, count(*) AS n FROM rft.label GROUP BY 1 ORDER BY 1")
    assert told == [{"experience_id": 1, "n": ROUNDS}, {"experience_id": 3, "n": ROUNDS}]


def test_answers_and_labels_do_not_deadlock_with_questions_that_are_asked_again(buffer: Buffer, asked: Roles) -> None:
    def answer(turn: int) -> None:
        """Answers the second question, and takes the answer back."""
        buffer.sql("UPDATE rft.review SET answer = 'drop' WHERE experience_id = 2")
        buffer.sql("UPDATE rft.review SET answer = NULL WHERE experience_id = 2")

    def confirm(turn: int) -> None:
        """Gives the rewards that stand, which is an answer, too."""
        labels.set_rewards(buffer, {3: 0.0, 1: 0.0}, author="ada")
        buffer.sql("UPDATE rft.review SET answer = NULL WHERE experience_id IN (1, 3)")

    def ask_again(turn: int) -> None:
        """Ask as a commit of verdicts does, which holds the groups' locks."""
        with buffer.database.transaction() as connection:
            execute(connection, "lock_groups", group_ids=[1, 2])
            ask(
                connection,
                asked.run_id,
                [Question(i, 1 + i // 3, "asks", Review("review", "Well?", 60.0, "drop")) for i in (1, 2, 3, 4)],
            )

    at_once(answer, confirm, ask_again)
    states = rows(buffer, "SELECT state, question FROM rft.v_review")
    assert states == [{"state": "waiting", "question": "Is this reward right?"}] * 4


def wait_for_waiting(buffer: Buffer, count: int, behind: int | None = None) -> None:
    """Until so many sessions wait for locks of others; `behind`: of the session of this process id, directly."""
    waiting = (
        "SELECT count(*) AS n FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    if behind is not None:
        waiting += f" AND {behind} = ANY (pg_blocking_pids(pid))"
    wait_until(lambda: rows(buffer, waiting) == [{"n": count}], f"{count} sessions wait", pause_s=0.01)


@pytest.mark.parametrize("who", ["label", "purge"])
def test_a_question_that_came_while_a_label_or_a_purge_waited_can_be_answered_at_once(
    buffer: Buffer, asked: Roles, who: str
) -> None:
    def change() -> object:
        if who == "label":
            return buffer.sql("UPDATE rft.experience SET reward = 0.3 WHERE experience_id IN (1, 3)")
        return purge(buffer, "experience_id IN (1, 3)", reason="asked to", author="ada", tries=1)

    with ThreadPoolExecutor(2) as pool, psycopg.connect(buffer.database.uri) as other:
        other.execute("SELECT FROM rft.rollout_group WHERE group_id = 2 FOR UPDATE")
        with buffer.database.transaction() as connection:
            execute(connection, "lock_groups", group_ids=[1])
            changed = pool.submit(change)
            wait_for_waiting(buffer, 1)  # has seen what was asked before, and waits for the first group
            ask(connection, asked.run_id, [Question(1, 1, "asks", Review("tone", "Polite?", 60.0, "pass"))])
        wait_for_waiting(buffer, 1, behind=other.info.backend_pid)  # has the first group, and waits for the second
        answered = pool.submit(buffer.sql, "UPDATE rft.review SET answer = 'drop' WHERE name = 'tone'")
        wait_for_waiting(buffer, 2)  # the answer waits for the first
        other.commit()
        answered.result()
        changed.result()
    asked_now = rows(
        buffer, "SELECT experience_id, answer::text, question FROM rft.review ORDER BY experience_id, name"
    )
    told, by_label = "Is this reward right?", "pass" if who == "label" else None
    assert [tuple(row.values()) for row in asked_now] == [
        (1, by_label, told if who == "label" else "[purged]"),
        (1, "drop", "Polite?" if who == "label" else "[purged]"),
        (2, None, told),
        (3, by_label, told if who == "label" else "[purged]"),
        (4, None, told),
    ]
