"""The table of `rft report --timeline`: where the seconds of each role went."""

from __future__ import annotations

from rich.markup import escape

from rftcore.reporting.console import OutputConsole
from rftcore.reporting.table import titled
from rftdata.reports.timeline import ActivityTime, Timeline

_TITLES = {"supervisor": "rft run"}


def print_timeline(run: str, timeline: Timeline) -> None:
    """Print a row for each role and activity, with the share in the run's seconds and the mean seconds a step."""
    console = OutputConsole(pipe_width=160)
    console.print()
    if not timeline.roles:
        console.print(escape(f"{run}: no timeline yet; its first rows come when its processes have started."))
        return
    steps = f"{timeline.num_steps} steps" if timeline.num_steps else "no step yet"
    table = titled(escape(f"Every second of {run}: {timeline.seconds:,.1f} s, {steps}"))
    table.add_column("role")
    table.add_column("activity", overflow="fold")
    for name in ("seconds", "share", "a step"):
        table.add_column(name, justify="right")
    for role in timeline.roles:
        several = f" ({role.num_processes} processes)" if role.num_processes > 1 else ""
        name = _TITLES.get(role.role, role.role) + several
        for activity in role.activities:
            table.add_row(name, escape(_words(activity)), *_numbers(activity))
            name = ""
        step_seconds = [each.step_seconds for each in role.activities if each.step_seconds is not None]
        total = ActivityTime(
            activity="total",
            detail=None,
            seconds=sum(each.seconds for each in role.activities),
            share=sum(each.share for each in role.activities),
            step_seconds=sum(step_seconds) if step_seconds else None,
        )
        table.add_row("", "total", *_numbers(total), style="bold", end_section=True)
    console.print(table)


def _words(each: ActivityTime) -> str:
    if each.detail is None:
        return each.activity
    return f"{each.activity} for {each.detail}" if each.activity == "waiting" else f"{each.activity}: {each.detail}"


def _numbers(each: ActivityTime) -> tuple[str, str, str]:
    step = "–" if each.step_seconds is None else f"{each.step_seconds:,.2f}"
    return f"{each.seconds:,.1f}", f"{100 * each.share:.1f} %", step
