"""`rft pipeline preview|replay|diff|versions`: tries stages on a sample, replays them on stored groups, and compares versions."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from rftcore.cli.configuration import SetOption, configuration
from rftcore.cli.pipeline_preview import run_of, show_preview
from rftcore.cli.roles import ConfigArgument
from rftcore.cli.session import BufferOption, ConfigBufferOption, JsonOption, opened

if TYPE_CHECKING:
    from rftcore.config.run import RunConfig
    from rftcore.pipeline.replay import Replayed


app = typer.Typer(
    help="Try the stages of a configuration on stored experiences, and compare pipeline versions. `rft process` is the role itself.",
    no_args_is_help=True,
)
RunOption = Annotated[
    str | None,
    typer.Option("--run", metavar="RUN", help="Name or id; by default the newest of the file's name, else the newest."),
]
NewestRunOption = Annotated[
    str | None, typer.Option("--run", metavar="RUN", help="Name or id of a run; the newest by default.")
]


@app.command("preview")
def preview(
    config: ConfigArgument,
    rows: Annotated[
        int, typer.Option("--rows", metavar="N", min=1, help="Size of the sample: experiences, or tasks of each set.")
    ] = 20,
    overrides: SetOption = None,
    run: RunOption = None,
    buffer: ConfigBufferOption = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Rows shown for each stage.")] = 10,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the random sample.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Show what each stage of CONFIG would do to a sample of tasks and of a run's experiences; nothing is stored."""
    show_preview(configuration(config, overrides, buffer), run, rows, seed, limit, as_json)


@app.command("replay")
def replay(
    config: ConfigArgument,
    version: Annotated[
        str | None,
        typer.Option(
            "--version",
            metavar="NAME",
            help="Name of the new version; by default `replay-` and a digest of the stages.",
        ),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(
            "--workers",
            metavar="N",
            min=1,
            help="Processes; several run on the Ray cluster of RAY_ADDRESS, else on this machine.",
        ),
    ] = 1,
    overrides: SetOption = None,
    run: RunOption = None,
    buffer: ConfigBufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Decide on all sealed groups of a run again with the stages of CONFIG, under a separate version.

    The verdicts are stored beside the existing ones and change nothing that the run trains on. They do not depend on the number of processes.
    """
    _replay(configuration(config, overrides, buffer), run, version, workers, as_json)


@app.command("diff")
def diff(
    before: Annotated[
        str, typer.Argument(metavar="BEFORE", help="A pipeline version; `rft pipeline versions` lists them.")
    ],
    after: Annotated[str, typer.Argument(metavar="AFTER", help="The version to compare it with.")],
    run: NewestRunOption = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Example rows shown.")] = 10,
    uri: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show which experiences two pipeline versions treat differently: counts and example rows."""
    from rftcore.cli.output import print_json, print_rows
    from rftdata.pipeline.versions import compare_versions

    with opened(uri, "rft pipeline") as buffer:
        of_run = buffer.find_run(run)
        difference = compare_versions(of_run, before, after, limit)
    if as_json:
        print_json(asdict(difference))
        return
    print(f"experiences of run {of_run.name}: {before} before, {after} after")
    print_rows(difference.counts, ("before", "after", "num_experiences", "num_rewards_changed", "mean_reward_change"))
    for only, name in ((difference.only_before, before), (difference.only_after, after)):
        if only:
            print(f"only {name} has decided on {only} further experiences")
    print_rows(difference.rows, ("experience_id", "reward", "before", "after", "reward_before", "reward_after"))


@app.command("versions")
def versions(run: NewestRunOption = None, uri: BufferOption = None, as_json: JsonOption = False) -> None:
    """List the pipeline versions that decided on a run's experiences, with their stages and results."""
    from rftcore.cli.output import print_rows
    from rftcore.pipeline.replay import format_stages
    from rftdata.pipeline.versions import versions_of_run

    with opened(uri, "rft pipeline") as buffer:
        stored = versions_of_run(buffer.find_run(run))
    rows = [{**vars(version), "stages": version.stages and format_stages(version.stages)} for version in stored]
    names = ("pipeline_version", "used", "num_kept", "num_dropped", "stages", "first_used_at")
    print_rows(rows, names, as_json=as_json)


def _replay(config: RunConfig, run: str | None, version: str | None, workers: int, as_json: bool) -> None:
    import rftdata
    from rftcore.cli.output import print_json, warn
    from rftcore.pipeline.replay import replay as decide_again
    from rftcore.resolved import ResolvedRun
    from rftdata.user_code import held_lock

    resolved = ResolvedRun(config)
    _ = resolved.experience_chain  # before the buffer is opened, so that a mistake is reported at once
    with (
        rftdata.open(config.buffer, create=False, application="rft pipeline", report=warn) as buffer,
        held_lock.printed(),
    ):
        of_run = run_of(config, buffer, run)
        if workers == 1:
            done = decide_again(resolved, buffer, of_run, version, _report_progress)
        else:
            from rftcore.launch.ray_cluster.replays import replay_on_cluster

            done = replay_on_cluster(resolved, of_run, version, workers, _report_progress)
    if as_json:
        print_json(asdict(done))
        return
    if not done.num_groups:
        print(f"version {done.version}: nothing was sealed, labelled or answered since its last replay")
        return
    short = (
        f" (of these only because their group fell below min_group_size: {_counts(done.short_by)})"
        if done.short_by
        else ""
    )
    failed = f"; set aside because a stage failed: {_counts(done.failed_by)}" if done.failed_by else ""
    print(
        f"version {done.version}: {done.num_experiences} experiences of {done.num_groups} groups decided, {done.num_kept} kept, "
        f"dropped by {_counts(done.dropped_by) or 'none'}{short}{failed}"
    )
    for number, share in enumerate(done.workers):
        print(
            f"worker {number} ({share.host}, process {share.pid}): {share.num_experiences} experiences of {share.num_groups} groups "
            f"in {share.seconds:.1f} s, {share.experiences_per_s:,.0f} experiences/s"
        )
    if done.failed_by:
        warn("rft.operator_run and the reasons in rft.verdict show the error of the stage")
    for stage, number in sorted(done.failed_scores.items()):
        warn(f"{stage} has no score for {number} experiences, because its calls failed; see rft.score.error")
    if done.num_purged:
        warn(f"nothing was stored of groups that were purged meanwhile: {done.num_purged}")
    if done.num_not_made:
        warn(f"a replay creates nothing: {done.num_not_made} tasks or groups of stages were left out")
    print(f"compare with `rft pipeline diff {of_run.pipeline_version} {done.version} --run {of_run.name}`")


def _counts(by_stage: dict[str, int]) -> str:
    return ", ".join(f"{stage} {count}" for stage, count in sorted(by_stage.items()))


def _report_progress(done: Replayed) -> None:
    from rftcore.cli.output import warn

    warn(f"{done.num_groups} groups decided, {done.num_kept} of {done.num_experiences} experiences kept")
