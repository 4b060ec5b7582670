"""The display of a run's progress.

`LiveView` redraws one block on a terminal. `LineView`, for a file or a pipe, prints a line per step, and at least one every `quiet_s`
seconds. Views draw snapshots (`rftdata.reports.progress`) and do not read the buffer.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from rich.console import Console, Group, JustifyMethod
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rftcore.reporting.console import OutputConsole
from rftcore.reporting.progress_text import (
    describe_drops,
    describe_equal_rewards,
    describe_failures,
    doing,
    worker_progress,
    workers_to_show,
)
from rftcore.reporting.report import evaluation_title
from rftcore.reporting.visible_text import visible
from rftdata.reports.progress import Snapshot, WorkerState

_BARS = "▁▂▃▄▅▆▇█"
_SHOWN_METRICS = (
    "loss",
    "grad_norm",
    "kl_reference",
    "clip_fraction",
    "entropy",
    "value_loss",
    "explained_variance",
    "pair_accuracy",
)
# Shares of the newest rows that a stage drops.
_WORTH_A_LINE = 0.1
_WORTH_A_MESSAGE = 0.5
_ENOUGH_ROWS = 16
_EQUAL = "equal rewards"


V = TypeVar("V", bound="View")
T = TypeVar("T")


def outlives_its_reader(show: Callable[[V, T], None]) -> Callable[[V, T], None]:
    """Keep the run going when the terminal or the reader of the pipe is closed; nothing more is shown."""

    @functools.wraps(show)
    def guarded(view: V, what: T) -> None:
        try:
            show(view, what)
        except OSError:
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    return guarded


class View(ABC):
    """Shows the progress of a run. A context manager."""

    @abstractmethod
    def message(self, text: str) -> None:
        """Show a message once (a set-up step, a warning)."""

    @abstractmethod
    def update(self, snapshot: Snapshot) -> None:
        """Show the current state of the run."""

    def close(self) -> None:  # noqa: B027 - nothing to close is the common case
        """Restore the screen."""

    def __enter__(self) -> View:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_view(*, plain: bool = False) -> View:
    """Open a live block on a terminal, and lines elsewhere or with `plain`."""
    console = OutputConsole()
    return LiveView(console) if console.is_terminal and not plain else LineView()


class LiveView(View):
    """One block, redrawn in place; messages scroll above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._started = False

    @outlives_its_reader
    def message(self, text: str) -> None:
        self._console.print(text, markup=False)

    @outlives_its_reader
    def update(self, snapshot: Snapshot) -> None:
        if not self._started:
            self._live.start()
            self._started = True
        self._live.update(block(snapshot, self._console.width), refresh=True)

    def close(self) -> None:
        if self._started:
            self._live.stop()
            self._started = False


class LineView(View):
    """Prints a line when a step or evaluation finishes, when the run's status changes, and after a quiet time; and one for each stage that drops much
    and for rewards that are all equal.

    Args:
        quiet_s: longest time between two lines, in seconds.
    """

    def __init__(self, quiet_s: float = 15.0) -> None:
        self._quiet_s = quiet_s
        self._last: tuple[Any, ...] | None = None
        self._at = 0.0
        self._reported: set[str] = set()

    @outlives_its_reader
    def message(self, text: str) -> None:
        print(visible(text), flush=True)

    @outlives_its_reader
    def update(self, snapshot: Snapshot) -> None:
        state = (
            snapshot.status,
            snapshot.step,
            [(e.taskset, e.decoding, e.trainer_step) for e in snapshot.evaluations],
        )
        now = time.monotonic()
        if state == self._last and now - self._at < self._quiet_s:
            return
        self._last, self._at = state, now
        if snapshot.equal_rewards is not None and _EQUAL not in self._reported:
            self._reported |= {_EQUAL, "drop_zero_variance_groups"}
            sys.stdout.write(visible(describe_equal_rewards(snapshot.equal_rewards)) + "\n")
        for dropped in snapshot.dropped:
            enough = dropped.num_decided >= _ENOUGH_ROWS and dropped.share >= _WORTH_A_MESSAGE
            if enough and dropped.stage not in self._reported:
                self._reported.add(dropped.stage)
                sys.stdout.write(visible(describe_drops(dropped)) + "\n")
        sys.stdout.write(visible(line(snapshot)) + "\n")
        sys.stdout.flush()


