"""Import of an exported file into a run.

The file is read twice, first to check everything (`rftdata.exchange.contents`) and then to write it, so that a bad row stores nothing.
`Writer` writes the groups, each with its origin in the same transaction. Groups that the run already has are skipped, so a repeated or
resumed import adds only what is missing. Groups are imported whole: a run takes no further rollouts of a group it has.
`rft.import_file` has the digest of every file from before its first group is stored, so that an interrupted import continues with
the same content only.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from psycopg.types.json import Jsonb

from rftdata.buffer import Buffer
from rftdata.errors import QueryError
from rftdata.exchange.contents import Contents, check
from rftdata.exchange.groups import Origin, Placed, group_of, grouped, origin_of
from rftdata.experience import Group
from rftdata.limits import check_run_name, check_text
from rftdata.postgres.database import Row as DatabaseRow
from rftdata.postgres.locks import Lock, holding
from rftdata.postgres.values import storable
from rftdata.run import NO_PIPELINE, Run

# Groups are handed to the writer in bursts that fill one transaction, and it waits a moment for a burst to be complete.
_TRANSACTION_ROWS, _TRANSACTION_BYTES, _LINGER_MS = 2048, 128 * 2**20, 5.0
_MAX_WRITERS = 8
_LABEL_BATCHES_AT_ONCE = 256
_TASKS_AT_ONCE = 1000
_GROUPS_AT_ONCE = 1000
# An index entry of rft.import_file holds about 2,700 bytes.
_MAX_PATH_BYTES = 2000


@dataclass
class ImportResult:
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


def load(buffer: Buffer, file: Path | Contents, *, run: str | None = None, taskset_prefix: str = "") -> ImportResult:
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
    contents.check_unchanged()
    _check_storable(buffer, contents, run)
    existing = {origin: _known_target(buffer, origin, run) for origin in contents.groups}
    for origin, target in existing.items():
        if target is not None:
            target.refuse_archived("nothing can be imported into it")
            _check_interrupted(buffer, target, contents)
            _check_present(buffer, target.run_id, origin, contents)
    _store_tasks(buffer, contents.tasks)
    done = ImportResult()
    targets: dict[Origin, int] = {}
    # Looked for again under the lock: another import of the same file may have created the runs since.
    with buffer.joining():
        for origin in sorted(contents.groups):
            target = existing[origin] or _known_target(buffer, origin, run) or _make_target(buffer, origin, run)
            done.runs = sorted({*done.runs, target.name})
            targets[origin] = target.run_id
    _write(buffer, contents, targets, done)
    if contents.has_labels:
        buffer.database.fetch("link_imported_edits")
    return done


def _check_storable(buffer: Buffer, contents: Contents, run: str | None) -> None:
    """Refuse names under which the file's runs cannot be stored, and missing rights; its rows show neither.

    Raises:
        QueryError: what is wrong.
    """
    check_text("the path of the file", _path(contents), _MAX_PATH_BYTES)
    for name in {name for _, _, name in contents.groups} if run is None else {run}:
        try:
            check_run_name(name)
        except QueryError as error:
            raise QueryError(
                error.what,
                value=error.value,
                allowed=error.allowed,
                todo="import into a run of another name (--run); nothing was imported",
            ) from error
    if contents.has_labels and not buffer.database.fetch("may_import_labels", right="INSERT")[0]["may"]:
        raise QueryError(
            "the file has labels, and this account lacks the right to write rft.label",
            value=str(contents.path),
            todo="import it with the account that owns the schema; nothing was imported",
        )
    for text in contents.annotations:
        buffer.database.fetch("check_imported_annotations", annotations=text)


def _check_interrupted(buffer: Buffer, run: Run, contents: Contents) -> None:
    for row in buffer.database.fetch("interrupted_import", run_id=run.run_id, path=_path(contents)):
        if row["digest"] != contents.digest:
            raise QueryError(
                f"the file was changed since {row['started_at']:%Y-%m-%d %H:%M:%S %Z}, when its import into the run {run.name!r} was interrupted",
                value=str(contents.path),
                allowed=f"the content whose xxh3-128 is {row['digest']}",
                todo="put the old file back, or import this one into another run (--run); nothing was imported",
            )


def _path(contents: Contents) -> str:
    return str(storable(str(contents.path.resolve())))


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
            "tasksets": [storable(taskset) for (taskset, _), _ in piece],
            "task_keys": [storable(key) for (_, key), _ in piece],
            "payloads": [Jsonb(storable(json.loads(payload))) for _, (payload, _) in piece],
            "features": [Jsonb(storable(json.loads(features))) for _, (_, features) in piece],
        }
        for piece in (items[start : start + _TASKS_AT_ONCE] for start in range(0, len(items), _TASKS_AT_ONCE))
    ]
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
    rows = (
        buffer.database.fetch("import_target", buffer_id=origin[0], origin_run_id=origin[1])
        if name is None
        else buffer.database.fetch("find_run", run=name, by_name=True)
    )
    return Run.of_row(buffer.database, buffer.runs_folder, rows[0]) if rows else None


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


def _write(buffer: Buffer, contents: Contents, targets: dict[Origin, int], done: ImportResult) -> None:
    """Write the groups that the runs do not have, in one pass over the file, whatever number of runs it has."""
    batches = _LabelBatchIds(buffer)
    run_ids = sorted(set(targets.values()))
    locks = [
        Lock("import", run_id) for run_id in run_ids
    ]  # in one order, so that two imports do not wait for each other
    with holding(buffer.database, *locks, wait_s=math.inf), contextlib.ExitStack() as opened:
        file = {"run_ids": run_ids, "path": _path(contents)}
        contents.check_unchanged()
        buffer.database.run("insert_import", **file, digest=contents.digest)
        present = {origin: _present(buffer, run_id, origin, contents) for origin, run_id in targets.items()}
        writers: dict[int, _RunWriter] = {}
        for rows in grouped(contents.path):
            first = rows[0][1]
            origin = origin_of(first)
            if first["group_id"] in present[origin]:
                done.num_present += 1
                continue
            run_id = targets[origin]
            if run_id not in writers:
                if len(writers) == _MAX_WRITERS:
                    oldest = writers.pop(next(iter(writers)))
                    oldest.settle()
                    oldest.close()
                writers[run_id] = opened.enter_context(contextlib.closing(_RunWriter(buffer, run_id)))
            writers[run_id].submit(group_of(rows, contents.taskset_prefix, batches.of(rows)))
            done.num_groups += 1
            done.num_experiences += sum(row["experience_id"] is not None for _, row in rows)
        for writing in writers.values():
            writing.settle()
        contents.check_unchanged()
        buffer.database.run("finish_import", **file)


class _RunWriter:
    """A writer of one run: collects groups for a full transaction, and waits while two of them are being stored."""

    def __init__(self, buffer: Buffer, run_id: int) -> None:
        self._writer = buffer.writer(
            run_id, max_rows=_TRANSACTION_ROWS, max_bytes=_TRANSACTION_BYTES, linger_ms=_LINGER_MS
        )
        self._collected: list[Group] = []
        self._rows = self._bytes = 0
        self._pending: collections.deque[list[Future[list[int]]]] = collections.deque()

    def submit(self, group: Group) -> None:
        """Add a group to the next burst."""
        sequences = [s for rollout in group.rollouts for s in rollout.sequences]
        self._collected.append(group)
        self._rows += max(1, len(sequences))
        self._bytes += sum(
            9 * len(s.token_ids) + len(s.response) + sum(a.nbytes for a in s.arrays.values()) for s in sequences
        )
        if self._rows >= _TRANSACTION_ROWS or self._bytes >= _TRANSACTION_BYTES:
            self._store(max_pending=1)

    def settle(self) -> None:
        """Wait until all groups are stored."""
        self._store(max_pending=0)

    def close(self) -> None:
        self._writer.close()

    def _store(self, max_pending: int) -> None:
        self._pending.append([self._writer.submit(group) for group in self._collected])
        self._collected, self._rows, self._bytes = [], 0, 0
        while len(self._pending) > max_pending:
            for future in self._pending.popleft():
                future.result()


class _LabelBatchIds:
    """Ids of this buffer for the label batches of a file, begun many at a time."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._ids: dict[int, int] = {}
        self._free: list[int] = []

    def of(self, rows: list[Placed]) -> dict[int, int]:
        """Return the ids of all label batches so far, those of the rows included."""
        for _, row in rows:
            for label in (*(row["labels"] or ()), *json.loads(row["annotations"] or "[]")):
                if label["label_batch_id"] not in self._ids:
                    if not self._free:
                        batches = self._buffer.database.fetch("begin_label_batches", num=_LABEL_BATCHES_AT_ONCE)
                        self._free = [int(new["label_batch_id"]) for new in reversed(batches)]
                    self._ids[label["label_batch_id"]] = self._free.pop()
        return self._ids
