"""`rft check`: resolve and validate a configuration without starting anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from rftcore.cli.configuration import SetOption, stage_configurations
from rftcore.cli.roles import ConfigArgument
from rftcore.cli.session import ConfigBufferOption, JsonOption

if TYPE_CHECKING:
    from rftcore.config.run import RunConfig


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

    configurations = stage_configurations(config, overrides, buffer)
    stages, chosen = _checked(configurations, deep=deep, wait_s=wait_s, read_s=read_s)
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


def _checked(
    configurations: Sequence[RunConfig], *, deep: bool, wait_s: float, read_s: float
) -> tuple[Sequence[RunConfig], Sequence[str | None]]:
    """Return the configurations with their defaults, and a sentence about the defaults of each.

    Raises:
        RftError, SeveralErrors: what is wrong.
    """
    from rftcore.checks.models import check_stages
    from rftcore.checks.run import check_deeply, check_named
    from rftcore.cli.output import warn
    from rftcore.findings import Findings
    from rftcore.launch.terminal.placement_plan import describe_plan
    from rftcore.resolved import ResolvedRun
    from rftcore.run.defaults import slow_limit, with_defaults
    from rftdata.user_code import held_lock
    from rftdata.user_code.time_limits import at_most

    findings = Findings(warn)
    with held_lock.printed(), at_most(wait_s, "rft check"):
        stages, chosen = zip(
            *(findings.value(with_defaults, each) or (each, None) for each in configurations), strict=True
        )
        runs = [ResolvedRun(stage) for stage in stages]
        for resolved in runs:
            if deep:
                check_deeply(resolved, findings, read_s)
            else:
                check_named(resolved, findings)
            if deep or not findings.errors:
                findings.describe(describe_plan(resolved, deep=deep))
                findings.describe(filter(None, [slow_limit(resolved.config)]))
        findings.passes(check_stages, runs)
    findings.refuse()
    return stages, chosen
