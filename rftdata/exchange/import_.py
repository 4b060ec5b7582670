"""Import of an exported file into a run.

The file is read twice, first to check everything and then to write it, so that a bad row stores nothing. `Writer` writes the groups, each
with its origin in the same transaction. Groups that the run already has are skipped, so a repeated or resumed import adds only what
is missing. Groups are imported whole: a run takes no further rollouts of a group it has.
"""

from __future__ import annotations

import collections
import contextlib
import json
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from psycopg.types.json import Jsonb

from rftdata.buffer import Buffer
from rftdata.errors import QueryError, RftError
from rftdata.exchange.columns import REQUIRED, REQUIRED_OF_EXPERIENCE, Row, unpacked
from rftdata.exchange.formats import read
from rftdata.experience import (
    SOURCES,
    Baseline,
    Group,
    GroupOrigin,
    LabelRecord,
    Rollout,
    Sequence,
    SequenceOrigin,
    check_reward,
    validate,
)
from rftdata.postgres.database import Row as DatabaseRow
from rftdata.postgres.database import execute
from rftdata.postgres.values import storable
from rftdata.run import Run
from rftdata.segments.codec import encode
from rftdata.writing.writer import NO_PIPELINE

_MAX_ROWS, _MAX_BYTES = 4096, 256 * 2**20  # being stored for one run: two full transactions of the writer
_MAX_WRITERS = 8
_LABEL_BATCHES_AT_ONCE = 256
_TASKS_AT_ONCE = 1000
_GROUPS_AT_ONCE = 1000

Origin = tuple[str, int, str]  # buffer id, run id and run name
Placed = tuple[str, Row]


@dataclass
class Imported:
    """The result of an import.

    Attributes:
        runs: names of the runs it wrote into.
        num_groups, num_experiences: written by this import.
        num_present: groups that the runs already had.
    """

    runs: list[str] = field(default_factory=list)
    num_groups: int = 0
    num_experiences: int = 0
    num_present: int = 0


def load(buffer: Buffer, file: Path | Contents, *, run: str | None = None, taskset_prefix: str = "") -> Imported:
    """Import a file written by `export`, with labels, arrays and origins.

    Args:
        file: a path, or the result of `check`.
        run: the run to import into, created if it does not exist. None for a separate run for every run in the file, the same one at
            every import.
        taskset_prefix: prefix for all taskset names, for a buffer that has other tasks under the same names. For a checked file, pass
            it to `check`.

    Raises:
        QueryError, RftError: the file cannot be read, has rows that cannot be stored, or names tasks whose content differs here;
            nothing was imported.
    """
    contents = file if isinstance(file, Contents) else check(file, taskset_prefix=taskset_prefix)
    known = {origin: _known_target(buffer, origin, run) for origin in contents.groups}
    for origin, target in known.items():
        if target is not None:
            _check_present(buffer, target.run_id, origin, contents)
    _store_tasks(buffer, contents.tasks)
    done = Imported()
    targets: dict[Origin, int] = {}
    for origin in sorted(contents.groups):
        target = known[origin] or _known_target(buffer, origin, run) or _make_target(buffer, origin, run)
        done.runs = sorted({*done.runs, target.name})
        targets[origin] = target.run_id
    _write(buffer, contents, targets, done)
    return done


@dataclass
class Contents:
    """The contents of a checked file: groups with their experiences, by origin, and tasks."""

    path: Path
    taskset_prefix: str
    groups: dict[Origin, dict[int, list[int]]] = field(default_factory=dict)
    tasks: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)


def check(path: Path, *, taskset_prefix: str = "") -> Contents:
    """Read a whole file and refuse what cannot be stored; needs no buffer.

    Raises:
        QueryError: the file cannot be read, or holds rows that cannot be stored.
    """
    found = Contents(path, taskset_prefix)
    for rows in _groups(path):
        place, first = rows[0]
        group = _group(rows, taskset_prefix, {})
        found.groups.setdefault(_origin(first), {})[first["group_id"]] = [
            row["experience_id"] for _, row in rows if row["experience_id"] is not None
        ]
        key = (str(group.taskset), str(group.task_key))
        task = (first["task_payload"], first["task_features"])
        if found.tasks.setdefault(key, task) != task:
            raise _bad(
                place,
                f"the task {key[1]!r} of {key[0]!r} has other content in an earlier row",
                "import the files one by one",
            )
    if not found.groups:
        raise QueryError("the file holds no rows", value=str(path))
    return found


