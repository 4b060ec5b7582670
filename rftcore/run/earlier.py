"""The message of `rft run` about an earlier run of the same name, before it creates another one.

A second `rft run CONFIG` starts from the beginning under a numbered name. A person who meant to continue the first run
must learn this, and the right command, before anything is sampled.
"""

from __future__ import annotations

from rftcore.config.run import RunConfig
from rftcore.run.commands import buffer_option
from rftdata.buffer import Buffer
from rftdata.reports.progress import last_step
from rftdata.run import Run

_MAX_OUTCOME = 200


def earlier_run(config: RunConfig, buffer: Buffer) -> str | None:
    """Describe the newest run of the configuration's name, with the command that continues it; None if there is none."""
    runs = buffer.runs(config.run.name, imported=False)
    if not runs:
        return None
    run, others = runs[0], len(runs) - 1
    more = f" (and {others} more before it)" if others else ""
    is_at_work = any(other.run_id == run.run_id for other in buffer.runs(at_work=True))
    option = buffer_option(buffer.location)
    if is_at_work:
        advice = f"to watch that one: rft status {run.name}{option}"
    else:
        steps = f" --set steps={2 * run.planned_steps}" if run.status == "finished" else ""
        advice = f"to continue that one instead, stop this run and enter: rft run --resume {run.name}{steps}{option}"
    return f"the run {run.name} exists already{more}: {_progress_words(run, is_at_work)}. This is a new run; {advice}"


def _progress_words(run: Run, is_at_work: bool) -> str:
    step = last_step(run)
    place = f"step {step} of {run.planned_steps}"
    if is_at_work:
        return f"it is at work, at {place}"
    if not run.has_ended:
        return f"no process works on it, and it is at {place}" if step else "it did not begin to train"
    verb = {"finished": "finished", "interrupted": "was interrupted", "failed": "failed"}[run.status]
    why = " ".join((run.outcome or "").split()).rstrip(".")
    why = why if len(why) <= _MAX_OUTCOME else f"{why[: _MAX_OUTCOME - 1]}…"
    return f"it {verb} at {place}" + (f" ({why})" if why else "")
