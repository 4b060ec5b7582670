"""Processes of `rft run` that the studio starts, and the signal by which it stops any `rft run` of this machine.

- A process that is started here belongs to no terminal and no studio: it goes on when the studio ends, and writes to a log of its own.
- A record of each start is kept in the folder `.rft-studio` beside the configurations: who started what, when, as which process, and where its
  log is. A studio that is started later finds the processes by it.
- A start has a key, and a process is signalled once: a second click does nothing. (`rft run` takes a second signal as the wish to kill its roles.)
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rftcore.studio.config_files import STATE_FOLDER, ConfigFolder
from rftcore.studio.oidc.settings import CLIENT_SECRET
from rftdata.config import BufferConfig
from rftdata.errors import ConflictError, QueryError
from rftdata.files.durable import write_whole
from rftdata.processes import has_ended, is_here, own_process, started_at
from rftdata.uri import is_server, split_password

_KEY = re.compile(r"[0-9a-f]{32}")
_TAIL_BYTES = 4000
_MOST_RECORDS = 200


@dataclass(frozen=True)
class Process:
    """A process, as rows and records name it (`rftdata.processes`)."""

    host: str
    pid: int
    pid_space: str
    pid_started: int

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Process:
        return cls(row["host"], row["pid"], row["pid_space"], row["pid_started"])

    @property
    def label(self) -> str:
        """Its name in forms."""
        return f"{self.host}/{self.pid}/{self.pid_started}"

    @property
    def is_here(self) -> bool:
        """Whether it can be looked up and signalled from here."""
        return is_here(self.host, self.pid_space)

    @property
    def has_ended(self) -> bool:
        """Whether it has certainly ended."""
        return has_ended(self.host, self.pid, self.pid_space, self.pid_started)


@dataclass(frozen=True)
class RunStart:
    """A start of `rft run`.

    Attributes:
        key: of the request.
        buffer: in which the run is stored.
        file: the configuration, by its name in the folder.
        resumes: the run that it continues; None for a new one.
        author, account: who started it.
        started: when, in UTC.
        log: the file with what it prints.
        process: what was started.
        exit_code: how it ended; None while it has not, or if no studio was there to see it.
    """

    key: str
    buffer: str
    file: str
    resumes: str | None
    author: str
    account: str
    started: str
    log: str
    process: Process
    exit_code: int | None = None

    @property
    def is_at_work(self) -> bool:
        """Whether its process runs. A process that cannot be looked up, as one of an earlier boot of this machine, does not count."""
        return self.exit_code is None and self.process.is_here and not self.process.has_ended

    def last_lines(self) -> str:
        """Return the end of its log."""
        try:
            descriptor = os.open(self.log, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                begin = max(0, os.fstat(descriptor).st_size - _TAIL_BYTES)
                return os.pread(descriptor, _TAIL_BYTES, begin).decode(errors="replace").strip()
            finally:
                os.close(descriptor)
        except OSError:
            return ""


class RunProcesses:
    """Starts and stops `rft run` with the configurations of a folder; safe for threads and for several studios.

    Args:
        buffer: in which runs are stored, whatever the configuration names.
        location: of this buffer, as messages show it.
    """

    def __init__(self, folder: ConfigFolder, buffer: BufferConfig, location: str) -> None:
        self._folder, self._buffer, self._location = folder, buffer, location

    @property
    def folder(self) -> ConfigFolder:
        """The folder of the configurations."""
        return self._folder

    def was_started(self, key: str) -> bool:
        """Return whether a request with this key has started something."""
        return any(each.key == key for each in self.starts())

    def starts(self, file: str | None = None) -> list[RunStart]:
        """Return the newest starts into this buffer, newest first.

        Args:
            file: only those of one configuration.
        """
        place = self._folder.path / STATE_FOLDER
        if place.is_symlink() or not place.is_dir():
            return []
        found = [self._record(path) for path in place.glob("start-*.json")]
        starts = [each for each in found if each is not None and each.buffer == self._location]
        chosen = [each for each in starts if file is None or each.file == file]
        return sorted(chosen, key=lambda each: each.started, reverse=True)[:_MOST_RECORDS]

    def start(self, key: str, file: str, resumes: str | None, author: str, account: str, digest: str) -> RunStart:
        """Start `rft run`; return an earlier start with the same key.

        Args:
            resumes: the run that it continues; None for a new one.
            digest: of the file as the person has seen it.

        Raises:
            ConflictError: the file was changed since, or a start of it is at work.
            QueryError: the key is none.
        """
        if not _KEY.fullmatch(key):
            raise QueryError("the page is damaged", value=key, todo="load it again")
        with self._folder.locked() as place:
            record = place / f"start-{key}.json"
            if (before := self._record(record)) is not None:
                return before
            if self._folder.read(file).digest != digest:
                raise ConflictError(
                    f"{file} was changed on disk since you opened it",
                    todo="nothing was started; load the page again, and look at what would run",
                )
            live = next((each for each in self.starts(file) if each.is_at_work), None)
            if live is not None:
                raise ConflictError(
                    f"{file} is running: {live.author} started it at {live.started}",
                    todo="stop it first, or save the configuration under another name",
                )
            now = datetime.datetime.now(datetime.UTC)
            log = place / f"{Path(file).stem}-{now:%Y%m%d-%H%M%S}-{key[:8]}.log"
            child = self._launch(
                file, digest, resumes, log, f"{now.isoformat(timespec='seconds')}: {author} ({account})"
            )
            try:
                process = Process(**{**own_process(), "pid": child.pid, "pid_started": started_at(child.pid) or 0})
                started = now.isoformat(timespec="milliseconds")
                made = RunStart(key, self._location, file, resumes, author, account, started, str(log), process)
                _write(record, made)
            except BaseException:  # without a record a second request would start it again
                child.terminate()
                raise
        threading.Thread(target=self._follow, args=(child, record, made), name="studio-run", daemon=True).start()
        return made

    def stop(self, process: Process, author: str, account: str) -> None:
        """Interrupt `rft run` as Ctrl-C in its terminal does; a second request does nothing.

        Raises:
            ConflictError: it runs on another machine, has ended, belongs to another user, or is no `rft run`.
        """
        if not process.is_here:
            raise ConflictError(
                f"its rft run is the process {process.pid} on {process.host}",
                todo=f"stop it there: kill -INT {process.pid}",
            )
        with self._folder.locked() as place:
            record = place / _stop_name(process)
            if record.exists():
                return
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
            about = {"author": author, "account": account, "stopped": now, "process": asdict(process)}
            write_whole(record, json.dumps(about, ensure_ascii=False), 0o600)  # first: a signal is never sent twice
            try:
                _interrupt(process)
            except BaseException:
                record.unlink()
                raise

    def stopped_by(self, process: Process) -> str | None:
        """Return who has stopped a process here; None if nobody has."""
        try:
            text = (self._folder.path / STATE_FOLDER / _stop_name(process)).read_text(encoding="utf-8")
            return str(json.loads(text)["author"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _launch(self, file: str, digest: str, resumes: str | None, log: Path, head: str) -> subprocess.Popen[bytes]:
        uri, password = split_password(self._buffer.uri)
        uri = uri if is_server(uri) else str(Path(uri).resolve())
        options = ["--resume", *([resumes] if resumes else [])] if resumes is not None else []
        # Of the studio's buffer, too, if the file names segments and the studio does not.
        segments = None if self._buffer.segments is None else str(Path(self._buffer.segments).resolve())
        of_buffer = [f"--buffer={uri}", f"--set=buffer.segments={json.dumps(segments)}"]
        arguments = [str(self._folder.path / file), *options, "--plain", f"--digest={digest}", *of_buffer]
        descriptor = os.open(
            log, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        with open(descriptor, "wb", buffering=0) as output:
            output.write(f"{head}: rft run {' '.join(arguments)}\n".encode())
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "rftcore", "run", *arguments],
                env=child_environment() | ({} if password is None else {"PGPASSWORD": password}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the studio's terminal is for the studio
            )

    def _follow(self, child: subprocess.Popen[bytes], record: Path, made: RunStart) -> None:
        code = child.wait()
        with contextlib.suppress(OSError):
            _write(record, replace(made, exit_code=code))

    def _record(self, path: Path) -> RunStart | None:
        try:
            about = json.loads(path.read_text(encoding="utf-8"))
            return RunStart(**{**about, "process": Process(**about["process"])})
        except (OSError, ValueError, KeyError, TypeError):
            return None


def child_environment() -> dict[str, str]:
    """Return the variables for programs that the studio starts: its own without its secret at the identity provider."""
    return {name: value for name, value in os.environ.items() if name != CLIENT_SECRET}


def _write(record: Path, made: RunStart) -> None:
    write_whole(record, json.dumps(asdict(made), ensure_ascii=False), 0o600)


def _stop_name(process: Process) -> str:
    space = hashlib.sha256(f"{process.host}/{process.pid_space}".encode()).hexdigest()[:16]
    return f"stop-{process.pid}-{process.pid_started}-{space}.json"


def _interrupt(process: Process) -> None:
    """Send the signal, to an `rft run` alone: any account that writes workers can store a row that names another process.

    It cannot reach another process that was given the same number.

    Raises:
        ConflictError: there is no such process any more, it belongs to another user, or it is no `rft run`.
    """
    ended = ConflictError("it has ended already", todo="load the page again")
    try:
        descriptor = os.pidfd_open(process.pid)
    except (OSError, OverflowError) as error:  # a row may name a number that no process can have
        raise ended from error
    try:
        if process.has_ended:
            raise ended
        if not process.pid_started or not _is_rft_run(process.pid):
            raise ConflictError(
                f"the process {process.pid} cannot be recognised as an rft run",
                todo=f"stop it where it was started, or with: kill -INT {process.pid}",
            )
        # A shell that starts `rft run` in the background lets it ignore SIGINT.
        number = signal.SIGTERM if _ignores(process.pid, signal.SIGINT) else signal.SIGINT
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError as error:
        raise ended from error
    except PermissionError as error:
        raise ConflictError(
            f"the process {process.pid} belongs to another user of this machine",
            todo=f"stop it as that user: kill -INT {process.pid}",
        ) from error
    finally:
        os.close(descriptor)


def _is_rft_run(pid: int) -> bool:
    """Return whether a process has the command line of `rft run`: `rft run …` or `python -m rftcore run …`."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    programs = [place for place, word in enumerate(words[:-1]) if word.rpartition(b"/")[2] in (b"rft", b"rftcore")]
    return any(words[place + 1] == b"run" for place in programs)


def _ignores(pid: int, number: signal.Signals) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    ignored = re.search(r"^SigIgn:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return ignored is None or bool(int(ignored[1], 16) >> (number - 1) & 1)
