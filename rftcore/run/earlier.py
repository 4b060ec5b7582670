"""What `rft run` says about an earlier run of the same name before it makes another one.

A second `rft run CONFIG` starts from the beginning under a numbered name. A person who meant to go on with the first one must learn
that, and the command for it, before anything is sampled.
"""

from __future__ import annotations

from rftcore.config import RunConfig
from rftcore.run.commands import buffer_option
from rftcore.run.prepare import runs_of_name
from rftdata.buffer import Buffer
from rftdata.postgres.database import Row

_MAX_OUTCOME = 200


def earlier_run(config: RunConfig, buffer: Buffer) -> str | None:
    """How the newest run of the configuration's name stands and the command that goes on with it; None where there is none."""
    found = runs_of_name(buffer, config.run.name)
    if not found:
        return None
    row, others = found[0], len(found) - 1
    more = f" (and {others} more before it)" if others else ""
    is_at_work = any(at_work["run_id"] == row["run_id"] for at_work in buffer.database.fetch("runs_at_work"))
    option = buffer_option(buffer.location)
    if is_at_work:
        advice = f"to watch that one: rft status {row['name']}{option}"
    else:
        steps = f" --set steps={2 * row['planned_steps']}" if row["status"] == "finished" else ""
        advice = (
            f"to go on with that one instead, stop this run and write: rft run --resume {row['name']}{steps}{option}"
        )
    return (
        f"the run {row['name']} exists already{more}: {_standing(buffer, row, is_at_work)}. This is a new run; {advice}"
    )


def _standing(buffer: Buffer, row: Row, is_at_work: bool) -> str:
    (progress,) = buffer.database.fetch("progress_run", run_id=row["run_id"])
    place = f"step {progress['step']} of {row['planned_steps']}"
    if is_at_work:
        return f"it is at work, at {place}"
    if row["status"] in ("created", "running"):
        return f"no process works on it, and it stands at {place}" if progress["step"] else "it did not begin to train"
    verb = {"finished": "finished", "interrupted": "was interrupted", "failed": "failed"}[row["status"]]
    why = " ".join((row["outcome"] or "").split()).rstrip(".")
    why = why if len(why) <= _MAX_OUTCOME else f"{why[: _MAX_OUTCOME - 1]}…"
    return f"it {verb} at {place}" + (f" ({why})" if why else "")
