"""What the host is asked to run, and what it reports. Only plain values: they travel as JSON."""

from __future__ import annotations

import base64
import json
import os
import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

WORK_FOLDER = "/work"
"""Working folder of a program that has a file system of its own."""

_HEADER = struct.Struct(">I")
_LONGEST = 1 << 30


@dataclass(frozen=True)
class Limits:
    """Limits of one program and all that it starts.

    Attributes:
        wall_s: after which all of it is killed; 0: no limit.
        cpu_s: processor time of each process.
        memory_bytes: of all processes together; without control groups also the address space of each process.
        processes: that exist at a time, threads included.
        file_bytes: size of a file.
        disk_bytes: size of all files together.
        output_bytes: of standard output and standard error together.
    """

    wall_s: float
    cpu_s: int
    memory_bytes: int
    processes: int
    file_bytes: int
    disk_bytes: int
    output_bytes: int


@dataclass(frozen=True)
class Request:
    """A program to run.

    Attributes:
        level: how it is confined: "cgroup", "namespaces", "landlock" or "none".
        arguments: the program, an absolute path or a name in its PATH, and its arguments. `{work}` stands for the working folder.
        environment: its variables.
        files: contents of the files in its working folder, by relative path.
        readable: paths of the host that it may read, besides the system's programs and libraries.
    """

    level: str
    arguments: list[str]
    environment: dict[str, str]
    files: dict[str, bytes]
    limits: Limits
    readable: list[str] = field(default_factory=list)

    def encoded(self) -> bytes:
        """Return it as a message."""
        values = asdict(self)
        values["files"] = {path: base64.b64encode(data).decode() for path, data in self.files.items()}
        return framed(values)

    @classmethod
    def of(cls, values: dict[str, Any]) -> Request:
        """Return the request of a message's values."""
        files = {path: base64.b64decode(text) for path, text in values["files"].items()}
        return cls(**{**values, "files": files, "limits": Limits(**values["limits"])})


@dataclass(frozen=True)
class Report:
    """How a program ended.

    Attributes:
        code: its exit code; minus the number of the signal that ended it; None if it did not start.
        killed: the limit for which it was killed: "wall", "cpu", "memory", "output" or "disk"; "asked" if the caller asked; None otherwise.
        refused: why the sandbox could not be made; None if it was.
        stdout, stderr: what it printed, up to the limit.
        seconds: from the start of the sandbox to its end.
        peak_bytes: most memory in use; None if it is not counted.
    """

    code: int | None = None
    killed: str | None = None
    refused: str | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    seconds: float = 0.0
    peak_bytes: int | None = None

    def encoded(self) -> bytes:
        """Return it as a message."""
        texts = {name: base64.b64encode(getattr(self, name)).decode() for name in ("stdout", "stderr")}
        return framed({**asdict(self), **texts})

    @classmethod
    def of(cls, values: dict[str, Any]) -> Report:
        """Return the report of a message's values."""
        return cls(**{**values, **{name: base64.b64decode(values[name]) for name in ("stdout", "stderr")}})


def framed(values: object) -> bytes:
    """Return values as JSON after the length of it."""
    data = json.dumps(values).encode()
    return _HEADER.pack(len(data)) + data


def read_frame(read: Callable[[int], bytes]) -> Any:
    """Return the values of the next message; None at the end.

    Args:
        read: returns up to a number of bytes.

    Raises:
        ValueError: the message is not valid.
    """
    head = _read_exactly(read, _HEADER.size)
    if head is None:
        return None
    (length,) = _HEADER.unpack(head)
    if length > _LONGEST:
        raise ValueError(f"a message of {length} bytes")
    data = _read_exactly(read, length)
    return None if data is None else json.loads(data)


def write_all(file: int, data: bytes) -> None:
    """Write all of it to an open file."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _read_exactly(read: Callable[[int], bytes], length: int) -> bytes | None:
    data = bytearray()
    while len(data) < length:
        part = read(min(length - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)
