"""Errors that a user can cause, each one paragraph: what is wrong, the value, what is allowed, what to do.

The command line prints `str(error)` and exits with `exit_code`; a stack trace appears only with `--debug`. Raise the most specific
class. Add a class only if callers need to distinguish it.
"""

from __future__ import annotations

import copy
import errno
import os
import pickle
from collections.abc import Sequence
from typing import Self


class RftError(Exception):
    """Base of all errors that a user can correct, as opposed to defects of this software.

    Args:
        what: what is wrong, as a sentence without a full stop; with ids and places.
        value: the offending value, printed as is (omit it when `what` already contains it).
        allowed: which values are accepted.
        todo: what the user should do.
    """

    exit_code = 1

    def __init__(self, what: str, *, value: object = None, allowed: str | None = None, todo: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.value = value
        self.allowed = allowed
        self.todo = todo

    def __str__(self) -> str:
        parts = [self.what if self.value is None else f"{self.what} (got {self.value!r})"]
        if self.allowed:
            parts.append(f"allowed: {self.allowed}")
        if self.todo:
            parts.append(self.todo)
        text = "; ".join(part.rstrip(".") for part in parts)
        return text if text.endswith("?") else text + "."

    def can_be_sent(self) -> bool:
        """Whether another process can receive it: its `value` may be of any type."""
        try:
            pickle.loads(pickle.dumps(self))
        except Exception:  # noqa: BLE001 - a value in it may raise anything
            return False
        return True

    def about(self, subject: str) -> Self:
        """Return the same error with its subject at the beginning."""
        error = copy.copy(self)
        error.what = f"{subject}: {self.what}"
        return error

    def __reduce__(self) -> tuple[object, ...]:
        # The default would call the class, which may require further arguments. Ray and multiprocessing transfer errors this way.
        return _restored, (type(self), self.args), self.__dict__


def described(error: BaseException) -> str:
    """Return the class and message of an error, without a message that cannot be read."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - it is of any class, and another error must not take its place
        return type(error).__name__


def _restored(cls: type[RftError], args: tuple[object, ...]) -> RftError:
    return cls.__new__(cls, *args)


class ConfigError(RftError):
    """An invalid configuration file or override."""

    exit_code = 2


class SeveralErrors(ConfigError):
    """Several mistakes, found in one pass over a configuration; its text has a line for each.

    Args:
        errors: two or more.
    """

    def __init__(self, errors: Sequence[RftError]) -> None:
        super().__init__(f"{len(errors)} things are wrong")
        self.errors = tuple(errors)
        self.exit_code = max(error.exit_code for error in errors)

    def about(self, subject: str) -> Self:
        """Return the same errors, each with its subject at the beginning."""
        return type(self)([error.about(subject) for error in self.errors])

    def __str__(self) -> str:
        return "\n".join([f"{self.what}:", *(f"- {error}" for error in self.errors)])


def refuse(errors: Sequence[RftError]) -> None:
    """Raise what was collected.

    Raises:
        RftError: the only error.
        SeveralErrors: all of them.
    """
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise SeveralErrors(errors) from errors[0]


class PluginError(ConfigError):
    """A named plug-in that does not exist or does not load."""


class ModelError(RftError):
    """A model that cannot be found or opened."""

    exit_code = 2


class EngineStoppedError(RftError):
    """An engine that no longer responds. Not an outcome of a rollout, since every later one would fail in the same way."""


class TaskSourceError(RftError):
    """A task source that cannot be read, or whose rows cannot become tasks."""

    exit_code = 2


class BufferUnavailableError(RftError):
    """A database that cannot be reached or started, or that is used from the wrong place."""


class SchemaVersionError(RftError):
    """The database's schema is older or newer than this program."""


class QueryError(RftError):
    """A request that cannot be fulfilled: SQL that the engine refused, a file that cannot be written."""

    exit_code = 2


class SelectionChangedError(RftError):
    """Training data of a run that has changed since the run was created."""


class ConflictError(RftError):
    """A transaction that the database ended because of conflicting ones. Nothing of it was stored; run it again."""


class DiskFullError(RftError):
    """Not enough space for a segment or for the database; nothing was written partially."""


_FULL = (errno.ENOSPC, errno.EDQUOT)


def is_disk_full(error: BaseException) -> bool:
    """Whether a file system, or a quota on it, has no room; libraries raise classes of their own with the system's text in the message."""
    return getattr(error, "errno", None) in _FULL or any(os.strerror(number) in str(error) for number in _FULL)


class SegmentFileClosedError(ConflictError):
    """A segment file that was closed while a writer appended to it; uncommitted data must go to another file."""


class SegmentCorruptError(RftError):
    """Bytes of a segment that do not match their checksum or their address.

    Attributes:
        segment_id: the segment.
        experience_ids: the rows that cannot be served because of it; empty if they were not looked up.
    """

    def __init__(
        self,
        what: str,
        *,
        segment_id: int,
        experience_ids: Sequence[int] = (),
        value: object = None,
        allowed: str | None = None,
        todo: str | None = None,
    ) -> None:
        super().__init__(what, value=value, allowed=allowed, todo=todo)
        self.segment_id = segment_id
        self.experience_ids = tuple(experience_ids)

    def naming(self, experience_ids: Sequence[int]) -> SegmentCorruptError:
        """Return the same error with the affected experiences."""
        rows = f"experiences {ranges(experience_ids)}" if experience_ids else "no experience"
        error = copy.copy(self)
        error.what, error.experience_ids = f"{self.what} (it holds {rows})", tuple(experience_ids)
        return error


def ranges(numbers: Sequence[int]) -> str:
    """Format whole numbers as in `1-3, 7, 9-10`."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


class PurgedError(RftError):
    """A request for what was purged, or a write of what was made from it. What a purge removes is deleted for good."""


class ArchivedError(RftError):
    """A request for what lies in the archive of a run, or for a change of an archived run; the run must be restored first."""


class FencedError(RftError):
    """A write that was refused because the worker's claim or attempt has passed to another worker."""


class OperatorError(RftError):
    """A pipeline stage that raised; contains the stage's name."""


class RolloutsFailedError(RftError):
    """Whole explorer steps without a successful rollout.

    Attributes:
        stack: the user's frames of the first failure, as a traceback.
    """

    def __init__(
        self, what: str, *, stack: str = "", value: object = None, allowed: str | None = None, todo: str | None = None
    ) -> None:
        super().__init__(what, value=value, allowed=allowed, todo=todo)
        self.stack = stack


class TimeLimitError(RftError):
    """A function that did not return within its time limit.

    Attributes:
        stack: its stack when the limit passed, formatted like a traceback.
        blocked: whether it could not be stopped either, so that its process must end.
        subject: the item that it was processing, if known, such as an experience's id.
        num_done: number of items finished before.
    """

    def __init__(
        self,
        what: str,
        *,
        value: object = None,
        allowed: str | None = None,
        todo: str | None = None,
        stack: str = "",
        blocked: bool = False,
        subject: object = None,
        num_done: int = 0,
    ) -> None:
        super().__init__(what, value=value, allowed=allowed, todo=todo)
        self.stack = stack
        self.blocked = blocked
        self.subject = subject
        self.num_done = num_done


def time_limit_behind(error: BaseException | None) -> TimeLimitError | None:
    """Return the time limit that an error was raised for, directly or as its cause."""
    while error is not None:
        if isinstance(error, TimeLimitError):
            return error
        error = error.__cause__
    return None


class RoleFailedError(RftError):
    """A role whose process ended before its work did."""


class EnvironmentMismatchError(RftError):
    """Installed packages that break each other."""
