"""What grows in a long run: a model of a few thousand parameters is trained for many steps by a real `rft run`.

The run has all parts of a larger one: the difficulty selector, a pipeline with stages, evaluations and checkpoints. It is started twice, up to a tenth
of its steps and up to the end, so that the commands are measured at both points. Figures are of the first and the last tenth of the steps:

- `step_s`: seconds of a step;
- `processes`: for each process its anonymous and shared memory (MiB), its open files, and its processor seconds per step; all processes of the
  database together;
- `database_bytes`, `segments_bytes`, `run_folder_bytes`: growth per step; `run_folder_files`: files in the run's folder at the end of the tenth;
- `commands`: seconds of `rft status` and `rft report`, and `resume`: from the call of `rft run --resume` to the next trained step;
- `probe_s`: processor seconds of a fixed computation in this program, which show the speed of the machine.

`grows` has the ratios above `--limit` of the last tenth to the first, with seconds of steps and processors at the machine's speed in the first.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import psycopg

from benchmarks.harness.arguments import argument_parser, integer, kept_folder, positive
from benchmarks.harness.report import say, write
from benchmarks.harness.rft import command, environment
from rftdata.postgres.embedded import EmbeddedServer
from tests.support.models import make_tiny_model

_RUN = "endurance"
_MIB = 2**20
_LIMIT_S = 300.0
_POLL_S = 0.5
WORK = """
def questions():
    return ({"question": f"what is {number}?", "answer": str(number)} for number in range(2000))


def held_out():
    return ({"question": f"and {number}?", "answer": str(number)} for number in range(20))


def score(turn, task):
    return (sum(turn.response.encode()) % 5) / 4
"""
CONFIG = """
run: {name: endurance, seed: 1}
model: {path: ./model}
tasks: [{name: numbers, source: "./work.py:questions"}]
selector: {type: difficulty}
pipelines:
  experience:
    - drop_zero_variance_groups: {}
    - sql: "SELECT * REPLACE (reward - 0.01 * (num_response_tokens > 6)::INT AS reward) FROM batch"
algorithm: {name: grpo, group_size: 4}
explorer:
  engine: transformers
  engine_args: {dtype: float32, context_length: 64}
  reward: "./work.py:score"
  max_tokens: 8
