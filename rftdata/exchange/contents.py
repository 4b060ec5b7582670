"""The contents of a file that can be imported: every row is read and checked before anything is stored."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rftdata.errors import QueryError
from rftdata.exchange import fingerprint
from rftdata.exchange.formats import check_exists
from rftdata.exchange.groups import Origin, bad_row, checked_group, grouped, origin_of


@dataclass
class Contents:
    """The contents of a checked file: groups with their experiences, by origin, and tasks.

    Attributes:
        digest, stamps: of the file as it was checked, see `rftdata.exchange.fingerprint`.
        has_labels: whether an experience has a label, an annotation or a comment.
        annotations: those of the experiences, as JSON lists, for a check by the database.
    """

    path: Path
    taskset_prefix: str
    digest: str
    stamps: fingerprint.Stamps
    groups: dict[Origin, dict[int, list[int]]] = field(default_factory=dict)
    tasks: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    has_labels: bool = False
    annotations: list[str] = field(default_factory=list)

    def check_unchanged(self) -> None:
        """Refuse a file that was written to since it was checked.

        Raises:
            QueryError: it was, or it is gone.
        """
        try:
            unchanged = fingerprint.stamps(self.path) == self.stamps
        except OSError:
            unchanged = False
        if not unchanged:
            raise QueryError(
                "the file was changed while it was imported",
                value=str(self.path),
                todo="remove what was imported of it or import it into another run (--run), and leave the file alone meanwhile",
            )


def check(path: Path, *, taskset_prefix: str = "") -> Contents:
    """Read a whole file and refuse what cannot be stored; needs no buffer.

    Raises:
        QueryError: the file cannot be read, or holds rows that cannot be stored.
    """
    check_exists(path)
    try:
        stamps = fingerprint.stamps(path)
        contents = Contents(path, taskset_prefix, fingerprint.digest(path), stamps)
    except OSError as error:
        raise QueryError(
            f"{path} cannot be read: {error.strerror or error}", todo="correct the path or the file"
        ) from error
    for rows in grouped(path):
        place, first = rows[0]
        group = checked_group(rows, taskset_prefix)
        contents.groups.setdefault(origin_of(first), {})[first["group_id"]] = [
            row["experience_id"] for _, row in rows if row["experience_id"] is not None
        ]
        contents.annotations += [row["annotations"] for _, row in rows if row["annotations"] not in (None, "[]")]
        contents.has_labels = (
            contents.has_labels
            or bool(contents.annotations)
            or any(row["labels"] or row["edit"] or row["comments"] not in (None, "[]") for _, row in rows)
        )
        key = (str(group.taskset), str(group.task_key))
        task = (first["task_payload"], first["task_features"])
        if contents.tasks.setdefault(key, task) != task:
            raise bad_row(
                place,
                f"the task {key[1]!r} of {key[0]!r} has other content in an earlier row",
                "import the files one by one",
            )
    if not contents.groups:
        raise QueryError("the file holds no rows", value=str(path))
    return contents
