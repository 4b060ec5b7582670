"""`rft process`: the experience pipeline of a run; also looked at beforehand, replayed over history, and compared."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rftcore.cli.process_preview import run_of, show_preview
from rftcore.cli.run import SetOption, configuration
from rftcore.cli.session import ConfigBufferOption, JsonOption, opened
from rftdata.errors import ConfigError

if TYPE_CHECKING:
    from rftcore.config import RunConfig
    from rftcore.pipeline.replay import Replayed


def process(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="The run's configuration file.")] = None,
    overrides: SetOption = None,
    run: Annotated[
        str | None,
        typer.Option(
            "--run", metavar="RUN", help="The run to join, by default one that has not ended; or the one to look at."
        ),
    ] = None,
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

    `rft process CONFIG` is one more pipeline worker of the newest run of the file's name that is at work or has not begun; it makes the
    run where the buffer has none of that name, and none beside runs that have all ended. While it waits it says for what, and which
    roles nobody plays. With --preview it shows what the stages of CONFIG would do to a sample of the run's experiences; with --replay
    they decide on all of them under a version of their own. --versions lists the versions there are, and --diff compares two of them.
    """
    asked = {"--preview": preview is not None, "--replay": replay, "--diff": diff is not None, "--versions": versions}
    _check_asked([name for name, is_asked in asked.items() if is_asked], version, has_config=config is not None)
    resolved = configuration(config, overrides, buffer) if config is not None else None
    if diff is not None or versions:
        _compare(buffer if resolved is None else resolved.buffer.uri, run, diff, limit, as_json)
        return
    assert resolved is not None
    if preview is not None:
        show_preview(resolved, run, preview, seed, limit, as_json)
    elif replay:
        _replay(resolved, run, version, as_json)
    else:
        from rftcore.pipeline import role

        raise typer.Exit(role.main(resolved, run, by_hand=True))


def _check_asked(asked: list[str], version: str | None, *, has_config: bool) -> None:
    """Refuse options that do not go together."""
    if len(asked) > 1:
        raise ConfigError("rft process does one thing at a time", value=" ".join(asked), todo="give one of them")
    if version is not None and asked != ["--replay"]:
        raise ConfigError("--version names the verdicts of a replay", todo="add --replay, or leave it out")
    if not has_config and asked not in (["--diff"], ["--versions"]):
        raise ConfigError("no configuration file is given", todo="write `rft process CONFIG`")


def _replay(config: RunConfig, run: str | None, version: str | None, as_json: bool) -> None:
    import rftdata
    from rftcore.cli.output import print_json, warn
    from rftcore.pipeline.replay import replay
    from rftcore.resolved import ResolvedRun
    from rftdata.user_code import held_lock

    resolved = ResolvedRun(config)
    _ = resolved.experience_chain  # before the buffer is opened: a mistake in it is told at once
    with (
        rftdata.open(config.buffer, create=False, application="rft process", report=warn) as found,
        held_lock.printed(),
    ):
        row = run_of(config, found, run)
        done = replay(resolved, found, row, version, _tell)
    if as_json:
        print_json(asdict(done))
        return
    if not done.num_groups:
        print(f"version {done.version}: nothing was sealed, labelled or answered since its last replay")
        return
    failed = f"; set aside since a stage failed: {_counts(done.failed_by)}" if done.failed_by else ""
    print(
        f"version {done.version}: {done.num_experiences} experiences of {done.num_groups} groups decided, {done.num_kept} kept, "
        f"dropped by {_counts(done.dropped_by) or 'none'}{failed}"
    )
    if done.failed_by:
        warn("rft.operator_run and the reasons in rft.verdict say with which error a stage failed")
    for stage, number in sorted(done.failed_scores.items()):
        warn(f"{stage} has no score for {number} experiences, since its calls failed: see rft.score.error")
    if done.num_not_made:
        warn(f"a replay makes nothing new: {done.num_not_made} tasks or groups of stages were left out")
    print(f"compare with `rft process --diff {row['pipeline_version']} {done.version} --run {row['name']}`")


def _counts(by_stage: dict[str, int]) -> str:
    return ", ".join(f"{stage} {count}" for stage, count in sorted(by_stage.items()))


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
