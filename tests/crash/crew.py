"""A run whose roles are plain processes, which the tests kill at any moment.

The parent imports everything the roles need, computes nothing, holds no connection and starts no thread; each role is a fork of it, so a
new life begins within milliseconds. pandas belongs to it: pyarrow loads it with the first array that it makes of Python values.

With a network every role has a machine of its own there, and reaches database and other roles by TCP. The folder with the arrays is no part of that network:
what a shared file system does without its network is its own affair.
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pandas as pd  # noqa: F401 - for pyarrow
import psutil
import psycopg

import rftdata
from rftcore.config.run import RunConfig, load_config
from rftcore.explorer import role as explorer
from rftcore.launch.preparation import prepare_run
from rftcore.pipeline import role as pipeline
from rftcore.resolved import ResolvedRun
from rftcore.run.join import join_run
from rftcore.trainer import role as trainer
from rftdata import failpoints
from rftdata.errors import BufferUnavailableError, ConflictError, FencedError, RoleFailedError
from rftdata.postgres.embedded import DATABASE, EmbeddedServer
from rftdata.postgres.initdb import OWNER
from tests.crash.cuts import Cuts
from tests.crash.witness import Witness, observe
from tests.support.checking import refuse_start
from tests.support.network import Machine, Network
from tests.support.waiting import PATIENCE_S

HERE = Path(__file__).parent
ROLES = ("explorer-0", "explorer-1", "pipeline", "trainer", "labeller")
# Another machine for a trainer that replaces one which cannot be reached.
SPARE = "spare"
MACHINES = ("explorer-0", "explorer-1", "pipeline", "trainer", SPARE)
# How a role may end when the database, its work or one of its ranks was taken from it.
_UNAVAILABLE, _FENCED, _RANK_DIED, _DEFECT = 75, 76, 77, 70

_PORT = 5499
_NEWEST_ATTEMPT = "SELECT coalesce(max(attempt_id), 0) FROM rft.run_attempt"


@dataclass
class Life:
    """One process of a role.

    Attributes:
        machine: in the network; None without one.
        lost_rank: whether a rank of this trainer was killed.
    """

    role: str
    pid: int
    failpoint: str | None = None
    machine: str | None = None
    lost_rank: bool = False


class RoleBrokeError(AssertionError):
    """A role ended as no crash should make it end."""


class Crew:
    """The processes of one run in `folder`.

    Args:
        folder: gets configuration, buffer, the witness's notes and the roles' logs.
        model: a model folder.
        network: with a machine for each of `MACHINES`; None to keep all roles on this one.
        overrides: of the configuration, where there is no network.
    """

    def __init__(
        self, folder: Path, model: Path, network: Network | None = None, overrides: Sequence[str] = ()
    ) -> None:
        self.folder = folder
        self.lives: dict[str, Life] = {}
        for name in ("config.yaml", "plugins.py", "games.py"):
            shutil.copy(HERE / name, folder)
        (folder / "model").symlink_to(model)
        self.config: RunConfig = load_config(folder / "config.yaml", [f"buffer.uri={folder / 'buffer'}", *overrides])
        self.server = EmbeddedServer(folder / "buffer", None if network is None else f"{network.address}:{_PORT}")
        self.cuts = Cuts({} if network is None else network.machines)
        self._trainer_machine = "trainer"
        self._clock_shift_h = 0
        if network is not None:
            self._open_to(network)
        self._wait_for(self._fork("prepare", None))

    def _open_to(self, network: Network) -> None:
        """Let the network's machines reach the database, as its administrator would, and the roles use it there."""
        self.server.start()
        self.server.stop()
        with open(self.server.data / "pg_hba.conf", "a", encoding="utf-8") as file:
            file.write(f"host all all {network.address}/24 scram-sha-256\n")
        self.server.start()
        password = quote(self.server.password_file.read_text().strip())
        settings = {
            "buffer.uri": f"postgresql://{OWNER}:{password}@{network.address}:{_PORT}/{DATABASE}",
            "buffer.segments": str(self.folder / "buffer" / "segments"),
            "sync.file_method": "checkpoint",
        }
        self.config = load_config(self.folder / "config.yaml", [f"{key}={value}" for key, value in settings.items()])

    def start(self, role: str, failpoint: str | None = None, *, num_ranks: int = 1) -> Life:
        """A new life of a role; `failpoint` is armed in it."""
        machine = self._machine(role)
        name = None if machine is None else machine.name
        life = Life(role, self._fork(role, failpoint, machine, num_ranks), failpoint, name)
        self.lives[role] = life
        return life

    def machine_of(self, role: str) -> str:
        """Return the name of the machine on which a role lives."""
        return self._trainer_machine if role == "trainer" else role

    def _machine(self, role: str) -> Machine | None:
        return self.cuts.machines.get(self.machine_of(role))

    def kill(self, role: str) -> None:
        """kill -9, and wait until the process has ended."""
        life = self.lives.pop(role)
        os.kill(life.pid, signal.SIGKILL)
        os.waitpid(life.pid, 0)

    def kill_beneath(self, module: str, rng: random.Random) -> bool:
        """kill -9 of a process that explorers have started to run a module; return whether there was one within some seconds."""
        deadline = time.monotonic() + 2
        while not (found := self._beneath(module)) and time.monotonic() < deadline:
            self.tend()
            time.sleep(0.05)
        if found:
            with contextlib.suppress(psutil.Error):
                rng.choice(found).kill()
        return bool(found)

    def _beneath(self, module: str) -> list[psutil.Process]:
        found = []
        for role in ("explorer-0", "explorer-1"):
            with contextlib.suppress(psutil.Error, KeyError):
                below = psutil.Process(self.lives[role].pid).children(recursive=True)
                found += [process for process in below if module in process.cmdline()]
        return found

    def kill_database(self) -> None:
        """kill -9 of the server's first process; the sessions of the others notice and end."""
        os.kill(int((self.folder / "buffer" / "postgres" / "postmaster.pid").read_text().split()[0]), signal.SIGKILL)
        self.server.start()

    def tend(self) -> list[tuple[str, str]]:
        """End the cuts whose time is over, and give every role that ended by itself a new life. Every wait of a storm calls this.

        Returns:
            The roles, and why they had ended.

        Raises:
            RoleBrokeError: for no reason that a crash of another explains.
        """
        self.cuts.restore_due()
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
        if life.lost_rank:
            known[_RANK_DIED] = "a rank was killed"
        if code not in known:
            raise RoleBrokeError(f"the {life.role} ended with {code}:\n{self.log(life.role)[-4000:]}")
        return known[code]

    def wait_for_end(self, life: Life) -> str:
        """Wait until a role has ended by itself, and give it no new life; return why."""
        if self.lives.get(life.role) is life:
            del self.lives[life.role]
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            pid, status = os.waitpid(life.pid, os.WNOHANG)
            if pid:
                return self.reason(life, status)
            # It may wait for a network that is cut, or for another role.
            self.tend()
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):
            os.kill(life.pid, signal.SIGKILL)
        raise RoleBrokeError(f"the {life.role} still runs after {PATIENCE_S:g} s:\n{self.log(life.role)[-4000:]}")

    def replace_a_slow_trainer(self) -> str:
        """Stop the trainer until its lease ends, start another, continue the first; return how the first ended."""
        slow = self.lives.pop("trainer")
        os.kill(slow.pid, signal.SIGSTOP)
        try:
            attempt = self.number(_NEWEST_ATTEMPT)
            self._clock_shift_h += 1  # the leases' clock of every process from now on: longer than any lease
            self.start("trainer")
            deadline = time.monotonic() + 10
            # Stopped in the middle of a transaction it still holds its locks: then it is woken, and the other comes after it.
            while time.monotonic() < deadline and attempt == self.number(_NEWEST_ATTEMPT):
                self.tend()
                time.sleep(0.02)
        finally:
            os.kill(slow.pid, signal.SIGCONT)
        return self.wait_for_end(slow)

    def replace_a_lost_trainer(self) -> str:
        """Cut the trainer's machine off, start another trainer elsewhere, restore the machine; return how the first trainer ended."""
        lost = self.lives.pop("trainer")
        assert lost.machine is not None
        self.cuts.cut(lost.machine, seconds=60)
        attempt = self.number(_NEWEST_ATTEMPT)
        self._trainer_machine = "trainer" if self._trainer_machine == SPARE else SPARE
        self.cuts.restore(self._trainer_machine)
        self._clock_shift_h += 1  # as in `replace_a_slow_trainer`
        self.start("trainer")
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and attempt == self.number(_NEWEST_ATTEMPT):
            self.tend()
            time.sleep(0.02)
        self.cuts.restore(lost.machine)
        return self.wait_for_end(lost)

    def kill_a_rank(self) -> str:
        """Start a trainer of two ranks, kill the second one after some steps; return how the trainer ended."""
        if "trainer" in self.lives:
            self.kill("trainer")
        life = self.start("trainer", num_ranks=2)
        query = "SELECT coalesce(max(draw_id), 0) FROM rft.draw"
        drawn, deadline = 0, time.monotonic() + PATIENCE_S
        # The first draw is made ahead of the first step.
        while drawn < 3 and time.monotonic() < deadline and life is self.lives.get("trainer"):
            before = self.number(query)
            time.sleep(0.1)
            self.tend()
            drawn += self.number(query) > before
        if life is not self.lives.get("trainer"):
            return "ended before"  # the database, or its network, was away
        ranks = [
            each for each in psutil.Process(life.pid).children() if "rftcore.trainer.processes.rank" in each.cmdline()
        ]
        if len(ranks) != 1:
            raise RoleBrokeError(f"the trainer has {len(ranks)} other ranks:\n{self.log('trainer')[-4000:]}")
        life.lost_rank = True
        ranks[0].kill()
        ended = self.wait_for_end(life)
        self.start("trainer")
        return ended

    def stop(self) -> None:
        """Ask the roles to stop, in good order."""
        with contextlib.suppress(psycopg.Error), self._connection() as connection:
            connection.execute("UPDATE rft.run SET stop_requested = true")
        deadline = time.monotonic() + PATIENCE_S
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

    def _fork(self, role: str, failpoint: str | None, machine: Machine | None = None, num_ranks: int = 1) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return pid
        code = _DEFECT
        try:
            if machine is not None:
                machine.enter()
            code = self._live(role, failpoint, num_ranks)
        except (BufferUnavailableError, ConflictError, psycopg.OperationalError):
            traceback.print_exc()
            code = _UNAVAILABLE
        except FencedError:
            code = _FENCED
        except RoleFailedError:
            traceback.print_exc()
            code = _RANK_DIED
        except BaseException:  # noqa: BLE001 - the end of the process
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _live(self, role: str, failpoint: str | None, num_ranks: int) -> int:
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
                refuse_start(resolved)
                with rftdata.open(self.config.buffer) as buffer:
                    prepare_run(resolved, buffer)
                return 0
            case "explorer":
                return explorer.main(join_run(self.config, name), index=int(role[-1]))
            case "pipeline":
                return pipeline.main(join_run(self.config, name))
            case "trainer":
                ranks = self.config.trainer.model_copy(update={"num_gpus": num_ranks})
                return trainer.main(join_run(self.config.model_copy(update={"trainer": ranks}), name))
        return _label(self.server.uri, witness, random.Random(os.getpid()))


def _label(uri: str, witness: Witness, rng: random.Random) -> int:
    """Correct rewards in SQL all the time, as a person does, and say which answers are good, as a page does: each request with a key."""
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
                good, key = rng.random() < 0.8, f"{os.getpid()}-{rng.getrandbits(64):x}"
                witness.note("annotates", key=key, experience_id=experience_id, good=good)
                for _ in range(rng.choice((1, 1, 2))):  # as if an answer had been lost
                    connection.execute(
                        "INSERT INTO rft.annotation (kind, target_id, value, key) VALUES ('good', %s, to_jsonb(%s::boolean), %s)",
                        [experience_id, good, key],
                    )
                witness.note("annotated", key=key, experience_id=experience_id, good=good)
            time.sleep(0.05)
