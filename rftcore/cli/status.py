"""`rft status`: what each process does or waits for."""

from __future__ import annotations

import socket
import time
from typing import Annotated

import typer

from rftcore.cli.session import BufferOption, JsonOption, opened


def status(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Name or id; the run at work by default, else the newest.")
    ] = None,
    buffer: BufferOption = None,
    as_json: JsonOption = False,
    everyone: Annotated[bool, typer.Option("--all", help="Show processes that have left, too.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Go on until the run ends or Ctrl-C.")] = False,
    stacks: Annotated[
        bool, typer.Option("--stacks", help="Show the stacks of the processes on this machine, too.")
    ] = False,
) -> None:
    """Show where a run stands, and what each of its processes does or waits for."""
    if watch and (as_json or everyone or stacks):
        raise typer.BadParameter("--watch draws for a person; leave it out to use --json, --all or --stacks")
    from rich.console import Console

    from rftcore.cli.output import print_json
    from rftcore.launch.progress import Progress, block, open_view, worker_table
    from rftcore.launch.reviews import waits_for_people
    from rftcore.run.commands import buffer_option, what_decides
    from rftcore.run.stacks import read_stacks

    with opened(buffer, "rft status") as found:
        at_work = found.database.fetch("runs_at_work")
        row = found.find_run(run) if run is not None or not at_work else at_work[0]
        option = buffer_option(found.location)
        progress = Progress(found, row["run_id"])
        snapshot = progress.snapshot()
        if watch:
            with open_view() as view:
                view.update(snapshot)
                while snapshot["status"] in ("created", "running"):
                    time.sleep(1.0)  # drawing for a person; nobody waits for it
                    snapshot = progress.snapshot()
                    view.update(snapshot)
            return
        here = [w for w in snapshot["workers"] if w["host"] == socket.gethostname() and w["liveness"] != "stopped"]
        pids = {worker["pid"]: worker for worker in here} if stacks else {}
        for pid, text in read_stacks(found.run_folder(row), pids).items():
            pids[pid]["stacks"] = text
    if as_json:
        print_json(snapshot)
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    console.print(
        f"{snapshot['run']}: {snapshot['status']}" + (f": {snapshot['outcome']}" if snapshot["outcome"] else ""),
        markup=False,
    )
    console.print(block({**snapshot, "workers": []} if everyone else snapshot, console.width))
    if snapshot["status"] == "running" and not any(
        worker["liveness"] == "alive" and worker["role"] != "replay" for worker in snapshot["workers"]
    ):
        console.print(f"nobody works for it now; go on with `rft run --resume {snapshot['run']}{option}`", markup=False)
    if sentence := what_decides(row, snapshot["queue"]["sealed"], option):
        console.print(sentence, markup=False)
    for other in at_work if run is None else []:
        if other["run_id"] != row["run_id"]:
            console.print(f"also at work: {other['name']}: rft status {other['name']}{option}", markup=False)
    if snapshot["open_reviews"]:
        console.print(waits_for_people(snapshot["open_reviews"], snapshot["run"], option), markup=False)
    if everyone:
        console.print(worker_table(snapshot["workers"], everyone=True))
    for worker in pids.values():
        console.print(f"\n{worker['role']} {worker['pid']}\n{worker.get('stacks', 'does not answer')}", markup=False)
