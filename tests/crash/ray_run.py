"""`rft run` over several lives: started, killed at one of its processes, and started again with `--resume`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import psycopg

from rftdata.postgres.embedded import EmbeddedServer
from tests.crash.crew import RoleBrokeError
from tests.support.command_line import CHECKOUT, rft_environment
from tests.support.waiting import PATIENCE_S

# What ends a run, and how `rft run` describes it: not at all if it is killed itself.
FATAL = {
    "gcs_server": "the Ray cluster of the run 'crash' was lost: its head process (gcs_server) at ",
    "raylet": "the Ray cluster of the run 'crash' was lost: its raylet at ",
    "trainer": "the trainer of the run 'crash' was killed by signal 9",
    "rft run": "",
}
REPLACED = ("explorer", "pipeline", "database")
"""What `rft run` starts again."""
_RESUME = "continue from the last checkpoint: rft run --resume crash"
_RFT = "from rftcore.command import main; main()"


class RayRun:
    """The run `crash` of `folder / "config.yaml"`. The folder gets its buffer and what each life printed.

    Args:
        settings: `--set` of every life.
        program: the command line, as Python.
        environment: further variables.
    """

    def __init__(
        self, folder: Path, settings: Sequence[str], program: str = _RFT, environment: Mapping[str, str] | None = None
    ) -> None:
        self.folder, self.buffer = folder, folder / "buffer"
        self.process: subprocess.Popen[bytes] | None = None
        self._settings, self._program, self._environment = settings, program, dict(environment or {})
        self._number = 0
        self._roles: set[psutil.Process] = set()

    @property
    def output(self) -> str:
        """What the newest life printed."""
        return (self.folder / f"life-{self._number}.log").read_text(errors="replace")

    @property
    def exit_code(self) -> int | None:
        """Exit code of the newest life; None while it goes on."""
        return self.process and self.process.poll()

    def start(self) -> None:
        """Begin the first or the next life."""
        options = [part for setting in self._settings for part in ("--set", setting)]
        if self._number:
            options.append("--resume")
        self._number += 1
        command = ["run", str(self.folder / "config.yaml"), *options, "--plain", "--buffer", str(self.buffer)]
        environment = {**rft_environment(), "RAY_ADDRESS": "local", "PYTHONPATH": str(CHECKOUT), **self._environment}
        with (self.folder / f"life-{self._number}.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", self._program, *command],
                cwd=self.folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for_steps(self, count: int) -> None:
        """Wait until this life has recorded so many steps.

        Raises:
            RoleBrokeError: it ended before, or did not get there within `PATIENCE_S`.
        """
        assert self.process is not None
        query, wanted = "SELECT count(*) FROM rft.train_step", None
        deadline = time.monotonic() + PATIENCE_S
        while True:
            done = self.number(query)
            if done is not None:
                wanted = wanted or done + count
                if done >= wanted:
                    return
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RoleBrokeError(f"life {self._number} does not train:\n{self.output[-4000:]}")
            time.sleep(0.1)

    def number(self, query: str) -> int | None:
        """One number from the database; None while it does not answer."""
        with contextlib.suppress(psycopg.Error, OSError):
            uri = EmbeddedServer(self.buffer).uri
            with psycopg.connect(uri, autocommit=True, connect_timeout=5) as connection:
                row = connection.execute(query).fetchone()
                return None if row is None or row[0] is None else int(row[0])
        return None

    def kill(self, victim: str) -> bool:
        """kill -9; return whether there was such a process."""
        assert self.process is not None
        self._roles |= {p for p in self._processes() if _name(p).startswith("ray::Role")}
        pid: int | None
        if victim == "rft run":
            pid = self.process.pid
        elif victim == "database":
            pid = int((self.buffer / "postgres" / "postmaster.pid").read_text().split()[0])
        elif victim in ("gcs_server", "raylet"):
            pid = next((p.pid for p in self._processes() if _name(p) == victim), None)
        else:
            pid = self.number(f"SELECT max(pid) FROM rft.worker WHERE role = '{victim}' AND stopped_at IS NULL")
            if pid not in {p.pid for p in self._processes()}:  # the number of one that has ended may be anybody's
                return False
        if pid is None or not psutil.pid_exists(pid):
            return False
        os.kill(pid, signal.SIGKILL)
        return True

    def check_end(self, victim: str) -> float:
        """Wait until the life ends because of what was killed; return the seconds.

        Raises:
            RoleBrokeError: it ended, or reported its end, in another way than the manual says, or left roles behind.
        """
        assert self.process is not None
        since = time.monotonic()
        try:
            code = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired as error:
            raise RoleBrokeError(
                f"{PATIENCE_S:.0f} s after the end of the {victim} the run goes on:\n{self.output[-4000:]}"
            ) from error
        seconds, said = time.monotonic() - since, self.output
        wanted = (FATAL[victim], _RESUME) if FATAL[victim] else ()
        if (
            code != (1 if wanted else -signal.SIGKILL)
            or not all(part in said for part in wanted)
            or "Traceback" in said
        ):
            raise RoleBrokeError(f"after the end of the {victim} the run ended with {code}:\n{said[-4000:]}")
        _, left = psutil.wait_procs(self._roles, timeout=PATIENCE_S)
        self._roles.clear()
        if left:
            raise RoleBrokeError(f"after the end of the {victim} these roles still run: {left}")
        return seconds

    def stop(self) -> None:
        """Ask the run to stop as a batch system does (a shell in the background lets it ignore Ctrl-C).

        Raises:
            RoleBrokeError: it did not stop in good order.
        """
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        if (code := self.process.wait(PATIENCE_S)) != 128 + signal.SIGTERM:
            raise RoleBrokeError(f"the run did not stop in good order but with {code}:\n{self.output[-4000:]}")

    def close(self) -> None:
        """End everything."""
        if self.process is not None and self.process.poll() is None:
            processes = [*self._processes(), psutil.Process(self.process.pid)]
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.wait()
        if (self.buffer / "postgres").exists():
            EmbeddedServer(self.buffer).stop()

    def _processes(self) -> list[psutil.Process]:
        assert self.process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return str(process.name())
    return ""
