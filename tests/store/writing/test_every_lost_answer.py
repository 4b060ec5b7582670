"""Answers of transactions that are lost on the line: nothing is done twice, and nothing stays undone or claimed.

The whole life of a run, with every verb that writes, runs three times: over a line that loses nothing, over one that loses the answer of
every
kind of transaction once, and over one that loses it as long as retries last. The rows must be the same.
"""

from __future__ import annotations

import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

import rftdata
from rftdata import Buffer, exchange, labels
from rftdata.attempts.attempt import Attempt
from rftdata.attempts.evaluations import Answer, claim_evaluation, finish_evaluation, plan_evaluations, questions
from rftdata.config import BufferConfig
from rftdata.errors import BufferUnavailableError, RftError
from rftdata.maintenance import erasure, purge
from rftdata.maintenance.archive import archive
from rftdata.maintenance.restore_run import restore_run
from rftdata.maintenance.states import wrong_states
from rftdata.maintenance.verification import verify
from rftdata.pipeline.queue import claim_sealed_groups, read_groups
from rftdata.pipeline.records import DECISION_SCHEMA, CreatedTask, Question, Review, StageRun, Verdicts, kept
from rftdata.pipeline.verdicts import commit_verdicts
from rftdata.pipeline.versions import commit_replay
from rftdata.planning import partial
from rftdata.planning.claims import ClaimedGroup, claim_groups, release_groups
from rftdata.postgres import retry
from rftdata.postgres.database import queries, reads
from rftdata.workers.leases import release_lost_claims
from tests.support.lossy_line import LossyLine, Statements
from tests.support.store_roles import LEASE_S, Roles, own_group
from tests.support.waiting import PATIENCE_S

# Statements that change nothing by themselves.
_FRAME = {
    "BEGIN",
    "COMMIT",
    "ROLLBACK",
    "plan_by_index",
    "allow_hash_joins",
    "limit_idleness",
    "fence",
    "lock_run",
    "prepare_session",
}
# What differs between two lives in which the same has happened: processes, and numbers of tries, with the batches of labels that a lost try began.
_TABLES_OF_PROCESSES = ("label_batch", "worker", "worker_span")
_NUMBERED = re.compile(r"((?:parent_experience_id\W+|label batch ))\d+")
_VOLATILE = re.compile(
    r"(_id|_ids|_by|_at|_until|_token|_seconds|_key|_bytes)$|^(receipt|uri|checksum|first_checksum|draw_key|newest_of|label_cut|path|rows|digest|states|seconds)$"
)


def _as_sent(text: str) -> str:
    """A query as the driver sends it."""
    numbers: dict[str, str] = {}
    return re.sub(r"%\((\w+)\)s", lambda m: numbers.setdefault(m[1], f"${len(numbers) + 1}"), text).replace("%%", "%")


NAMES = {_as_sent(text): name for name, text in queries().items()}


def kind_of(statements: Statements) -> tuple[str, ...]:
    """Names of the statements of a transaction, each once."""
    return tuple(dict.fromkeys(NAMES.get(text, text.split("(")[0][:40]) for text in statements))


def writes(kind: tuple[str, ...]) -> bool:
    return any(name not in _FRAME and name not in reads() for name in kind)