trainer: {batch_groups: 2, checkpoint_every: 100, autocast: none, num_threads: 1}
eval: {every: 500, tasks: [{name: held-out, source: "./work.py:held_out"}]}
sync: {offset: 1}
sampling: {max_staleness: 3}
"""


@dataclass(frozen=True)
class Usage:
    """Resources of a process.

    Attributes:
        memory_bytes: its share of anonymous and of shared memory, without pages of mapped files, which the operating system may drop.
        processor_s: processor seconds since its start.
    """

    memory_bytes: float
    open_files: int
    processor_s: float

    @classmethod
    def of(cls, process: psutil.Process) -> Usage:
        """Measure a process.

        Raises:
            NoSuchProcess, OSError: it has ended.
        """
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        sizes = {name: int(kib) * 2**10 for name, kib, *_ in (line.split() for line in lines[1:])}
        times = process.cpu_times()
        memory = sum(sizes[name] for name in ("Pss_Anon:", "Pss_Shmem:", "SwapPss:"))
        return cls(memory, process.num_fds(), times.user + times.system)


@dataclass(frozen=True)
class Sample:
    """Measurements of the run at a step.

    Attributes:
        step: trained steps.
        sizes: bytes and numbers by name.
        probe_s: see the module header.
        processes: usage by name and process id.
    """

    step: int
    probe_s: float
    sizes: dict[str, float]
    processes: dict[str, dict[int, Usage]]


@dataclass
class Run:
    """The run, which is started several times.

    Attributes:
        samples: samples of all starts.
    """

    folder: Path
    samples: list[Sample] = field(default_factory=list)

    @property
    def buffer(self) -> Path:
        return self.folder / "buffer"

    def train(self, steps: int, every: int) -> float:
        """Run to a step, with a sample every so many steps; return the seconds to the first step of this start.

        Raises:
            RuntimeError: the run failed.
        """
        resume = ["--resume"] if self.samples else []
        flags = [*resume, "--plain", "--buffer", self.buffer, "--set", f"steps={steps}"]
        run = command("run", self.folder / "config.yaml", *flags)
        started, before, first_s = time.monotonic(), self.step(), 0.0
        with (self.folder / "run.log").open("ab") as log:
            process = subprocess.Popen(run, stdout=log, stderr=subprocess.STDOUT, env=environment(OMP_NUM_THREADS="1"))
        next_sample = before + every
        while process.poll() is None:
            step = self.step()
            if not first_s and step > before:
                first_s = time.monotonic() - started
            if step >= next_sample:
                self.samples.append(self.sample(process.pid, step))
                next_sample = step + every
                say(f"step {step}")
            time.sleep(_POLL_S)
        if process.returncode != 0:
            raise RuntimeError(
                f"rft run ended with {process.returncode}:\n{(self.folder / 'run.log').read_text()[-3000:]}"
            )
        return first_s

    def step(self) -> int:
        """Return the trained steps; 0 while the database does not answer."""
        found = self.ask("SELECT coalesce(max(trainer_step), 0) FROM rft.train_step")
        return int(found[0][0]) if found else 0

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query; none while the database does not answer."""
        try:
            with psycopg.connect(EmbeddedServer(self.buffer).uri, autocommit=True, connect_timeout=5) as connection:
                return connection.execute(query).fetchall()
        except (psycopg.Error, OSError):
            return []

    def sample(self, pid: int, step: int) -> Sample:
        """Measure everything once.

        Args:
            pid: process id of `rft run`.
        """
        roles = dict(self.ask("SELECT pid, role::text FROM rft.worker WHERE stopped_at IS NULL"))
        processes: dict[str, dict[int, Usage]] = defaultdict(dict)
        for each in _family(pid, EmbeddedServer(self.buffer)):
            try:
                name = roles.get(each.pid) or ("database" if each.name() == "postgres" else "others")
                processes["rft run" if each.pid == pid else name][each.pid] = Usage.of(each)
            except (psutil.NoSuchProcess, OSError):
                continue
        run_folder = self.buffer / "runs" / _RUN
        files = [path for path in run_folder.rglob("*") if path.is_file()]
        database = self.ask("SELECT pg_database_size(current_database())")
        sizes = {
            "database_bytes": float(database[0][0]) if database else 0.0,
            "segments_bytes": float(_bytes(self.buffer / "segments")),
            "run_folder_bytes": float(sum(_size(path) for path in files)),
            "run_folder_files": float(len(files)),
        }
        return Sample(step, _probe(), sizes, dict(processes))

    def seconds_per_step(self, first: int, last: int) -> float:
        """Return the mean seconds of the steps between two, by when they were finished."""
        query = "SELECT extract(epoch FROM max(finished_at) - min(finished_at)) FROM rft.train_step WHERE trainer_step IN ({}, {})"
        return float(self.ask(query.format(first, last))[0][0]) / (last - first)

    def command_s(self, *arguments: str, rounds: int = 3) -> float:
        """Return the median seconds of a command of `rft`."""
        taken = []
        for _ in range(rounds):
            started = time.monotonic()
            called = command(*arguments, "--buffer", self.buffer)
            subprocess.run(called, check=True, capture_output=True, timeout=_LIMIT_S, env=environment())
            taken.append(time.monotonic() - started)
        return statistics.median(taken)


def _probe() -> float:
    started, total = time.process_time(), 0
    for number in range(300_000):
        total += number
    return time.process_time() - started


def _family(pid: int, server: EmbeddedServer) -> Iterable[psutil.Process]:
    yield from (run := psutil.Process(pid)).children(recursive=True)
    yield run
    postmaster = server.data / "postmaster.pid"
    if postmaster.exists():
        database = psutil.Process(int(postmaster.read_text().split()[0]))
        yield from [database, *database.children(recursive=True)]


