"""`rft check`: resolve and validate a configuration without starting anything."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from rftcore.cli.roles import ConfigArgument
from rftcore.cli.run import SetOption, stage_configurations
from rftcore.cli.session import ConfigBufferOption, JsonOption
from rftdata.errors import ConfigError

if TYPE_CHECKING:
    from rftcore.resolved import ResolvedRun


def check(
    config: ConfigArgument,
    overrides: SetOption = None,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep",
            help="Also open the model, the task sources, the database and the inputs of stages, try workflow and rewards on tasks of each "
            "taskset, and the stages on their rollouts.",
        ),
    ] = False,
    wait_s: Annotated[float, typer.Option(min=0.01, help="Maximum seconds for one stage, task row or query.")] = 10.0,
    read_s: Annotated[
        float, typer.Option(min=0.01, help="Maximum seconds for the rows of one task source (with --deep).")
    ] = 60.0,
    show_all: Annotated[bool, typer.Option("--all", help="Also print the keys that have their default.")] = False,
    buffer: ConfigBufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Validate a configuration and every plug-in it names; print what differs from the defaults, what was chosen, and which role has which GPUs.

    --all and --json print every key; `rft config KEY` says what one means.

    The plan is for this machine. If the configuration asks for more GPUs than there are here, it is for a machine with as many as it asks for, and
    --deep refuses the configuration. With RAY_ADDRESS and --deep, it is for that cluster.
    """
    import yaml

    from rftcore.cli.output import print_json, warn

    found = stage_configurations(config, overrides, buffer)
    from rftcore.algorithms.notes import notes
    from rftcore.deep_check import open_inputs
    from rftcore.resolved import ResolvedRun
    from rftcore.run.defaults import slow_limit, with_defaults
    from rftcore.run.model_checks import check_stages, describe_adapters
    from rftcore.run.prepare import check_plugins
    from rftcore.trainer.estimates.device_checks import describe_stored
    from rftdata.user_code import held_lock
    from rftdata.user_code.time_limits import at_most

    with held_lock.printed(), at_most(wait_s, "rft check"):
        stages, chosen = zip(*map(with_defaults, found), strict=True)
        runs = [ResolvedRun(stage) for stage in stages]
        for resolved in runs:
            check_plugins(resolved)
            resolved.check_model_folder()
        check_stages(runs)
        for resolved in runs:
            lora = resolved.config.trainer.lora
            for sentence in notes(resolved.algorithm, 0.0 if lora is None else lora.dropout):
                warn(sentence)
            for sentence in open_inputs(resolved, read_s) if deep else describe_stored(resolved):
                warn(sentence)
            for sentence in (*describe_adapters(resolved), *_plan(resolved, deep=deep)):
                warn(sentence)
            if (limit := slow_limit(resolved.config)) is not None:
                warn(limit)
    for sentence in dict.fromkeys(filter(None, chosen)):
        warn(sentence)
    plain = [stage.model_dump(mode="json", exclude_defaults=not (show_all or as_json)) for stage in stages]
    shown = plain[0] if len(plain) == 1 else {"stages": plain}
    if as_json:
        print_json(shown)
    else:
        print(yaml.safe_dump(shown, sort_keys=False, allow_unicode=True), end="")
    warn(
        f"{config} is valid"
        + (
            ""
            if deep
            else "; --deep also opens model, tasks, database and inputs of stages, and tries rollouts and stages"
        )
    )


def _plan(resolved: ResolvedRun, *, deep: bool) -> Iterator[str]:
    """Yield which role of the run has which GPUs.

    Raises:
        ConfigError: with `deep`, there are too few here or in the cluster, or the cluster cannot be joined.
    """
    from rftcore.launch.plan import plan
    from rftcore.run.gpus import local_gpus, this_machine
    from rftcore.run.placement import Machine, asked_gpus, place_run

    if deep and os.environ.get("RAY_ADDRESS"):
        from rftcore.launch import cluster

        cluster.start_cluster()
        machines = cluster.machines()
        cluster.stop_cluster()
        yield from plan(resolved, place_run(resolved, machines), None)
        return
    sizes, asked = local_gpus(), asked_gpus(resolved.config)
    try:
        if sizes or not asked:
            yield from plan(resolved, place_run(resolved, [this_machine(len(sizes))]), min(sizes, default=None))
            return
    except ConfigError as error:
        if deep:
            raise
        yield f"this machine cannot run it: {error}"
    if asked:
        elsewhere = Machine("a machine with as many GPUs as asked for", asked)
        yield from plan(resolved, place_run(resolved, [elsewhere]), None)
