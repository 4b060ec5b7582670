"""`rft status`: shows what each process does or waits for."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from rftcore.cli.session import BufferOption, JsonOption, opened

if TYPE_CHECKING:
    from rftdata.reports.progress import Progress, Snapshot
    from rftdata.run import Run


def status(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Name or id; the running one by default, else the newest.")
    ] = None,
    uri: BufferOption = None,
    as_json: JsonOption = False,
    show_left: Annotated[bool, typer.Option("--all", help="Also show processes that have left.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Update until the run ends or Ctrl-C.")] = False,
    stacks: Annotated[
        bool, typer.Option("--stacks", help="Also show the stacks of the processes on this machine.")
    ] = False,
) -> None:
    """Show the state of a run, and what each of its processes does or waits for."""
    if watch and (as_json or show_left or stacks):
        raise typer.BadParameter("--watch cannot be combined with --json, --all or --stacks; omit one of them")
    from rftcore.cli.output import print_json
    from rftcore.reporting.waiting_roles import what_waits
    from rftcore.run.stacks import read_stacks
    from rftdata.processes import is_here
    from rftdata.reports.progress import Progress
    from rftdata.workers.live_workers import live_workers

    with opened(uri, "rft status") as buffer:
        at_work = buffer.runs(at_work=True)
        shown = buffer.find_run(run) if run is not None or not at_work else at_work[0]
        progress = Progress(shown)
        if watch:
            _watch(progress)
            return
        snapshot = progress.snapshot()
        here = {w.worker_id for w in live_workers(shown) if is_here(w.host, w.pid_space)} if stacks else set()
        asked = [worker for worker in snapshot.workers if worker.worker_id in here]
        texts = read_stacks(shown.folder, [worker.pid for worker in asked])
        waits = what_waits(snapshot, shown.config)
        location = buffer.location
    if as_json:
        plain = {**asdict(snapshot), "waits": waits}
        for worker in plain["workers"] if stacks else []:
            if worker["worker_id"] in {one.worker_id for one in asked} and worker["pid"] in texts:
                worker["stacks"] = texts[worker["pid"]]
        print_json(plain)
        return
    others = [other.name for other in at_work if run is None and other.run_id != shown.run_id]
    _show(snapshot, shown, others, location, waits, show_left=show_left)
    for worker in asked:
        print(f"\n{worker.role} {worker.pid}\n{texts.get(worker.pid, 'does not answer')}")


def _watch(progress: Progress) -> None:
    """Show the progress until the run has ended."""
    from rftcore.launch.terminal.views import open_view

    with open_view() as view:
        while True:
            snapshot = progress.snapshot()
            view.update(snapshot)
            if snapshot.status not in ("created", "running"):
                return
            time.sleep(1.0)  # refresh interval of the display


def _show(
    snapshot: Snapshot, run: Run, others: list[str], location: str, waits: str | None, *, show_left: bool
) -> None:
    """Print the state of the run.

    Args:
        others: further runs at work.
        waits: what waits for what.
    """
    from rftcore.launch.terminal.open_reviews import waits_for_people
    from rftcore.launch.terminal.views import block, worker_table
    from rftcore.reporting.console import OutputConsole
    from rftcore.run.commands import buffer_option, what_decides

    option, name = buffer_option(location), snapshot.run
    console = OutputConsole(pipe_width=160)
    outcome = f": {snapshot.outcome}" if snapshot.outcome else ""
    console.print(f"{name}: {snapshot.status}{outcome}", markup=False)
    if snapshot.archived:
        console.print(f"archived: `rft restore-run {name}{option}` brings its texts and arrays back", markup=False)
    console.print(block(replace(snapshot, workers=[]) if show_left else snapshot, console.width))
    if waits is not None:
        console.print(waits, markup=False)
    works = any(worker.liveness == "alive" and worker.role != "replay" for worker in snapshot.workers)
    if snapshot.status == "running" and not works:
        console.print(
            f"no process is working for it now; continue with `rft run --resume {name}{option}`", markup=False
        )
    if sentence := what_decides(run, snapshot.queue.sealed, option):
        console.print(sentence, markup=False)
    for other in others:
        console.print(f"also at work: {other}: rft status {other}{option}", markup=False)
    if snapshot.open_reviews:
        console.print(waits_for_people(snapshot.open_reviews, name, option), markup=False)
    if show_left:
        console.print(worker_table(snapshot.workers, show_left=True))