def _bytes(folder: Path) -> int:
    return sum(_size(path) for path in folder.rglob("*") if path.is_file())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def tenth(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the figures of successive samples: growth per step, memory, open files and processor seconds per step.

    Processor seconds are those of processes that the first and the last sample with the name both have.
    """
    first, last = samples[0], samples[-1]
    steps = last.step - first.step
    figures: dict[str, Any] = {
        name: round((value - first.sizes[name]) / steps, 1)
        for name, value in last.sizes.items()
        if name.endswith("bytes")
    }
    figures["run_folder_files"] = last.sizes["run_folder_files"]
    figures["probe_s"] = round(statistics.median(sample.probe_s for sample in samples), 5)
    names = sorted({name for sample in samples for name in sample.processes})
    figures["processes"] = {name: _process(samples, name) for name in names}
    return figures


def _process(samples: Sequence[Sample], name: str) -> dict[str, float]:
    there = [(sample.step, sample.processes[name]) for sample in samples if name in sample.processes]
    (first_step, first), (last_step, last) = there[0], there[-1]
    seconds = sum(last[pid].processor_s - first[pid].processor_s for pid in first.keys() & last.keys())
    memory = statistics.median(sum(usage.memory_bytes for usage in processes.values()) for _, processes in there)
    files = statistics.median(sum(usage.open_files for usage in processes.values()) for _, processes in there)
    return {
        "memory_mib": round(memory / _MIB, 1),
        "open_files": files,
        "cpu_s_per_step": round(seconds / max(1, last_step - first_step), 5),
    }


def at_speed(figures: dict[str, Any], factor: float) -> dict[str, Any]:
    """Return the figures for a machine that is `factor` times as fast: seconds of steps and processors."""
    return {
        name: at_speed(value, factor)
        if isinstance(value, dict)
        else value / factor
        if name.endswith(("_s", "_s_per_step"))
        else value
        for name, value in figures.items()
    }


def growth(first: Any, last: Any, limit: float, name: str = "") -> dict[str, float]:
    """Return the ratios of the last tenth to the first that are above a limit, by name."""
    if isinstance(first, dict):
        found: dict[str, float] = {}
        for key in first.keys() & last.keys():
            found |= growth(first[key], last[key], limit, f"{name}.{key}".lstrip("."))
        return dict(sorted(found.items()))
    return {name: round(last / first, 2)} if first > 0 and last / first > limit else {}


def measure(folder: Path, steps: int, limit: float) -> dict[str, Any]:
    """Train the run; return the figures."""
    make_tiny_model(folder / "model", num_layers=1)
    (folder / "work.py").write_text(WORK)
    (folder / "config.yaml").write_text(CONFIG)
    run, part, every = Run(folder), steps // 10, max(1, steps // 200)
    result: dict[str, Any] = {}
    try:
        run.train(part, every)
        early = _commands(run, lambda: run.train(part + 1, 1))
        run.train(steps, every)
        late = _commands(run, lambda: run.train(steps + 1, 1))
        # The first samples belong to a run that is starting.
        parts = {
            "first_tenth": [sample for sample in run.samples if 2 * every < sample.step <= part],
            "last_tenth": [sample for sample in run.samples if steps - part < sample.step <= steps],
        }
        for name, commands in (("first_tenth", early), ("last_tenth", late)):
            samples = parts[name]
            seconds = round(run.seconds_per_step(samples[0].step, samples[-1].step), 4)
            result[name] = {"step_s": seconds, "commands": commands, **tenth(samples)}
    finally:
        EmbeddedServer(run.buffer).stop()
    first, last = result["first_tenth"], result["last_tenth"]
    result["grows"] = growth(first, at_speed(last, last["probe_s"] / first["probe_s"]), limit)
    return result


def _commands(run: Run, resume: Callable[[], float]) -> dict[str, float]:
    found = {verb: round(run.command_s(verb, _RUN), 2) for verb in ("status", "report")}
    return {**found, "resume": round(resume(), 2)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser("endurance", __doc__)
    parser.add_argument(
        "--steps", type=integer(100), default=20_000, help="steps; 100 or more, so that a tenth has samples"
    )
    parser.add_argument("--limit", type=positive, default=1.2, help="ratio above which a figure counts as growing")
    options = parser.parse_args(arguments)
    with kept_folder(options) as folder:
        write(options, measure(folder, options.steps, options.limit))
    return 0
