"""`rft tasks load|list|stats`: what there is to try, and what a run knows of it."""

from __future__ import annotations

from typing import Annotated

import typer

from rftcore.cli.roles import ConfigArgument
from rftcore.cli.run import SetOption, configuration
from rftcore.cli.session import BufferOption, ConfigBufferOption, JsonOption, RunArgument, opened

app = typer.Typer(help="Tasks in the buffer.", no_args_is_help=True)


@app.command("load")
def load(config: ConfigArgument, overrides: SetOption = None, buffer: ConfigBufferOption = None) -> None:
    """Load every taskset of a configuration; loading again finds the same rows."""
    import rftdata
    from rftdata.tasks import load_taskset

    resolved = configuration(config, overrides, buffer)
    with rftdata.open(resolved.buffer, application="rft tasks") as found:
        for taskset in (*resolved.tasks, *resolved.eval.tasks, *resolved.eval.test):
            num_tasks = load_taskset(found.database, taskset, resolved.base_dir)
            print(f"{taskset.name}: {num_tasks} tasks")


@app.command("list")
def list_tasksets(buffer: BufferOption = None, as_json: JsonOption = False) -> None:
    """List the tasksets of the buffer."""
    from rftcore.cli.output import print_rows
    from rftdata import tasks

    with opened(buffer, "rft tasks") as found:
        rows = tasks.list_tasksets(found.database)
    print_rows(rows, ("taskset", "source", "args", "num_tasks", "loaded_at"), as_json=as_json)


@app.command("stats")
def stats(
    run: RunArgument = None,
    taskset: Annotated[str | None, typer.Option("--taskset", help="Of one taskset only.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Tasks shown, those chosen last first.")] = 20,
    check: Annotated[
        bool, typer.Option("--check", help="Compare with the outcomes they are folded from; exits 1 if they differ.")
    ] = False,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Fold the outcomes again.")] = False,
    buffer: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a run knows of its tasks: posterior, attempts, mean reward."""
    from rftcore.cli.output import print_rows, warn
    from rftdata import task_stats

    if check and rebuild:
        raise typer.BadParameter("--check compares and --rebuild writes; give one of them")
    with opened(buffer, "rft tasks") as found:
        run_id = found.find_run(run)["run_id"]
        if rebuild:
            print(f"{task_stats.rebuild_task_stats(found.database, run_id)} tasks folded again")
            return
        if check:
            rows = task_stats.check_task_stats(found.database, run_id)
            print_rows(rows, task_stats.DIFFERENCE_COLUMNS, as_json=as_json)
            warn(
                "they differ; `rft tasks stats --rebuild` folds again"
                if rows
                else "every task is the fold of its outcomes"
            )
            raise typer.Exit(int(bool(rows)))
        rows = task_stats.task_stats(found.database, run_id, taskset=taskset, limit=limit)
        print_rows(rows, task_stats.STAT_COLUMNS, as_json=as_json)
