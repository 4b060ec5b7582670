"""A run whose roles are plain processes, which the tests kill at any moment.

The parent imports everything the roles need, computes nothing, holds no connection and starts no thread; each role is a fork of it, so a
new life begins within milliseconds. pandas belongs to it: pyarrow loads it with the first array that it makes of Python values.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import pandas as pd  # noqa: F401 - for pyarrow
import psycopg

import rftdata
from rftcore.config import RunConfig, load_config
from rftcore.explorer import role as explorer
from rftcore.pipeline import role as pipeline
from rftcore.resolved import ResolvedRun
from rftcore.run.prepare import check_run, prepare_run
from rftcore.trainer import role as trainer
from rftdata import failpoints
from rftdata.errors import BufferUnavailableError, ConflictError, FencedError
from rftdata.postgres.embedded import EmbeddedServer
from tests.crash.witness import Witness, observe

HERE = Path(__file__).parent
ROLES = ("explorer-0", "explorer-1", "pipeline", "trainer", "labeller")
# How a role may end when the database was taken from it, or its work by another.
_UNAVAILABLE, _FENCED, _DEFECT = 75, 76, 70


@dataclass
class Life:
    """One process of a role."""

    role: str
    pid: int
    failpoint: str | None = None


class RoleBrokeError(AssertionError):
    """A role ended as no crash should make it end."""


class Crew:
    """The processes of one run in `folder`.

    Args:
        folder: gets configuration, buffer, the witness's notes and the roles' logs.
        model: a model folder.
    """

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.lives: dict[str, Life] = {}
        for name in ("config.yaml", "plugins.py"):
            shutil.copy(HERE / name, folder)
        (folder / "model").symlink_to(model)
        self.config: RunConfig = load_config(folder / "config.yaml", [f"buffer.uri={folder / 'buffer'}"])
        self.server = EmbeddedServer(folder / "buffer")
        self._clock_shift_h = 0
        self._wait_for(self._fork("prepare", None))

    def start(self, role: str, failpoint: str | None = None) -> Life:
        """A new life of a role; `failpoint` is armed in it."""
        life = Life(role, self._fork(role, failpoint), failpoint)
        self.lives[role] = life
        return life

    def kill(self, role: str) -> None:
        """kill -9, and wait until the process has ended."""
        life = self.lives.pop(role)
        os.kill(life.pid, signal.SIGKILL)
        os.waitpid(life.pid, 0)

    def kill_database(self) -> None:
        """kill -9 of the server's first process; the sessions of the others notice and end."""
        os.kill(int((self.folder / "buffer" / "postgres" / "postmaster.pid").read_text().split()[0]), signal.SIGKILL)
        self.server.start()

    def restart_ended(self) -> list[tuple[str, str]]:
        """Give every role that ended by itself a new life; the roles, and why they had ended.

        Raises:
            RoleBrokeError: for no reason that a crash of another explains.
        """
        ended = []
        for life in list(self.lives.values()):
            pid, status = os.waitpid(life.pid, os.WNOHANG)
            if not pid:
                continue
            ended.append((life.role, self.reason(life, status)))
            self.start(life.role)
        return ended

    def reason(self, life: Life, status: int) -> str:
        """Why a process ended.

        Raises:
            RoleBrokeError: for no reason that a crash of another explains.
        """
        code = os.waitstatus_to_exitcode(status)
        known = {_UNAVAILABLE: "the database went away", _FENCED: "fenced", -signal.SIGKILL: "killed"}
        if code not in known:
            raise RoleBrokeError(f"the {life.role} ended with {code}:\n{self.log(life.role)[-4000:]}")
        return known[code]

    def wait_for_end(self, life: Life, timeout_s: float) -> str:
        """Wait until a role has ended by itself; why."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            pid, status = os.waitpid(life.pid, os.WNOHANG)
            if pid:
                if self.lives.get(life.role) is life:
                    del self.lives[life.role]
                return self.reason(life, status)
            time.sleep(0.01)
        raise RoleBrokeError(f"the {life.role} still runs after {timeout_s} s:\n{self.log(life.role)[-4000:]}")

    def replace_a_slow_trainer(self) -> str:
        """Stop the trainer until its lease ends, start another, continue the first; return how the first ended."""
        slow = self.lives.pop("trainer")
        os.kill(slow.pid, signal.SIGSTOP)
        try:
            attempt = self.number("SELECT coalesce(max(attempt_id), 0) FROM rft.run_attempt")
            self._clock_shift_h += 1  # the leases' clock of every process from now on: longer than any lease
            self.start("trainer")
            deadline = time.monotonic() + 10
            # Stopped in the middle of a transaction it still holds its locks: then it is woken, and the other comes after it.
            while time.monotonic() < deadline and attempt == self.number(
                "SELECT coalesce(max(attempt_id), 0) FROM rft.run_attempt"
            ):
                time.sleep(0.02)
        finally:
            os.kill(slow.pid, signal.SIGCONT)
        return self.wait_for_end(slow, 30)

    def stop(self) -> None:
        """Ask the roles to stop, in good order."""
        with contextlib.suppress(psycopg.Error), self._connection() as connection:
            connection.execute("UPDATE rft.run SET stop_requested = true")
        deadline = time.monotonic() + 30
        for life in list(self.lives.values()):
            while time.monotonic() < deadline and not os.waitpid(life.pid, os.WNOHANG)[0]:
                time.sleep(0.01)
            if time.monotonic() >= deadline:
                raise RoleBrokeError(f"the {life.role} did not stop when asked to:\n{self.log(life.role)[-4000:]}")
            del self.lives[life.role]

    def close(self) -> None:
        """End everything."""
        for role in list(self.lives):
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                self.kill(role)
        self.server.stop()

    def number(self, query: str) -> int:
        """One number from the database; 0 while it does not answer."""
        with contextlib.suppress(psycopg.Error), self._connection() as connection:
            row = connection.execute(query).fetchone()
            return int(row[0]) if row else 0
        return 0

    def log(self, role: str) -> str:
        path = self.folder / "logs" / f"{role}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def _connection(self) -> psycopg.Connection[tuple[int, ...]]:
        return psycopg.connect(self.server.uri, autocommit=True, connect_timeout=5)

    def _wait_for(self, pid: int) -> None:
        _, status = os.waitpid(pid, 0)
        if status:
            raise RoleBrokeError(self.log("prepare"))

    def _fork(self, role: str, failpoint: str | None) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return pid
        code = _DEFECT
        try:
            code = self._live(role, failpoint)
        except (BufferUnavailableError, ConflictError, psycopg.OperationalError):
            traceback.print_exc()
            code = _UNAVAILABLE
        except FencedError:
            code = _FENCED
        except BaseException:  # noqa: BLE001 - the end of the process
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _live(self, role: str, failpoint: str | None) -> int:
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        log = os.open(logs / f"{role}.log", os.O_APPEND | os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self._clock_shift_h:
            os.environ["PGOPTIONS"] = f"-c rft.clock_shift={self._clock_shift_h}h"
        witness = Witness(self.folder / "witness", role)
        observe(witness)
        failpoints.arm(failpoint)
        name = self.config.run.name
        match role.partition("-")[0]:
            case "prepare":
                resolved = ResolvedRun(self.config)
                check_run(resolved)
                with rftdata.open(self.config.buffer) as buffer:
                    prepare_run(resolved, buffer)
                return 0
            case "explorer":
                return explorer.main(self.config, name, index=int(role[-1]))
            case "pipeline":
                return pipeline.main(self.config, name)
            case "trainer":
                return trainer.main(self.config, name)
        return _label(self.server.uri, witness, random.Random(os.getpid()))


def _label(uri: str, witness: Witness, rng: random.Random) -> int:
    """Correct rewards in SQL all the time, as a person does."""
    with psycopg.connect(uri, autocommit=True) as connection:
        connection.execute("SET rft.author = 'labeller'")
        while True:
            stopped = connection.execute("SELECT bool_or(stop_requested) FROM rft.run").fetchone()
            if stopped and stopped[0]:
                return 0
            found = connection.execute(
                "SELECT experience_id FROM rft.experience ORDER BY experience_id DESC LIMIT 1 OFFSET %s",
                [rng.randrange(60)],
            ).fetchone()
            if found:
                (experience_id,), reward = found, rng.randrange(5) / 4
                witness.note("labels", experience_id=experience_id, reward=reward)
                connection.execute(
                    "UPDATE rft.experience SET reward = %s WHERE experience_id = %s", [reward, experience_id]
                )
                witness.note("labelled", experience_id=experience_id, reward=reward)
                witness.note_first_claim()
            time.sleep(0.05)
