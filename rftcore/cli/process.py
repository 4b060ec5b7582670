"""`rft process`: the experience pipeline of a run; also looked at beforehand, replayed over history, and compared."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rftcore.cli.roles import RunOption
from rftcore.cli.run import SetOption, configuration
from rftcore.cli.session import ConfigBufferOption, JsonOption, opened
from rftdata.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from rftcore.config import RunConfig
    from rftcore.pipeline.preview import Preview, StagePreview
    from rftcore.pipeline.replay import Replayed
    from rftdata.buffer import Buffer
    from rftdata.database import Row

_MAX_VALUE = 70


def process(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="The run's configuration file.")] = None,
    overrides: SetOption = None,
    run: RunOption = None,
    buffer: ConfigBufferOption = None,
    preview: Annotated[
        int | None,
        typer.Option(
            "--preview", metavar="N", min=1, help="Show what each stage would do to N experiences; store nothing."
        ),
    ] = None,
    replay: Annotated[
        bool,
        typer.Option("--replay", help="Decide on all sealed groups of the run again, beside the verdicts there are."),
    ] = False,
    version: Annotated[
        str | None, typer.Option("--version", metavar="NAME", help="With --replay: what the new verdicts are called.")
    ] = None,
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option("--diff", metavar="VERSION VERSION", help="What two versions treat differently."),
    ] = None,
    versions: Annotated[
        bool, typer.Option("--versions", help="Which versions decided on the run's experiences.")
    ] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Rows shown (--preview: for each stage).")] = 10,
    seed: Annotated[int, typer.Option("--seed", help="With --preview: another sample.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Run the experience pipeline of a run, or try it out.

    `rft process CONFIG` is one more pipeline worker of the run. With --preview it shows what the stages of CONFIG would do to a sample of
    the run's experiences; with --replay they decide on all of them under a version of their own. --versions lists the versions there
    are, and --diff compares two of them.
    """
    asked = [
        name
        for name, given in (("--preview", preview), ("--replay", replay), ("--diff", diff), ("--versions", versions))
        if given
    ]
    if len(asked) > 1:
        raise ConfigError("rft process does one thing at a time", value=" ".join(asked), todo="give one of them")
    if version is not None and not replay:
        raise ConfigError("--version names the verdicts of a replay", todo="add --replay, or leave it out")
    if config is None:
        if diff is None and not versions:
            raise ConfigError("no configuration file is given", todo="write `rft process CONFIG`")
        _compare(buffer, run, diff, limit, as_json)
        return
    resolved = configuration(config, overrides, buffer)
    if diff is not None or versions:
        _compare(resolved.buffer.uri, run, diff, limit, as_json)
        return
    if preview is not None:
        _preview(resolved, run, preview, seed, limit, as_json)
    elif replay:
        _replay(resolved, run, version, as_json)
    else:
        from rftcore.pipeline import role

        raise typer.Exit(role.main(resolved, run))


def _preview(config: RunConfig, run: str | None, rows: int, seed: int, limit: int, as_json: bool) -> None:
    import rftdata
    from rftcore.cli.output import print_json, warn

    with rftdata.open(config.buffer, create=False, application="rft process") as found:
        tasks = _preview_tasks(config, found, rows) if config.pipelines.task else {}
        experiences, row = None, None
        # Before the first run there are tasks to look at, and no experiences.
        if config.pipelines.experience and (not tasks or run is not None or found.database.fetch("newest_run")):
            row = _run_of(config, found, run)
            experiences = _preview_experiences(config, found, row, rows, seed)
    if as_json:
        plain = {name: asdict(shown) for name, shown in tasks.items()}
        print_json({"tasks": plain, "experiences": asdict(experiences) if experiences else None})
        return
    for name, shown in tasks.items():
        _show(shown, f"{shown.num_experiences} tasks of {name}", limit)
    if experiences is not None and row is not None:
        what = f"{experiences.num_experiences} experiences of {experiences.num_groups} groups of run {row['name']}"
        _show(experiences, what, limit)
    if not tasks and experiences is None:
        warn(f"{config.run.name} has no stages under pipelines")


def _preview_tasks(config: RunConfig, buffer: Buffer, rows: int) -> dict[str, Preview]:
    from rftcore.pipeline.preview import preview
    from rftcore.task_pipeline import build_task_chain, task_batches

    chain = build_task_chain(config)
    shown = {
        name: preview(chain, table)
        for name, table in task_batches(config, buffer.database, chain, rows)
        if table.num_rows
    }
    chain.close()
    return shown


def _run_of(config: RunConfig, buffer: Buffer, run: str | None) -> Row:
    """The run that was named, else the newest of the file's name, else the newest of the buffer."""
    if run is None and (found := buffer.database.fetch("runs_of_name", name=config.run.name)):
        return found[0]
    return buffer.find_run(run)


