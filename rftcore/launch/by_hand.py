"""A role that a person starts by hand: it joins the run of the configuration's name that is at work or has not begun.

It creates a run only if the buffer has none of that name: next to runs that have ended, another one that no other role joins would wait forever.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Literal

from rftcore.checks.run import check_start
from rftcore.config.run import RunConfig
from rftcore.findings import Findings
from rftcore.launch.preparation import continue_by_hand, prepare_run, shared_settings_that_differ
from rftcore.resolved import ResolvedRun
from rftcore.run.commands import buffer_option
from rftcore.run.defaults import with_defaults
from rftcore.run.join import VERBS, HandStartedRole, JoinedRun, answer_for, open_for_role
from rftdata.buffer import Buffer
from rftdata.errors import ConfigError
from rftdata.run import Run
from rftdata.workers.live_workers import live_workers

Role = Literal["explorer", "pipeline", "trainer"]


def join_by_hand(config: RunConfig, run: str | None, role: Role) -> JoinedRun:
    """Check a configuration, and find or create the run that the role belongs to; print which run it is.

    Args:
        run: name or id; None for the newest run of the configuration's name that is at work or has not begun, else a new one.

    Raises:
        RftError: what is wrong with the configuration, see `check_start`.
        ConfigError: there are only ended runs to join.
    """
    if role == "explorer" and not config.has_explorer:
        raise ConfigError(
            "the run has no explorer: it samples nothing and has nothing to evaluate",
            value=f"run.mode: {config.run.mode}",
            todo="start the other roles, or set run.mode: both",
        )
    findings, chosen = Findings(), None
    if role == "explorer":
        config, chosen = findings.value(with_defaults, config) or (config, None)
    resolved = ResolvedRun(config)
    check_start(resolved, findings, has_all_roles=False)
    findings.refuse()
    buffer = open_for_role(config, waits=False)
    try:
        joined, is_new = _named(buffer, run, role) if run is not None else _of_name(resolved, buffer, role, _warn)
        if not is_new:
            joined = _with_shared_settings(resolved, joined, role)
    except BaseException:
        buffer.close()
        raise
    answer_for(joined)
    messages = HandStartedRole(buffer, config, joined, role)
    messages.report(
        f"{'makes' if is_new else 'joins'} the run {joined.name} in the buffer {buffer.location} as its {role}"
    )
    if chosen is not None:
        messages.report(chosen)
    return JoinedRun(buffer, joined, resolved, messages)


def _warn(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _with_shared_settings(resolved: ResolvedRun, run: Run, role: Role) -> Run:
    """Return the run to join. A trainer that continues an ended run stores its settings, and every other role has those that are stored. A
    trainer also stores another number of steps if no process of the run is alive.

    Raises:
        ConfigError: the role would plan or draw by other settings than the others.
    """
    differ = shared_settings_that_differ(resolved.config, run)
    if role != "trainer":
        differ.pop(
            "steps", None
        )  # the run's row has their number, and only a trainer counts to that of its configuration
    if not differ:
        return run
    if run.has_ended or ({*differ} == {"steps"} and not any(worker.beats for worker in live_workers(run))):
        return continue_by_hand(resolved, run)
    key = min(differ)
    given, stored = differ[key]
    more = f" (also: {', '.join(sorted(differ)[1:])})" if len(differ) > 1 else ""
    raise ConfigError(
        f"the roles of the run {run.name!r} share {key}, and this {role} has another value than was stored with the run{more}",
        value=given,
        allowed=str(stored),
        todo=f"set it back, or end the run and change it for all roles: rft run CONFIG --resume {run.name}",
    )


def _named(buffer: Buffer, name: str, role: Role) -> tuple[Run, bool]:
    run = buffer.find_run(name)
    # A trainer resumes an interrupted run, and the other roles follow.
    goes_on = not run.has_ended or (role == "trainer" and run.status != "finished")
    if not goes_on:
        raise _ended(buffer, run, role)
    return run, False


def _of_name(resolved: ResolvedRun, buffer: Buffer, role: Role, report: Callable[[str], object]) -> tuple[Run, bool]:
    with buffer.joining():
        runs = buffer.runs(resolved.config.run.name, imported=False)
        for run in runs:
            if not run.has_ended:
                return run, False
        if runs:
            raise _ended(buffer, runs[0], role)
        return prepare_run(resolved, buffer, report=report), True


def _ended(buffer: Buffer, run: Run, role: Role) -> ConfigError:
    name, option = run.name, buffer_option(buffer.location)
    verb = f"rft {VERBS[role]} CONFIG"
    ways = []
    if run.status == "finished":
        how = f"has finished its {run.planned_steps} step{'' if run.planned_steps == 1 else 's'}"
        ways.append(f"continue with more steps: rft run CONFIG --resume {name} --set steps={2 * run.planned_steps}")
    else:
        how = f"has ended ({run.status})"
        ways.append(
            f"continue it: rft run --resume {name}{option}, or by hand with rft train CONFIG --run {name} first"
        )
    if role == "pipeline":
        ways.append(f"decide on what it stored: rft pipeline replay CONFIG --run {name}")
    ways.append(f"start a new run: rft run CONFIG, or {verb} --set run.name=NAME for every role")
    return ConfigError(
        f"the run {name!r} {how}: there is nothing to do in it for {'an' if role == 'explorer' else 'a'} {role}",
        allowed="a run that is at work or has not begun, or a name that no run has yet",
        todo="; ".join(ways),
    )
