"""`rft tasks load|score|list|show|stats`: the tasks of the buffer, and a run's statistics of them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rftcore.cli.configuration import SetOption, configuration
from rftcore.cli.roles import ConfigArgument
from rftcore.cli.session import BufferOption, ConfigBufferOption, JsonOption, RunArgument, opened

_MAX_CELL = 40

app = typer.Typer(help="Tasks in the buffer.", no_args_is_help=True)


@app.command("load")
def load(config: ConfigArgument, overrides: SetOption = None, uri: ConfigBufferOption = None) -> None:
    """Load every taskset of a configuration and run its task pipeline; loading again finds the same tasks."""
    _load(config, overrides, uri, again=False)


@app.command("score")
def score(config: ConfigArgument, overrides: SetOption = None, uri: ConfigBufferOption = None) -> None:
    """Run the task pipeline on all tasks again, with the current outcomes of runs."""
    _load(config, overrides, uri, again=True)


def _load(config: ConfigArgument, overrides: list[str] | None, uri: str | None, *, again: bool) -> None:
    import rftdata
    from rftcore.cli.output import warn
    from rftdata.connection import exists
    from rftdata.errors import ConfigError

    settings = configuration(config, overrides, uri)
    if again and not settings.pipelines.task:
        raise ConfigError("there is nothing to score tasks with: pipelines.task has no stage", todo="add stages to it")
    from rftcore.checks.plugins import check_task_plugins
    from rftcore.checks.tasks import check_new_buffer
    from rftcore.findings import Findings
    from rftcore.resolved import ResolvedRun
    from rftcore.task_pipeline.pipeline import load_tasks
    from rftcore.task_pipeline.sources import check_tasks
    from rftdata.tasks import list_tasksets
    from rftdata.user_code import held_lock

    names = {taskset.name for taskset in (*settings.tasks, *settings.eval.tasks, *settings.eval.test)}
    with held_lock.printed():
        resolved, findings = ResolvedRun(settings), Findings()
        check_task_plugins(resolved, findings)
        check_new_buffer(resolved, findings)
        if not exists(settings.buffer):
            findings.refuse()
        with rftdata.open(settings.buffer, application="rft tasks", report=warn) as buffer:
            if findings.errors:
                findings.passes(check_tasks, resolved, buffer)
                findings.refuse()
            load_tasks(resolved, buffer, again=again)
            rows = list_tasksets(buffer.database)
    for row in rows:
        if row["taskset"] in names:
            excluded = f", {row['excluded']} of them excluded" if row["excluded"] else ""
            print(f"{row['taskset']}: {row['num_tasks']} tasks{excluded}")


@app.command("list")
def list_tasksets(uri: BufferOption = None, as_json: JsonOption = False) -> None:
    """List the tasksets of the buffer, with the number of selectable tasks and the means of their scores."""
    from rftcore.cli.output import cut, print_rows
    from rftdata import tasks

    with opened(uri, "rft tasks") as buffer:
        rows = tasks.list_tasksets(buffer.database)
    if not as_json:
        rows = [
            {**row, "source": cut(row["source"], _MAX_CELL), "args": cut(_set_args(row["args"]), _MAX_CELL)}
            for row in rows
        ]
    columns = ("taskset", "source", "args", "num_tasks", "active", "excluded", "pending", "scores", "loaded_at")
    print_rows(rows, columns, as_json=as_json)


def _set_args(args: dict[str, Any]) -> str:
    """Return the settings of a set besides name and source, without those that have their default."""
    usual = {"split": None, "limit": None, "prompt": "question", "answer": "answer"}
    changed = {
        **args.get("args", {}),
        **{key: args[key] for key, value in usual.items() if args.get(key, value) != value},
    }
    return ", ".join(f"{key}: {value}" for key, value in changed.items())


@app.command("show")
def show(
    taskset: Annotated[str, typer.Argument(help="Name of a taskset.")],
    order: Annotated[
        str | None,
        typer.Option(
            "--order",
            metavar="FEATURE",
            help="Order by this feature, highest first, such as priority; by id by default.",
        ),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Maximum number of tasks.")] = 20,
    status: Annotated[
        str | None, typer.Option("--status", help="Only tasks with this status: active, excluded or pending.")
    ] = None,
    uri: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show tasks of a taskset with their features, and the stage and reason of dropped ones."""
    from rftcore.cli.output import print_rows
    from rftdata import tasks
    from rftdata.errors import ConfigError

    if status not in (None, "active", "excluded", "pending"):
        raise ConfigError("unknown status of a task", value=status, allowed="active, excluded, pending")
    with opened(uri, "rft tasks") as buffer:
        rows = tasks.show_tasks(buffer.database, taskset, order=order, limit=limit, status=status)
    shown = [{**row, "dropped": row["reason"] and f"{row['stage']}: {row['reason']}"} for row in rows]
    columns = (
        "task_id",
        "task_key",
        "status",
        "prompt",
        "answer",
        "features",
        "manual_features",
        "dropped",
        "pipeline_version",
    )
    print_rows(shown, columns, as_json=as_json)


@app.command("stats")
def stats(
    run: RunArgument = None,
    run_option: Annotated[
        str | None, typer.Option("--run", metavar="RUN", help="The same as RUN, as in other commands.")
    ] = None,
    taskset: Annotated[str | None, typer.Option("--taskset", help="Only tasks of this taskset.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Number of tasks shown, the last selected first.")] = 20,
    check: Annotated[
        bool, typer.Option("--check", help="Compare with the stored outcomes; exit with 1 if they differ.")
    ] = False,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Compute the statistics from the outcomes again.")] = False,
    uri: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a run's statistics of its tasks: posterior, attempts, mean reward."""
    from rftcore.cli.output import print_rows, warn
    from rftdata.tasks import stats

    if check and rebuild:
        raise typer.BadParameter("--check compares and --rebuild writes; use only one of them")
    if run is not None and run_option is not None:
        raise typer.BadParameter("RUN and --run name the run twice; use only one of them")
    with opened(uri, "rft tasks", schema="migrate" if rebuild else "check") as buffer:
        of_run = buffer.find_run(run if run is not None else run_option)
        if rebuild:
            print(f"{stats.rebuild_task_stats(of_run)} tasks folded again")
            return
        if check:
            rows = stats.check_task_stats(of_run)
            print_rows(rows, stats.DIFFERENCE_COLUMNS, as_json=as_json)
            warn(
                "they differ; `rft tasks stats --rebuild` computes them again"
                if rows
                else "every task is the fold of its outcomes"
            )
            raise typer.Exit(int(bool(rows)))
        rows = stats.task_stats(of_run, taskset=taskset, limit=limit)
        print_rows(rows, stats.STAT_COLUMNS, as_json=as_json)