def _check_present(buffer: Buffer, run_id: int, origin: Origin, contents: Contents) -> None:
    for group_id, there in _present(buffer, run_id, origin, contents).items():
        new = set(contents.groups[origin][group_id]) - there
        if new:
            raise QueryError(
                f"the run already has group {group_id} of buffer {origin[0]}, without experience {min(new)}",
                todo="a group is imported once: import this file into another run (--run); nothing was imported",
            )


def _present(buffer: Buffer, run_id: int, origin: Origin, contents: Contents) -> dict[int, set[int]]:
    """Return the groups of the file that a run already has, with their experiences, by their ids at the origin.

    Only the groups of the file are looked up, so a small file is cheap to import into a large run.
    """
    group_ids = list(contents.groups[origin])
    rows: list[DatabaseRow] = []
    for start in range(0, len(group_ids), _GROUPS_AT_ONCE):
        rows += buffer.database.fetch_by_index(
            "imported_groups", run_id=run_id, buffer_id=origin[0], group_ids=group_ids[start : start + _GROUPS_AT_ONCE]
        )
    return {row["origin_group_id"]: set(row["experience_ids"] or ()) for row in rows}


def _store_tasks(buffer: Buffer, tasks: dict[tuple[str, str], tuple[str, str]]) -> None:
    items = list(tasks.items())
    pieces = [
        {
            "tasksets": [storable(taskset) for (taskset, _), _ in piece], "task_keys": [storable(key) for (_, key), _ in piece],
            "payloads": [Jsonb(storable(json.loads(payload))) for _, (payload, _) in piece],
            "features": [Jsonb(storable(json.loads(features))) for _, (_, features) in piece],
        }
        for piece in (items[start : start + _TASKS_AT_ONCE] for start in range(0, len(items), _TASKS_AT_ONCE))
    ]  # fmt: skip
    for piece in pieces:
        for row in buffer.database.fetch_by_index("tasks_that_differ", **piece):
            raise QueryError(
                f"the task {row['task_key']!r} of {row['taskset']!r} has other content in this buffer",
                todo="import under other names with --taskset-prefix; nothing was imported",
            )
    for piece in pieces:
        buffer.database.run("insert_tasks", **piece)


def _known_target(buffer: Buffer, origin: Origin, name: str | None) -> Run | None:
    """Return the run to write into, if it exists."""
    found = (
        buffer.database.fetch("import_target", buffer_id=origin[0], origin_run_id=origin[1])
        if name is None
        else buffer.database.fetch("find_run", run=name, by_name=True)
    )
    return Run.of_row(buffer.database, buffer.runs_folder, found[0]) if found else None


def _make_target(buffer: Buffer, origin: Origin, name: str | None) -> Run:
    buffer_id, run_id, run = origin
    # The folder of the arrays is stored, so that commands find it if the buffer is on a server.
    segments = buffer.config.segments and str(Path(buffer.config.segments).resolve())
    # The key `import` marks a run that cannot be continued. A run named by the user is no run's counterpart, so further imports do not use it.
    origin_run = {"buffer_id": buffer_id, "run_id": run_id, "run": run} if name is None else {}
    config = {"run": {"name": name or run}, "buffer": {"segments": segments}, "import": origin_run}
    return buffer.create_run(
        name=name or run, config=config, seed=0, steps=0, pipeline_version=NO_PIPELINE, mode="train"
    )


