"""Continuous kills: real explorers, a pipeline worker, a trainer, a labeller and the database, of which one is killed again and again.

    python -m tests.crash.storm --kills 1000 --seed 7

What is killed when follows from the seed. The processes' own timing does not, so a seed repeats a schedule, not every instruction.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.crash.crew import ROLES, Crew, RoleBrokeError
from tests.crash.examine import Findings, examine
from tests.support.models import make_tiny_model

# What happens, and how often: the database and the slow trainer cost more time than the others.
_EVENTS = {
    "explorer-0": 20,
    "explorer-1": 20,
    "pipeline": 20,
    "trainer": 24,
    "labeller": 6,
    "database": 5,
    "slow trainer": 5,
}
_STALL_S = 60.0


@dataclass
class Report:
    """How a storm went."""

    kills: int
    seed: int
    seconds: float = 0.0
    events: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    findings: Findings = field(default_factory=Findings)

    @property
    def resume_p99_s(self) -> float:
        """From the beginning of a role to the buffer's first answer to its request for work."""
        return self.quantile_s(0.99)

    def quantile_s(self, share: float) -> float:
        """Of the seconds that lives took to their first claim."""
        times = [life["seconds"] for life in reversed(self.findings.lives)]
        return times[min(len(times) - 1, int(share * len(times)))] if times else float("nan")

    @property
    def slowest(self) -> list[str]:
        """The ten slowest lives, and what took a twentieth of their time or more."""
        return [
            f"{life['seconds']:6.2f} s (processor {life['processor_s']:.2f} s) {life['by']}: "
            + "; ".join(
                f"{phase}: {wait} {part:.2f}" for phase, wait, part in life["parts"] if part >= life["seconds"] / 20
            )
            for life in self.findings.lives[:10]
        ]

    @property
    def line(self) -> str:
        found = self.findings
        return (
            f"{self.kills} kills: {len(found.lost)} lost, {len(found.trained_twice)} trained twice, "
            f"{len(found.mislabelled)} mislabelled, resume p99 {self.resume_p99_s:.1f} s"
        )


def storm(folder: Path, kills: int, seed: int, progress: Callable[[str], None] = lambda line: None) -> Report:
    """Run the roles in `folder`, kill `kills` times, let them recover, and examine what is left.

    Raises:
        RoleBrokeError: a role ended as no crash explains, or no step was trained for a minute.
    """
    report, rng, started = Report(kills, seed), random.Random(seed), time.monotonic()
    crew = Crew(folder, make_model(folder))
    try:
        for role in ROLES:
            crew.start(role)
        watch = Watch(crew)
        watch.wait_for_steps(2)
        for number in range(1, kills + 1):
            time.sleep(rng.choice((0.02, 0.1, 0.3, 0.6)) * rng.random() * 2)
            event = rng.choices(list(_EVENTS), list(_EVENTS.values()))[0]
            _strike(crew, event, report)
            report.ended.update(f"{role}: {why}" for role, why in crew.restart_ended())
            watch.look()
            if number % 50 == 0 or number == kills:
                steps = crew.number("SELECT count(*) FROM rft.train_step")
                progress(
                    f"{number} kills in {time.monotonic() - started:.0f} s, {steps} steps done, {watch.kept} of them kept"
                )
        watch.wait_for_steps(4)
        crew.stop()
        report.seconds = time.monotonic() - started
    except BaseException:
        crew.close()
        raise
    # Everything has ended: from here on this process may connect and compute.
    report.findings = examine(folder)
    crew.close()
    return report


def make_model(folder: Path) -> Path:
    """A model that costs next to nothing, made in a process of its own: the one that forks must have computed nothing."""
    pid = os.fork()
    if pid == 0:
        make_tiny_model(folder / "tiny", hidden_size=32, num_layers=1)
        os._exit(0)
    os.waitpid(pid, 0)
    return folder / "tiny"


def _strike(crew: Crew, event: str, report: Report) -> None:
    report.events[event] += 1
    if event == "database":
        crew.kill_database()
    elif event == "slow trainer":
        if "trainer" in crew.lives:
            report.ended[f"slow trainer: {crew.replace_a_slow_trainer()}"] += 1
    else:
        crew.kill(event)
        crew.start(event)


class Watch:
    """Keeps the run running."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._seen = 0
        self._at = time.monotonic()
        self.kept = 0

    def look(self) -> None:
        """Note progress.

        Raises:
            RoleBrokeError: there was none for a minute.
        """
        # Draws and not steps of the history: with a kill every moment the same steps may be done again and again.
        done = self._crew.number("SELECT coalesce(max(draw_id), 0) FROM rft.draw")
        if done > self._seen:
            self._seen, self._at = done, time.monotonic()
            self.kept = self._crew.number("SELECT coalesce(max(trainer_step), 0) FROM rft.checkpoint")
        elif time.monotonic() - self._at > _STALL_S:
            logs = "\n".join(f"== {role}\n{self._crew.log(role)[-1500:]}" for role in ROLES)
            raise RoleBrokeError(f"nothing was drawn for {_STALL_S:.0f} s\n{logs}")

    def wait_for_steps(self, count: int) -> None:
        """Until that many more steps are recorded."""
        query = "SELECT count(*) FROM rft.train_step"
        wanted = self._crew.number(query) + count
        while self._crew.number(query) < wanted:
            self._crew.restart_ended()
            self.look()
            time.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(2), "big"))
    parser.add_argument("--folder", type=Path, help="an empty folder that is kept; by default a temporary one")
    options = parser.parse_args()
    print(f"seed {options.seed} (SEED={options.seed} repeats the schedule)", flush=True)
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rft-crash-")))
        report = storm(folder, options.kills, options.seed, lambda line: print(line, flush=True))
    found = report.findings
    for name in ("lost", "trained_twice", "mislabelled"):
        for what in getattr(found, name)[:20]:
            print(f"{name}: {what}")
    summary = {
        "seconds": round(report.seconds),
        "events": report.events,
        "roles that ended by themselves": report.ended,
        "slowest lives": found.lives[:10],
    }
    print(json.dumps(summary))
    print("the slowest first claims, and what they waited for:", *report.slowest, sep="\n")
    print(
        f"{found.experiences} experiences, {found.steps} steps in {found.attempts} attempts, {found.labels} labels, "
        f"{found.transfers} times weights into an engine; "
        f"{len(found.lives)} lives, first claim p50 {report.quantile_s(0.5):.2f} s"
    )
    print(report.line)
    return 0 if found.nothing else 1


if __name__ == "__main__":
    sys.exit(main())
