"""`rft pipeline preview`: shows the effect of each stage on a sample."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rftdata.errors import OperatorError

if TYPE_CHECKING:
    from rftcore.config.run import RunConfig
    from rftcore.pipeline.preview import Preview, StagePreview
    from rftcore.reporting.console import OutputConsole
    from rftcore.resolved import ResolvedRun
    from rftdata.buffer import Buffer
    from rftdata.run import Run

_MAX_VALUE = 70
_LIMIT_S = 60.0


def show_preview(config: RunConfig, run: str | None, rows: int, seed: int, limit: int, as_json: bool) -> None:
    """Show what the stages of a configuration would do to `rows` tasks of each set and experiences of a run."""
    from rftcore.cli.output import print_json, warn
    from rftcore.resolved import ResolvedRun
    from rftdata.user_code import held_lock
    from rftdata.user_code.time_limits import at_most

    resolved = ResolvedRun(config)
    with _buffer(config) as buffer, held_lock.printed(), at_most(_LIMIT_S, "rft pipeline preview"):
        tasks = _preview_tasks(resolved, buffer, rows) if config.pipelines.task else {}
        experiences, shown_run = None, None
        # Before the first run there are tasks, but no experiences.
        if config.pipelines.experience and (not tasks or run is not None or buffer.runs()):
            shown_run = run_of(config, buffer, run)
            experiences = _preview_experiences(resolved, buffer, shown_run, rows, seed)
    if as_json:
        plain = {name: _of_tasks(shown) for name, shown in tasks.items()}
        print_json({"tasks": plain, "experiences": asdict(experiences) if experiences else None})
        return
    for name, shown in tasks.items():
        number = shown.num_experiences
        _show(shown, f"{number} task{'' if number == 1 else 's'} of {name}", "task", limit)
    if experiences is not None and shown_run is not None:
        what = f"{experiences.num_experiences} experiences of {experiences.num_groups} groups of run {shown_run.name}"
        _show(experiences, what, "experience", limit)
    if not tasks and experiences is None:
        warn(f"{config.run.name} has no stages under pipelines")


@contextmanager
def _buffer(config: RunConfig) -> Iterator[Buffer]:
    """Open the configuration's buffer. If it does not exist, use an empty temporary one for the tasks."""
    import rftdata
    from rftdata.connection import exists, temporary

    is_there = exists(config.buffer) or not config.pipelines.task
    opened = (
        rftdata.open(config.buffer, create=False, schema="check", application="rft pipeline")
        if is_there
        else temporary("rft pipeline")
    )
    with opened as buffer:
        yield buffer


def _preview_tasks(resolved: ResolvedRun, buffer: Buffer, rows: int) -> dict[str, Preview]:
    from rftcore.pipeline.preview import preview
    from rftcore.task_pipeline.pipeline import task_batches
    from rftcore.task_pipeline.sources import of_taskset

    chain = resolved.task_chain
    shown: dict[str, Preview] = {}
    try:
        for name, table in task_batches(resolved, buffer, rows):
            if table.num_rows:
                try:
                    shown[name] = preview(chain, table)
                except OperatorError as error:
                    raise of_taskset(name, error) from error
    finally:
        chain.close()
    return shown


def run_of(config: RunConfig, buffer: Buffer, run: str | None) -> Run:
    """Return the named run, else the newest of the file's name, else the newest of the buffer."""
    if run is None and (runs := buffer.runs(config.run.name)):
        return runs[0]
    return buffer.find_run(run)


def _preview_experiences(resolved: ResolvedRun, buffer: Buffer, run: Run, rows: int, seed: int) -> Preview:
    from rftcore.pipeline import preview
    from rftcore.pipeline.policy_endpoint import Policy
    from rftcore.pipeline.role import stage_context
    from rftdata.pipeline.budget import RunUsage
    from rftdata.pipeline.scores import EXPERIENCE_SCORES

    config, chain = resolved.config, resolved.experience_chain
    table = preview.read_sample(run, chain, rows, seed).table
    policy = Policy(resolved, run)
    chain.prepare(stage_context(config, policy, RunUsage(run), buffer))
    stored_scores = EXPERIENCE_SCORES.read(buffer.database, chain.score_keys, table["experience_id"].to_pylist())
    result = preview.preview(chain, table, stored_scores)
    chain.close()
    policy.close()
    return result


def _of_tasks(shown: Preview) -> dict[str, Any]:
    """Convert a preview of tasks for JSON: what a chain calls experiences are tasks, each in a separate group."""
    plain = asdict(shown)
    del plain["num_groups"]
    for stage in plain["stages"]:
        stage["changed"] = [_renamed(change) for change in stage["changed"]]
    return _renamed(plain) | {"decisions": [_renamed(row) for row in plain["decisions"]]}


def _renamed(row: dict[str, Any]) -> dict[str, Any]:
    names = {"experience_id": "task_id", "num_experiences": "num_tasks"}
    return {names.get(name, name): value for name, value in row.items()}


def _show(result: Preview, what: str, noun: str, limit: int) -> None:
    from rftcore.reporting.console import OutputConsole

    console = OutputConsole(pipe_width=200)
    console.print(f"{what}; nothing is stored", markup=False)
    for stage in result.stages:
        _show_stage(console, stage, noun, limit)
    kept = sum(row["kept"] for row in result.decisions)
    waiting = result.num_experiences - len(result.decisions)
    console.print(
        f"\n{kept} kept, {len(result.decisions) - kept} dropped"
        + (f", {waiting} wait for a person" if waiting else "")
        + "\n"
    )


def _show_stage(console: OutputConsole, stage: StagePreview, noun: str, limit: int) -> None:
    from rich.table import Table
    from rich.text import Text

    made = f", {stage.num_created} created" if stage.num_created else ""
    asked = f", {len(stage.waiting)} ask a person" if stage.waiting else ""
    asked += f", {len(stage.undecided)} undecided with them" if stage.undecided else ""
    console.print(
        f"\n[bold]{stage.index}. {stage.stage}[/bold]: {stage.rows_in} in, {stage.rows_kept} kept, {len(stage.dropped)} dropped{asked}{made}"
    )
    if stage.changed:
        table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
        for name in (noun, "field", "before", "after"):
            table.add_column(name, justify="right" if name == noun else "left", overflow="fold")
        for change in stage.changed[:limit]:
            table.add_row(
                str(change.experience_id),
                change.column,
                Text(_short(change.before), style="dim"),
                Text(_short(change.after)),
            )
        console.print(table)
        _tell_more(console, len(stage.changed) - limit, "changed fields")
    for title, rows in (("dropped", stage.dropped), ("asked", stage.waiting)):
        for experience_id, reason in rows[:limit]:
            console.print(Text(f"  {title} {experience_id}: {reason}"))
        _tell_more(console, len(rows) - limit, f"{title} rows")


def _tell_more(console: OutputConsole, more: int, what: str) -> None:
    if more > 0:
        console.print(f"  … and {more} more {what} (--limit)", style="dim")


def _short(value: object) -> str:
    if value is None:
        return "–"
    text = f"{value:.6g}" if isinstance(value, float) else " ".join(str(value).split())
    return text if len(text) <= _MAX_VALUE else text[: _MAX_VALUE - 1] + "…"