def _write(buffer: Buffer, contents: Contents, targets: dict[Origin, int], done: Imported) -> None:
    """Write the groups that the runs do not have, in one pass over the file, whatever number of runs it has."""
    batches = _Batches(buffer)
    with buffer.database.dedicated() as lock, contextlib.ExitStack() as opened:
        for run_id in sorted(set(targets.values())):  # in one order, so that two imports do not wait for each other
            execute(lock, "import_lock", run_id=run_id)
        present = {origin: _present(buffer, run_id, origin, contents) for origin, run_id in targets.items()}
        writers: dict[int, _Writing] = {}
        for rows in _groups(contents.path):
            first = rows[0][1]
            origin = _origin(first)
            if first["group_id"] in present[origin]:
                done.num_present += 1
                continue
            run_id = targets[origin]
            if run_id not in writers:
                if len(writers) == _MAX_WRITERS:
                    oldest = writers.pop(next(iter(writers)))
                    oldest.settle()
                    oldest.close()
                writers[run_id] = opened.enter_context(contextlib.closing(_Writing(buffer, run_id)))
            writers[run_id].submit(_group(rows, contents.taskset_prefix, batches.of(rows)))
            done.num_groups += 1
            done.num_experiences += sum(row["experience_id"] is not None for _, row in rows)
        for writing in writers.values():
            writing.settle()


class _Writing:
    """A writer of one run with the groups that it is still storing, few enough for memory and enough for full transactions."""

    def __init__(self, buffer: Buffer, run_id: int) -> None:
        self._writer = buffer.writer(run_id)
        self._pending: collections.deque[tuple[Future[list[int]], int, int]] = collections.deque()
        self._rows = self._bytes = 0

    def submit(self, group: Group) -> None:
        """Store a group, and wait while too many are being stored."""
        sequences = [s for rollout in group.rollouts for s in rollout.sequences]
        num_bytes = sum(
            9 * len(s.token_ids) + len(s.response) + sum(a.nbytes for a in s.arrays.values()) for s in sequences
        )
        self._pending.append((self._writer.submit(group), max(1, len(sequences)), num_bytes))
        self._rows, self._bytes = self._rows + self._pending[-1][1], self._bytes + num_bytes
        self.settle(_MAX_ROWS, _MAX_BYTES)

    def settle(self, max_rows: int = 0, max_bytes: int = 0) -> None:
        """Wait until no more experiences and bytes than these are being stored."""
        while self._pending and (self._rows > max_rows or self._bytes > max_bytes):
            future, rows, num_bytes = self._pending.popleft()
            future.result()
            self._rows, self._bytes = self._rows - rows, self._bytes - num_bytes

    def close(self) -> None:
        self._writer.close()