def line(snapshot: Snapshot) -> str:
    """Format a snapshot as one line."""
    seconds = snapshot.remaining_seconds or 0.0
    left = f" (about {_clock(seconds)} left)" if seconds >= 1 else ""
    parts = [f"step {snapshot.step}/{snapshot.planned_steps}{left}", *_measures(snapshot)]
    workers = workers_to_show(snapshot.workers)
    if _only_evaluates(snapshot):
        parts = [f"{snapshot.evaluations_open} evaluations to do", *_evaluations(snapshot)]
        workers = [w for w in workers if w.role != "trainer" or w.error]
    waits = [f"{w.role} {doing(w)}{_answered(w)}" for w in workers if w.role != "supervisor"]
    return "  ".join(parts) + ("  | " + "; ".join(waits) if waits else "")


def _only_evaluates(snapshot: Snapshot) -> bool:
    """Return whether a run trains nothing. The process in its trainer's place waits for the explorers."""
    return snapshot.mode == "eval"


def _answered(worker: WorkerState) -> str:
    answered = worker.progress.get("answered")
    return "" if answered is None else f": {answered}"


def block(snapshot: Snapshot, width: int) -> Group:
    """Format a snapshot as a block for a terminal of `width` columns."""
    head = Table.grid(padding=(0, 2))
    head.add_row(
        Text(snapshot.run, style="bold"),
        "evaluates" if _only_evaluates(snapshot) else f"step {snapshot.step} of {snapshot.planned_steps}",
        ProgressBar(total=max(snapshot.planned_steps, 1), completed=snapshot.step, width=max(10, min(40, width - 60))),
        _clock(snapshot.seconds)
        + (f" (about {_clock(snapshot.remaining_seconds)} left)" if snapshot.remaining_seconds else ""),
    )
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    if snapshot.rewards:
        means = f"mean {snapshot.mean_reward:.3f}, pass rate {_rate(snapshot.pass_rate)}"
        facts.add_row("reward", f"{_spark(snapshot.rewards, 24)}  {means} at explorer step {snapshot.reward_step}")
    facts.add_row(
        "sampling", ", ".join(part for part in (_speed(snapshot), _policy(snapshot)) if part) or "no explorer yet"
    )
    if not _only_evaluates(snapshot):
        facts.add_row("groups", _groups(snapshot))
    if snapshot.equal_rewards is not None:
        facts.add_row("rewards", Text(describe_equal_rewards(snapshot.equal_rewards), style="red"))
    for dropped in snapshot.dropped:
        if dropped.share >= _WORTH_A_LINE:
            facts.add_row("dropped", Text(describe_drops(dropped)))
    if snapshot.failures:
        facts.add_row("failures", Text(describe_failures(snapshot.failures), style="red"))
    metrics = _metrics(snapshot.metrics)
    if metrics:
        facts.add_row("training", Text(metrics))
    for e in snapshot.evaluations:
        facts.add_row(
            e.purpose,
            Text(
                f"{e.taskset}, {e.decoding}: {e.mean_reward:.3f} at step {e.trainer_step} ({e.num_tasks} questions)"
                + (f"; {e.error}" if e.error else "")
            ),
        )
    if snapshot.evaluations_open:
        facts.add_row("evaluation", f"{snapshot.evaluations_open} to do")
    return Group(head, facts, worker_table(snapshot.workers))