class Life:
    """What all roles and people do for one run, verb by verb, as their programs do it. A verb that raised is called again.

    Args:
        direct: the buffer, over a line that loses nothing.
        through: the same buffer.
    """

    def __init__(self, direct: Buffer, through: Buffer, folder: Path) -> None:
        self.direct, self.buffer, self.folder = direct, through, folder
        self.roles = Roles(through, batch_groups=2, steps=2, num_tasks=8)
        self.run = self.roles.run
        self.receipt = uuid.uuid4()
        self.attempt: Attempt
        self.labelled: list[int] = []
        self.has_ended = False

    def replace_worker(self) -> None:
        """End the worker, whose claims may not be known to it, and start another one."""
        run = self.direct.find_run(self.run.run_id)
        self.direct.database.run("stop_worker", worker_id=self.roles.worker_id, error=None)
        release_lost_claims(run)
        if self.has_ended:
            return
        found = self.direct.database.fetch(
            "insert_worker", run_id=run.run_id, role="explorer", host="here", pid=1, pid_space="", pid_started=0
        )
        self.roles.worker_id = found[0]["worker_id"]

    def verbs(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """Names and calls, in order."""
        yield "start", self.start
        yield "publish", lambda: self.publish(0)
        yield "ask for evaluations", self.plan_evaluations
        yield "evaluate", self.evaluate
        yield "plan", self.roles.plan
        yield "explore", self.explore
        yield "write", self.write
        yield "ask people", lambda: self.decide(asks=True)
        yield "answer", self.answer
        yield "decide", lambda: self.decide(asks=False)
        yield "label", self.label
        yield "undo", lambda: labels.undo(self.buffer, self.label_batch, author="eve")
        yield "decide again", lambda: self.decide(asks=False)
        yield "replay", self.replay
        yield "set priorities", lambda: self.attempt.set_priorities({self.groups()[0]: 2.0})
        yield "draw", self.draw
        yield "give back", lambda: self.attempt.release_step(1)
        yield "draw again", self.draw
        yield "record", self.record
        yield "publish a step", lambda: self.publish(1)
        yield (
            "checkpoint",
            lambda: self.attempt.commit_checkpoint(1, "/checkpoint/1", policy_version_id=self.roles.version),
        )
        yield "forget a checkpoint", self.forget_checkpoint
        yield "finish", lambda: self.attempt.finish("done")
        yield "end", self.attempt_ends
        yield "export", self.export
        yield "import", lambda: exchange.load(self.buffer, self.folder / "rows.parquet", run="copy")
        yield "purge", self.purge
        yield "erase", self.erase
        yield "archive", lambda: archive(self.buffer, "roles", author="ada")
        yield "restore", lambda: restore_run(self.buffer, "roles")

    def start(self) -> None:
        self.attempt = self.roles.attempt(publish=False)

    def publish(self, step: int) -> None:
        self.roles.publish(self.attempt, step)

    def plan_evaluations(self) -> None:
        assert self.roles.version is not None
        plan_evaluations(
            self.attempt,
            policy_version_id=self.roles.version,
            trainer_step=0,
            purpose="validation",
            tasksets=["set0"],
            decodings=["greedy"],
            uri="/weights/0",
            checksum="0",
        )

    def evaluate(self) -> None:
        worker = self.roles.worker_id
        while (found := claim_evaluation(self.run, worker, lease_s=LEASE_S)) is not None:
            answers = [
                Answer(task_id=q.task_id, reward=1.0, response="2", num_response_tokens=1, finish_reason="stop")
                for q in questions(self.run, found)
            ]
            finish_evaluation(self.run, found.evaluation_id, worker, answers, 1.0)

    def explore(self) -> None:
        """Sample one group in two claims, with what was sampled before, then the others."""
        while claimed := self.claim(1):
            begun = partial.take_up(self.run, self.roles.worker_id, claimed, policy_step=0, max_staleness=4)
            if not begun and claimed[0].ordinal == 0:
                self.keep(claimed[0])
                release_groups(self.run, self.roles.worker_id)
                continue
            self.roles.insert(self.roles.result(claimed[0], [0.0, 1.0]))

    def claim(self, count: int) -> list[ClaimedGroup]:
        return claim_groups(
            self.run, self.roles.worker_id, policy_step=0, last_step=0, count=count, lease_s=LEASE_S, held=[]
        )

    def keep(self, group: ClaimedGroup) -> None:
        assert self.roles.version is not None
        answer = partial.PartialAnswer(
            rollout_index=0,
            generation_index=0,
            input_digest=b"same",
            token_ids=[8],
            logprobs=[-0.5],
            version_spans=[(0, self.roles.version)],
            finish_reason=None,
        )
        partial.keep(
            self.run,
            [partial.Part(group_id=group.group_id, claim_token=group.claim_token, first_token=0, answer=answer)],
        )

    def write(self) -> None:
        with self.buffer.writer(self.run) as writer:
            writer.insert(own_group(task_key="own"), own_group(task_key="other"), receipt=self.receipt)

    def decide(self, *, asks: bool) -> None:
        """Decide on everything, or ask about the first experience of each group; with the figures of a stage, and a task made of each group."""
        worker = self.roles.worker_id
        while (batch := claim_sealed_groups(self.run, worker, count=100, lease_s=LEASE_S)) is not None:
            rows = batch.table.to_pylist()
            first = {row["group_id"]: row["experience_id"] for row in reversed(rows)}
            review = Review("sure", "are you sure?", 3600.0, "pass")
            verdicts = Verdicts(
                DECISION_SCHEMA.empty_table() if asks else kept(batch.table),
                stages=[StageRun("gate", 1, len(rows), len(rows), 0, 1.0)],
                questions=[Question(i, group, "gate", review) for group, i in first.items()] if asks else [],
                created=[CreatedTask("made", f"of {i}", {"answer": "2"}, i, stage="gate") for i in first.values()],
            )
            commit_verdicts(self.run, worker, "p1", batch, verdicts)

    def replay(self) -> None:
        """Decide on two groups under another version."""
        batch = read_groups(self.buffer.database, self.groups()[:2])
        num_rows = batch.table.num_rows
        verdicts = Verdicts(kept(batch.table), stages=[StageRun("gate", 1, num_rows, num_rows, 0, 1.0)])
        commit_replay(self.run, self.roles.worker_id, "other", batch, verdicts)

    def experiences(self) -> list[int]:
        rows = self.direct.sql(
            "SELECT experience_id FROM rft.experience WHERE run_id = %s ORDER BY 1", [self.run.run_id]
        )
        found: list[int] = rows["experience_id"].to_pylist()
        return found

    def groups(self) -> list[int]:
        rows = self.direct.sql(
            "SELECT group_id FROM rft.rollout_group WHERE run_id = %s ORDER BY ordinal", [self.run.run_id]
        )
        found: list[int] = rows["group_id"].to_pylist()
        return found

    def answer(self) -> None:
        """Half of the questions by labels, the others as such."""
        self.labelled = self.experiences()
        labels.set_rewards(self.buffer, dict.fromkeys(self.labelled[:4], 0.5), author="ada", reason="half right")
        self.buffer.sql("UPDATE rft.review SET answer = 'pass' WHERE answer IS NULL")

    def label(self) -> None:
        labels.set_rewards(self.buffer, {self.labelled[1]: 0.75}, author="ada")
        self.label_batch = labels.batches(self.direct)[0]["label_batch_id"]

    def draw(self) -> None:
        self.drawn = self.attempt.draw(1, 2, timeout_s=PATIENCE_S)
        assert self.drawn is not None and self.drawn.num_groups == 2

    def record(self) -> None:
        assert self.drawn is not None
        self.attempt.record_step(
            1, self.drawn, wait_seconds=0, train_seconds=0, publish_seconds=0, metrics={"loss": 1.0}
        )

    def forget_checkpoint(self) -> None:
        rows = self.direct.sql("SELECT checkpoint_id FROM rft.checkpoint")
        self.attempt.forget_checkpoint(rows["checkpoint_id"][0].as_py())

    def attempt_ends(self) -> None:
        self.attempt.close()
        self.has_ended = True
        self.replace_worker()

    def export(self) -> None:
        exchange.export(self.buffer, self.folder / "rows.parquet", runs=["roles"])

    def purge(self) -> None:
        purge.purge(self.buffer, "task_key = 'own'", reason="asked to", author="ada", runs=["roles"], tasks_too=True)

    def erase(self) -> None:
        self.direct.sql("UPDATE rft.retired_range SET retired_at = retired_at - interval '1 day'")
        erasure.erase(self.buffer)


# What a verb that is called again may raise: it was done, and states so.
DONE = {"archive": "archived already", "restore": "is not archived", "export": "exists"}


class Losing:
    """Chooses the transactions whose answers are lost: every kind in the first call of the verb that carries it out.

    Args:
        for_ever: lose each as often as it is tried within the call, and reads never; otherwise once.
    """

    def __init__(self, *, for_ever: bool) -> None:
        self._for_ever = for_ever
        self._verb = ""
        self._past: set[tuple[str, tuple[str, ...]]] = set()
        self._now: set[tuple[str, tuple[str, ...]]] = set()

    def begin(self, verb: str) -> None:
        """A call of a verb begins."""
        self._verb = verb
        self._past |= self._now
        self._now = set()

    def __call__(self, statements: Statements) -> bool:
        kind = self._verb, kind_of(statements)
        if kind in self._past or "prepare_session" in kind[1] or (self._for_ever and not writes(kind[1])):
            return False
        (self._now if self._for_ever else self._past).add(kind)
        return True


def lead(life: Life, line: LossyLine, losing: Losing | None) -> None:
    """Call every verb until it has succeeded."""
    for verb, call in life.verbs():
        is_repeated = False
        while True:
            num_lost = line.num_lost
            if losing is not None:
                losing.begin(verb)
            try:
                with line.losing(losing or (lambda statements: False)):
                    call()
                break
            except BufferUnavailableError:
                if line.num_lost == num_lost:
                    raise
                is_repeated = True
                life.replace_worker()
            except RftError as error:
                if not is_repeated or verb not in DONE or DONE[verb] not in str(error):
                    raise
                break


def contents(buffer: Buffer) -> dict[str, Counter[str]]:
    """The rows of all tables. Of what differs between two buffers in which the same has happened, whether it is NULL."""
    tables: dict[str, list[str]] = {}
    columns = buffer.sql(
        "SELECT table_name, column_name, data_type FROM information_schema.columns JOIN information_schema.tables USING (table_schema, table_name)"
        " WHERE table_schema = 'rft' AND table_type = 'BASE TABLE' ORDER BY 1, ordinal_position"
    ).to_pylist()
    for row in columns:
        if row["table_name"] not in _TABLES_OF_PROCESSES:
            names = tables.setdefault(row["table_name"], [])
            is_volatile = _VOLATILE.search(row["column_name"]) or "timestamp" in row["data_type"]
            names.append(f'"{row["column_name"]}"' + (" IS NULL" if is_volatile else ""))
    found: dict[str, Counter[str]] = {}
    place = str(buffer.config.segments)
    for table, names in tables.items():
        rows = buffer.sql(f"SELECT ROW({', '.join(names)})::text AS row FROM rft.{table} ORDER BY 1").to_pylist()
        found[table] = Counter(_NUMBERED.sub(r"\1", row["row"].replace(place, "")) for row in rows)
    return found


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries end soon."""
    monkeypatch.setattr(retry, "RIDE_OUT_S", 0.1)
    monkeypatch.setattr(retry, "PAUSE_S", 0.01)


def led(uri: str, folder: Path, losing: Losing | None) -> dict[str, Counter[str]]:
    """What an empty buffer holds after a life."""
    settings = {"segments": str(folder), "min_free_bytes": 0}
    with LossyLine(uri) as line, rftdata.open(BufferConfig(uri=uri, **settings)) as direct:
        with rftdata.open(BufferConfig(uri=line.uri, **settings), patience_s=0.3) as through:
            folder.mkdir(exist_ok=True)
            lead(Life(direct, through, folder), line, losing)
        assert list(verify(direct)) == [] and wrong_states(direct.database) == []
        return contents(direct)


@pytest.mark.parametrize("for_ever", [False, True])
def test_a_life_is_the_same_whatever_answers_are_lost(
    databases: Callable[[str], AbstractContextManager[str]], tmp_path: Path, patient: None, for_ever: bool
) -> None:
    with databases("kept") as uri:
        expected = led(uri, tmp_path / "kept", None)
    with databases("lost") as uri:
        found = led(uri, tmp_path / "lost", Losing(for_ever=for_ever))
    missing = {table: rows - found[table] for table, rows in expected.items() if rows - found[table]}
    added = {table: rows - expected[table] for table, rows in found.items() if rows - expected[table]}
    assert (missing, added) == ({}, {})
