"""Failures of Ray: `rft run` with its supervisor and roles, of which Ray's head, the raylet, a role, the database or `rft run` itself is killed.

    python -m tests.crash.ray_storm --lives 20 --seed 7

A life of the run begins with `rft run --resume` and ends with a failure that no run survives. Before that, some of its replaceable processes are
killed. Each life must end as the manual says, and the next one must continue. Afterwards the buffer is compared with what every
process was told (`examine`). What is killed when follows from the seed, as in `storm`.

With `--gpu` engine and trainer compute on GPUs: the engine is a real one, and weights travel as the product chooses for this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rftcore.run.gpus import local_gpus
from tests.crash.crew import HERE, RoleBrokeError
from tests.crash.examine import Findings, examine
from tests.crash.observed import FOLDER
from tests.crash.ray_run import FATAL, REPLACED, RayRun
from tests.crash.storm import make_model
from tests.support.session_processes import begin_program

# A real engine, and whichever way weights travel on this machine; its log-probabilities are compared with the trainer's.
_REAL_ENGINE = (
    "explorer.engine=transformers",
    "explorer.engine_args={dtype: float32, context_length: 96}",
    "explorer.max_tokens=12",
    "sync={offset: 1}",
)
_PROGRAM = "from tests.crash.observed import main; main()"


@dataclass
class Report:
    """How a storm went.

    Attributes:
        killed: how often each process was killed.
        end_s: seconds from each failure that ended a life until `rft run` had ended, by what was killed.
    """

    lives: int
    killed: Counter[str] = field(default_factory=Counter)
    end_s: dict[str, list[float]] = field(default_factory=dict)
    findings: Findings = field(default_factory=Findings)

    @property
    def line(self) -> str:
        found = self.findings
        return (
            f"{self.lives} lives on Ray, {self.killed.total()} kills: {len(found.lost)} lost, {len(found.trained_twice)} trained twice, "
            f"{len(found.mislabelled)} mislabelled, {len(found.old_weights)} on old weights"
        )


def fatal_failures(rng: random.Random) -> Iterator[str]:
    """What ends one life after the other: Ray's head and its raylet first, then everything in turns, each time in another order."""
    yield from rng.sample(("gcs_server", "raylet"), k=2)
    while True:
        yield from rng.sample(tuple(FATAL), k=len(FATAL))


def storm(
    folder: Path, lives: int, seed: int, *, has_scribe: bool = True, progress: Callable[[str], None] = lambda line: None
) -> Report:
    """Let the run of `folder` fail at the end of each of `lives` lives, let it recover, and examine what is left.

    Args:
        has_scribe: whether the engine is `plugins.Scribe`, else a real one.

    Raises:
        RoleBrokeError: a life did not end, or did not continue, as the manual says.
    """
    report, rng = Report(lives), random.Random(seed)
    for name in ("config.yaml", "plugins.py", "games.py"):
        shutil.copy(HERE / name, folder)
    (folder / "model").symlink_to(make_model(folder))
    run = RayRun(folder, () if has_scribe else _REAL_ENGINE, _PROGRAM, {FOLDER: str(folder / "witness")})
    try:
        failures = fatal_failures(rng)
        for number in range(1, lives + 1):
            run.start()
            run.wait_for_steps(2)
            for victim in rng.sample(REPLACED, k=rng.choice((0, 1, 1, 2))):
                time.sleep(rng.random())
                report.killed[victim] += run.kill(victim)
            run.wait_for_steps(1)
            time.sleep(rng.random())
            victim = next(failures)
            if not run.kill(victim):
                raise RoleBrokeError(
                    f"life {number} has no {victim} (exit code {run.exit_code}):\n{run.output[-4000:]}"
                )
            report.killed[victim] += 1
            report.end_s.setdefault(victim, []).append(round(run.check_end(victim), 1))
            progress(f"life {number} of {lives}: {victim} killed, ended after {report.end_s[victim][-1]:.1f} s")
        run.start()
        run.wait_for_steps(3)
        run.stop()
    finally:
        run.close()
    report.findings = examine(folder, has_scribe=has_scribe)
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lives", type=int, default=20)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(2), "big"))
    parser.add_argument("--folder", type=Path, help="an empty folder that is kept; by default a temporary one")
    parser.add_argument("--real-engine", action="store_true", help="the engine transformers and not the test's own")
    parser.add_argument("--gpu", action="store_true", help="engine (a real one) and trainer on GPUs")
    options = parser.parse_args(arguments)
    if options.gpu and not local_gpus():
        parser.error(
            "--gpu (GPU=1 of make) needs a GPU, and nvidia-smi lists none here; without it all runs on the CPU"
        )
    has_scribe = not (options.real_engine or options.gpu)
    prefix = begin_program()
    print(f"seed {options.seed} (SEED={options.seed} repeats the schedule)", flush=True)
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True))
        )
        report = storm(
            folder,
            options.lives,
            options.seed,
            has_scribe=has_scribe,
            progress=lambda line: print(line, flush=True),
        )
    found = report.findings
    for name in ("lost", "trained_twice", "mislabelled", "old_weights"):
        for what in getattr(found, name)[:20]:
            print(f"{name}: {what}")
    print(json.dumps({"killed": report.killed, "seconds to the end": report.end_s}))
    print(
        f"{found.experiences} experiences, {found.steps} steps in {found.attempts} attempts, {found.transfers} times weights into an engine"
    )
    print(report.line)
    return 0 if found.nothing else 1


if __name__ == "__main__":
    sys.exit(main())