def _groups(snapshot: Snapshot) -> str:
    queue = snapshot.queue
    # In a run that has ended nothing is planned, sampled or decided; `rft status` prints the command that decides the rest.
    verdicts = "await verdicts" if snapshot.status in ("created", "running") else "undecided"
    return (
        f"{queue.planned} planned, {queue.claimed} being sampled, {queue.sealed} {verdicts}, {queue.ready} ready to train on; "
        f"{snapshot.closed_groups} given up, {snapshot.refills} sampled in their place"
    )


def worker_table(workers: list[WorkerState], *, show_left: bool = False) -> Table:
    """Build the table of what each process does or waits for; `show_left` includes those that left without an error."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    columns: dict[str, JustifyMethod] = {
        "process": "left",
        "pid": "right",
        "doing": "left",
        "heartbeat": "right",
        "progress": "left",
    }
    for name, justify in columns.items():
        table.add_column(name, justify=justify, no_wrap=name in ("pid", "process"), overflow="fold")
    for worker in workers if show_left else workers_to_show(workers):
        style = {"lost": "red", "gone": "red", "stopped": "dim"}.get(worker.liveness, "")
        age = "–" if worker.liveness == "stopped" else f"{max(0.0, worker.heartbeat_age_s):.0f} s ago"
        table.add_row(
            worker.role,
            str(worker.pid),
            Text(doing(worker)),
            age,
            worker_progress(worker.progress),
            style=style,
        )
    return table


def _measures(snapshot: Snapshot) -> list[str]:
    parts = []
    if snapshot.mean_reward is not None:
        parts.append(f"reward {snapshot.mean_reward:.3f} (pass {_rate(snapshot.pass_rate)})")
    if "loss" in snapshot.metrics:
        parts.append(f"loss {snapshot.metrics['loss']:.4g}")
    parts += [part for part in (_speed(snapshot), _policy(snapshot)) if part]
    queue = snapshot.queue
    numbers = {
        "planned": queue.planned,
        "being sampled": queue.claimed,
        "await verdicts": queue.sealed,
        "ready": queue.ready,
    }
    counts = [f"{number} {what}" for what, number in numbers.items() if number]
    given_up = f", {snapshot.closed_groups} given up" if snapshot.closed_groups else ""
    parts.append(f"groups: {', '.join(counts) or 'none open'}{given_up}")
    parts += filter(None, [describe_failures(snapshot.failures)])
    return parts + _evaluations(snapshot)


def _evaluations(snapshot: Snapshot) -> list[str]:
    return [
        f"{evaluation_title(e.purpose, e.taskset)} {e.decoding} {e.mean_reward:.3f} @{e.trainer_step}"
        + (f" ({' '.join(e.error.split())[:160]})" if e.error else "")
        for e in snapshot.evaluations
    ]


def _speed(snapshot: Snapshot) -> str:
    return "" if snapshot.tokens_per_s is None else f"{snapshot.tokens_per_s:,.0f} tokens/s"


def _policy(snapshot: Snapshot) -> str:
    step, published = snapshot.policy_step, snapshot.published_step
    if step is None:
        return "" if published is None else f"policy of step {published} published"
    return f"policy of step {step}" + (
        f" (step {published} published)" if published is not None and published != step else ""
    )


def _metrics(metrics: dict[str, Any]) -> str:
    shown = [name for name in _SHOWN_METRICS if isinstance(metrics.get(name), int | float)]
    return ", ".join(f"{name.replace('_', ' ')} {metrics[name]:.3g}" for name in shown)


def _rate(value: Any) -> str:
    return "–" if value is None else f"{value:.0%}"


def _spark(values: list[float], width: int) -> str:
    """Draw a curve in `width` characters: means of equal stretches, scaled between the smallest and the largest."""
    count = min(width, len(values))
    stretches = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means = [sum(part) / len(part) for part in stretches]
    low, high = min(means), max(means)
    return "".join(_BARS[round((mean - low) / (high - low) * (len(_BARS) - 1)) if high > low else 0] for mean in means)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