def _preview_experiences(config: RunConfig, buffer: Buffer, row: Row, rows: int, seed: int) -> Preview:
    from rftcore.launch.prepare import build_pipeline
    from rftcore.pipeline import preview
    from rftcore.pipeline.policy import Policy
    from rftcore.pipeline.role import stage_context
    from rftdata.usage import RunUsage
    from rftdata.verdicts import known_scores

    chain = build_pipeline(config)
    table = preview.sample(buffer, row, chain, rows, seed).table
    policy = Policy(config, buffer.database, row["run_id"])
    chain.prepare(stage_context(config, policy, RunUsage(buffer.database, row["run_id"]), buffer))
    known = known_scores(buffer.database, chain.score_keys, table["experience_id"].to_pylist())
    result = preview.preview(chain, table, known)
    chain.close()
    policy.close()
    return result


def _show(result: Preview, what: str, limit: int) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    console.print(f"{what}; nothing is stored", markup=False)
    for stage in result.stages:
        _show_stage(console, stage, limit)
    kept = sum(row["kept"] for row in result.decisions)
    waiting = result.num_experiences - len(result.decisions)
    console.print(
        f"\n{kept} kept, {len(result.decisions) - kept} dropped"
        + (f", {waiting} wait for a person" if waiting else "")
        + "\n"
    )


def _show_stage(console: Console, stage: StagePreview, limit: int) -> None:
    from rich.table import Table
    from rich.text import Text

    made = f", {stage.num_created} made" if stage.num_created else ""
    asked = f", {len(stage.waiting)} ask a person" if stage.waiting else ""
    console.print(
        f"\n[bold]{stage.index}. {stage.stage}[/bold]: {stage.rows_in} in, {stage.rows_kept} kept, {len(stage.dropped)} dropped{asked}{made}"
    )
    if stage.changed:
        table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
        for name in ("experience", "field", "before", "after"):
            table.add_column(name, justify="right" if name == "experience" else "left", overflow="fold")
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


def _tell_more(console: Console, more: int, what: str) -> None:
    if more > 0:
        console.print(f"  … and {more} more {what} (--limit)", style="dim")


def _short(value: object) -> str:
    if value is None:
        return "–"
    text = f"{value:.6g}" if isinstance(value, float) else " ".join(str(value).split())
    return text if len(text) <= _MAX_VALUE else text[: _MAX_VALUE - 1] + "…"


def _replay(config: RunConfig, run: str | None, version: str | None, as_json: bool) -> None:
    import rftdata
    from rftcore.cli.output import print_json, warn
    from rftcore.launch.prepare import build_pipeline
    from rftcore.pipeline.replay import replay

    chain = build_pipeline(config)
    with rftdata.open(config.buffer, create=False, application="rft process") as found:
        row = _run_of(config, found, run)
        done = replay(config, found, row, chain, version, _tell)
    if as_json:
        print_json(asdict(done))
        return
    dropped = ", ".join(f"{stage} {count}" for stage, count in sorted(done.dropped_by.items())) or "none"
    print(
        f"version {done.version}: {done.num_experiences} experiences of {done.num_groups} groups decided, {done.num_kept} kept, "
        f"dropped by {dropped}"
    )
    for stage, number in sorted(done.failed_scores.items()):
        warn(f"{stage} has no score for {number} experiences, since its calls failed: see rft.score.error")
    if done.num_not_made:
        warn(f"a replay makes nothing new: {done.num_not_made} tasks or groups of stages were left out")
    print(f"compare with `rft process --diff {row['pipeline_version']} {done.version} --run {row['name']}`")


def _compare(buffer: str | None, run: str | None, diff: tuple[str, str] | None, limit: int, as_json: bool) -> None:
    from rftcore.cli.output import print_json, print_rows
    from rftcore.pipeline import replay

    with opened(buffer, "rft process") as found:
        row = found.find_run(run)
        if diff is None:
            names = ("pipeline_version", "used", "num_kept", "num_dropped", "stages", "first_used_at")
            print_rows(replay.versions(found, row), names, as_json=as_json)
            return
        difference = replay.compare(found, row, *diff, limit)
    if as_json:
        print_json(difference.plain())
        return
    print(f"experiences of run {row['name']}: {diff[0]} before, {diff[1]} after")
    print_rows(difference.counts, ("before", "after", "num_experiences", "num_rewards_changed", "mean_reward_change"))
    for only, name in ((difference.only_before, diff[0]), (difference.only_after, diff[1])):
        if only:
            print(f"on {only} more only {name} has decided")
    print_rows(difference.rows, ("experience_id", "reward", "before", "after", "reward_before", "reward_after"))


def _tell(done: Replayed) -> None:
    from rftcore.cli.output import warn

    warn(f"{done.num_groups} groups decided, {done.num_kept} of {done.num_experiences} experiences kept")
