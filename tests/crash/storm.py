"""Continuous failures: real explorers, a pipeline worker, a trainer, a labeller and the database, of which one is killed, or cut off from the
network, again and again.

    python -m tests.crash.storm --kills 1000 --seed 7

Every role has a network namespace of its own, as machines have networks. Where these are not permitted, the storm reports that and goes on without cuts.
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

from tests.crash.crew import MACHINES, ROLES, Crew, RoleBrokeError
from tests.crash.cuts import SECONDS, Cut
from tests.crash.examine import Findings, examine
from tests.support.models import make_tiny_model
from tests.support.network import Network, unavailable
from tests.support.session_processes import begin_program
from tests.support.waiting import PATIENCE_S

# What happens, and how often: the database and the slow trainer cost more time than the others.
_EVENTS = {
    "explorer-0": 20,
    "explorer-1": 20,
    "pipeline": 20,
    "trainer": 24,
    "labeller": 6,
    "database": 5,
    "slow trainer": 5,
    "rank": 1,
    # Processes of explorers: environments with their hosts; tools and rewards.
    "environment": 12,
    "function": 12,
}
# Only where there are network namespaces.
_CUTS = {
    "cut explorer-0": 4,
    "cut explorer-1": 4,
    "cut pipeline": 3,
    "cut trainer": 4,
    "keep apart": 4,
    "lost trainer": 1,
}
_SHARES = (4, 3, 2, 2, 1)  # of `SECONDS`
_EXPLORERS = 2
_MODULES = {"environment": "rftcore.environments.host", "function": "rftcore.user_functions.function_process"}
# Longest time in which roles may be killed, one after the other, before one gets to its work: on a slow machine they would never get to it.
_PAUSE_S = 10.0


@dataclass
class Report:
    """How a storm went."""

    kills: int
    seed: int
    seconds: float = 0.0
    events: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    findings: Findings = field(default_factory=Findings)
    cuts: list[Cut] = field(default_factory=list)

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
            f"{len(found.mislabelled)} mislabelled, {len(found.old_weights)} on old weights, resume p99 {self.resume_p99_s:.1f} s"
        )


def storm(
    folder: Path, kills: int, seed: int, network: Network | None, progress: Callable[[str], None] = lambda line: None
) -> Report:
    """Run the roles in `folder`, let something fail `kills` times, let them recover, and examine what is left.

    Args:
        network: with the machines of the roles; None for no cuts.

    Raises:
        RoleBrokeError: a role ended as no crash explains, or nothing was drawn for `PATIENCE_S`.
    """
    report, rng, started = Report(kills, seed), random.Random(seed), time.monotonic()
    events = _EVENTS if network is None else _EVENTS | _CUTS
    crew = Crew(folder, make_model(folder), network)
    try:
        for role in ROLES:
            crew.start(role)
        watch = Watch(crew)
        watch.wait_for_steps(2)
        for number in range(1, kills + 1):
            time.sleep(rng.choice((0.02, 0.1, 0.3, 0.6)) * rng.random() * 2)
            if watch.stalled_s > _PAUSE_S:
                watch.wait_for_draw()
            event = rng.choices(list(events), list(events.values()))[0]
            _strike(crew, event, report, rng)
            report.ended.update(f"{role}: {why}" for role, why in crew.tend())
            watch.look()
            if number % 50 == 0 or number == kills:
                steps = crew.number("SELECT count(*) FROM rft.train_step")
                progress(
                    f"{number} kills in {time.monotonic() - started:.0f} s, {steps} steps done, {watch.kept} of them kept"
                )
        crew.cuts.restore_due(all_of_them=True)
        watch.wait_for_steps(4)
        left = watch.engines_on_old_weights()
        crew.stop()
        report.seconds = time.monotonic() - started
    except BaseException:
        crew.close()
        raise
    # Everything has ended: from here on this process may connect and compute.
    found = report.findings = examine(folder)
    found.old_weights += left
    # What a process waits for while its machine is cut off is the cut.
    report.cuts = crew.cuts.past
    found.lives = [
        life for life in found.lives if not crew.cuts.touched(life["host"], life["at"] - life["seconds"], life["at"])
    ]
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


def _strike(crew: Crew, event: str, report: Report, rng: random.Random) -> None:
    report.events[event] += 1
    seconds = rng.choices(SECONDS, _SHARES)[0]
    if event.startswith("cut "):
        crew.cuts.cut(crew.machine_of(event.removeprefix("cut ")), seconds)
    elif event == "keep apart":
        crew.cuts.keep_apart(seconds)
    elif event == "lost trainer":
        if "trainer" in crew.lives:
            report.ended[f"lost trainer: {crew.replace_a_lost_trainer()}"] += 1
    elif event == "rank":
        report.ended[f"trainer of two ranks: {crew.kill_a_rank()}"] += 1
    elif event == "database":
        crew.kill_database()
    elif event in _MODULES:
        is_killed = crew.kill_beneath(_MODULES[event], rng)
        report.ended[f"{event}: {'killed' if is_killed else 'none'}"] += 1
    elif event == "slow trainer":
        if "trainer" in crew.lives:
            report.ended[f"slow trainer: {crew.replace_a_slow_trainer()}"] += 1
    else:
        if event in crew.lives:
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
            RoleBrokeError: there was none for `PATIENCE_S`.
        """
        # Draws and not steps of the history: with a kill every moment the same steps may be done again and again.
        done = self._crew.number("SELECT coalesce(max(draw_id), 0) FROM rft.draw")
        if done > self._seen:
            self._seen, self._at = done, time.monotonic()
            self.kept = self._crew.number("SELECT coalesce(max(trainer_step), 0) FROM rft.checkpoint")
        elif self.stalled_s > PATIENCE_S:
            logs = "\n".join(f"== {role}\n{self._crew.log(role)[-1500:]}" for role in ROLES)
            raise RoleBrokeError(f"nothing was drawn for {PATIENCE_S:.0f} s\n{logs}")

    @property
    def stalled_s(self) -> float:
        """Seconds since the last progress."""
        return time.monotonic() - self._at

    def wait_for_draw(self) -> None:
        """Until there is progress; what was cut off is reached again in time."""
        seen = self._seen
        while self._seen == seen:
            self._crew.tend()
            self.look()
            time.sleep(0.05)

    def wait_for_steps(self, count: int) -> None:
        """Until that many more steps are recorded."""
        query = "SELECT count(*) FROM rft.train_step"
        wanted = self._crew.number(query) + count
        while self._crew.number(query) < wanted:
            self._crew.tend()
            self.look()
            time.sleep(0.05)

    def engines_on_old_weights(self) -> list[str]:
        """Wait until every explorer has taken a version that is published from now on; return those that do not within `PATIENCE_S`."""
        newest = (
            self._crew.number(
                "SELECT max(trainer_step) FROM rft.policy_version v JOIN rft.run r ON r.current_attempt_id = v.attempt_id"
            )
            + 1
        )
        live = "FROM rft.worker WHERE role = 'explorer' AND stopped_at IS NULL AND heartbeat_at > rft.clock() - interval '15 s'"
        current = f"SELECT count(*) {live} AND (progress->>'policy_step')::integer >= {newest}"
        deadline = time.monotonic() + PATIENCE_S
        while (found := self._crew.number(current)) < _EXPLORERS and time.monotonic() < deadline:
            self._crew.tend()
            time.sleep(0.1)
        if found >= _EXPLORERS:
            return []
        return [f"{_EXPLORERS - found} of {_EXPLORERS} engines do not get to the weights of step {newest}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(2), "big"))
    parser.add_argument("--folder", type=Path, help="an empty folder that is kept; by default a temporary one")
    options = parser.parse_args()
    prefix = begin_program()
    print(f"seed {options.seed} (SEED={options.seed} repeats the schedule)", flush=True)
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True))
        )
        without = unavailable()
        if without:
            print(f"NO NETWORK CUTS: {without}", flush=True)
        network = None if without else stack.enter_context(Network(*MACHINES))
        report = storm(folder, options.kills, options.seed, network, lambda line: print(line, flush=True))
    found = report.findings
    for name in ("lost", "trained_twice", "mislabelled", "old_weights"):
        for what in getattr(found, name)[:20]:
            print(f"{name}: {what}")
    summary = {
        "seconds": round(report.seconds),
        "events": report.events,
        "cuts": {"number": len(report.cuts), "seconds": round(sum(cut.until - cut.since for cut in report.cuts))},
        "roles that ended by themselves": report.ended,
        "slowest lives": found.lives[:10],
    }
    print(json.dumps(summary))
    print("the slowest first claims, and what they waited for:", *report.slowest, sep="\n")
    print(
        f"{found.experiences} experiences, {found.of_several_turns} of them of several turns, {found.steps} steps in {found.attempts} attempts, "
        f"{found.labels} labels, {found.annotations} annotations, "
        f"{found.transfers} times weights into an engine, "
        f"{found.continued_tokens} tokens of unfinished answers continued; "
        f"{len(found.lives)} lives, first claim p50 {report.quantile_s(0.5):.2f} s"
    )
    print(report.line)
    return 0 if found.nothing else 1


if __name__ == "__main__":
    sys.exit(main())