class _Batches:
    """Ids of this buffer for the label batches of a file, taken from the sequence many at a time."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._ids: dict[int, int] = {}
        self._free: list[int] = []

    def of(self, rows: list[Placed]) -> dict[int, int]:
        """Return the ids of all label batches so far, those of the rows included."""
        for _, row in rows:
            for label in row["labels"] or ():
                if label["label_batch_id"] not in self._ids:
                    if not self._free:
                        found = self._buffer.database.fetch("label_next_batches", num=_LABEL_BATCHES_AT_ONCE)
                        self._free = [int(new["label_batch_id"]) for new in reversed(found)]
                    self._ids[label["label_batch_id"]] = self._free.pop()
        return self._ids


def _groups(path: Path) -> Iterator[list[Placed]]:
    """Yield the rows of one group after the other.

    Raises:
        QueryError: a required value is missing, or the rows of a group are not adjacent.
    """
    seen: set[tuple[str, int]] = set()
    rows: list[Placed] = []
    for place, row in read(path):
        required = REQUIRED if row["experience_id"] is None else (*REQUIRED, *REQUIRED_OF_EXPERIENCE)
        missing = [name for name in required if row[name] is None]
        if missing:
            raise _bad(place, f"the row has no {', '.join(missing[:5])}")
        key = (row["buffer_id"], row["group_id"])
        if rows and key != (rows[0][1]["buffer_id"], rows[0][1]["group_id"]):
            yield rows
            rows = []
        if not rows:
            if key in seen:
                raise _bad(place, f"rows of group {key[1]} are not adjacent", "sort the file by buffer_id and group_id")
            seen.add(key)
        rows.append((place, row))
    if rows:
        yield rows


def _origin(row: Row) -> Origin:
    return str(row["buffer_id"]), int(row["run_id"]), str(row["run"])


def _group(rows: list[Placed], prefix: str, batches: dict[int, int]) -> Group:
    """Build a group from its rows.

    Args:
        batches: ids in this buffer of label batches; missing ones keep their own.

    Raises:
        QueryError: a value is not valid for its column.
    """
    place, first = rows[0]
    try:
        uuid.UUID(first["buffer_id"])
        for name in ("task_payload", "task_features"):
            if not isinstance(json.loads(first[name]), dict):
                raise ValueError(f"{name} is not a JSON object")
        rollouts: dict[int, Rollout] = {}
        for row_place, row in rows:
            place = row_place
            index = int(row["rollout_index"])
            if index not in rollouts:
                # Renumbered: a partly exported group becomes a smaller group.
                rollouts[index] = Rollout(
                    len(rollouts),
                    row["outcome"],
                    row["rollout_reward"],
                    seconds=float(row["seconds"]),
                    error=row["error"],
                )
            if row["experience_id"] is not None:
                rollouts[index].sequences.append(_sequence(row, batches))
        place = rows[0][0]
        origin = GroupOrigin(
            buffer_id=first["buffer_id"],
            origin_run_id=first["run_id"],
            origin_run=first["run"],
            origin_group_id=first["group_id"],
            explore_step=first["explore_step"],
            group_size=first["group_size"],
        )
        group = Group(
            list(rollouts.values()), source="import", taskset=prefix + first["taskset"], task_key=first["task_key"],
            payload=json.loads(first["task_payload"]), origin=origin, baseline=_baseline(first["baseline"]),
        )  # fmt: skip
        validate((group,))
        encode([s for rollout in group.rollouts for s in rollout.sequences])
    except (RftError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _bad(place, " ".join(str(error).split())) from error
    return group


def _baseline(text: str | None) -> Baseline | None:
    return None if text is None else Baseline(**json.loads(text))


def _sequence(row: Row, batches: dict[int, int]) -> Sequence:
    prompt = int(row["num_prompt_tokens"])
    labels = tuple(
        LabelRecord(**{**label, "label_batch_id": batches.get(label["label_batch_id"], label["label_batch_id"])})
        for label in row["labels"]
    )
    if row["source"] not in SOURCES:
        raise RftError("an experience has an unknown source", value=row["source"], allowed=", ".join(SOURCES))
    origin = SequenceOrigin(
        origin_experience_id=row["experience_id"],
        origin_parent_id=row["parent_id"],
        policy_version_min=row["policy_version_min"],
        policy_version_max=row["policy_version_max"],
        policy_step=row["policy_step"],
        sampled_at=row["created_at"],
        earlier=json.loads(row["earlier"]),
        source=row["source"],
        reward=row["reward"],
        reward_final=bool(row["reward_final"]),
        labels=labels,
    )
    for name in ("loss_mask", "behavior_logprobs"):
        if len(row[name]) != len(row["token_ids"]):
            raise RftError(
                f"{name} must have one value per token", value=len(row[name]), allowed=str(len(row["token_ids"]))
            )
    check_reward(row["reward"])
    return Sequence(
        row["prompt"], row["response"], row["token_ids"], prompt, row["finish_reason"], reward=row["reward_sampled"],
        behavior_logprobs=row["behavior_logprobs"][prompt:], loss_mask=row["loss_mask"][prompt:],
        policy_spans=[(span["start"], span["policy_version_id"]) for span in row["policy_spans"]], reward_parts=json.loads(row["reward_parts"]),
        metrics=json.loads(row["metrics"]), messages=None if row["messages"] is None else json.loads(row["messages"]),
        arrays={array["name"]: unpacked(array) for array in row["arrays"]}, origin=origin,
    )  # fmt: skip


def _bad(place: str, what: str, todo: str = "correct the file; nothing was imported") -> QueryError:
    return QueryError(f"{place}: {what.rstrip('.')}", todo=todo)
