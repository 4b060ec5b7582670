"""`rft lineage`: from an experience to steps and checkpoints, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rftcore.cli.session import BufferOption, JsonOption, check_experience, opened
from rftdata.errors import QueryError

if TYPE_CHECKING:
    from rftdata.buffer import Buffer
    from rftdata.postgres.database import Database, Row

_STEPS = (
    "run", "attempt_id", "trainer_step", "reward_used", "reward_now", "corrected_since", "checkpoint_step", "checkpoint_uri",
)  # fmt: skip


def lineage(
    experience: Annotated[
        int | None, typer.Argument(metavar="EXPERIENCE", help="Which steps and checkpoints were trained on it.")
    ] = None,
    checkpoint: Annotated[
        int | None,
        typer.Option("--checkpoint", metavar="STEP", help="Which experiences this checkpoint was trained on."),
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="RUN", help="Whose checkpoint; the newest run's by default.")
    ] = None,
    origin: Annotated[
        bool,
        typer.Option("--origin", help="With EXPERIENCE: where it was imported from, hop by hop, the nearest first."),
    ] = False,
    pipeline: Annotated[
        bool,
        typer.Option(
            "--pipeline", help="With EXPERIENCE: what every stage and version of a pipeline found out and decided."
        ),
    ] = False,
    buffer: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show which steps and checkpoints used an experience, or which experiences a checkpoint has seen.

    corrected_since: the reward was changed after this step used it. Of an imported experience it says where it comes from, of a
    purged one by whom and why.
    """
    from rftcore.cli.output import print_rows

    if (experience is None) == (checkpoint is None) or ((origin or pipeline) and experience is None):
        raise QueryError(
            "rft lineage answers one question at a time",
            allowed="EXPERIENCE, or --checkpoint STEP",
            todo="give one of them",
        )
    with opened(buffer, "rft lineage") as found:
        database = found.database
        if experience is None:
            print_rows(*_of_checkpoint(found, run, checkpoint), as_json=as_json)
            return
        check_experience(found, experience)
        rows, columns, none = _answer(database, experience, origin=origin, pipeline=pipeline)
        if not (origin or pipeline or as_json):
            _tell(database, experience)
        if rows or as_json:
            print_rows(rows, columns, as_json=as_json)
        else:
            print(f"experience {experience} {none}")


def _answer(
    database: Database, experience: int, *, origin: bool, pipeline: bool
) -> tuple[list[Row], tuple[str, ...], str]:
    """The rows that answer a question about an experience, the columns to show, and what it means that there are none."""
    if origin:
        columns = ("buffer_id", "run", "experience_id")
        return _hops(database, experience), columns, "was not imported: it was stored in this buffer first"
    if pipeline:
        rows = database.fetch("pipeline_of_experience", experience_id=experience)
        return rows, ("at", "version", "stage", "what", "detail"), "has not been decided on by any pipeline"
    rows = database.fetch("lineage_of_experience", experience_id=experience)
    return rows, _STEPS, "has not been trained on: no step drew it"


def _of_checkpoint(buffer: Buffer, run: str | None, step: int | None) -> tuple[list[Row], tuple[str, ...]]:
    """What the weights of a checkpoint were trained on, and the columns to show."""
    found = buffer.find_run(run)
    steps = [r["trainer_step"] for r in buffer.database.fetch("lineage_steps", run_id=found.run_id)]
    if step not in steps:
        raise QueryError(
            f"run {found.name!r} has no checkpoint at this step",
            value=step,
            allowed=", ".join(map(str, steps)) or "none yet",
        )
    rows = buffer.database.fetch("lineage_of_checkpoint", run_id=found.run_id, step=step)
    return rows, ("trainer_step", "experience_id", "reward_used", "reward_now", "corrected_since")


def _hops(database: Database, experience: int) -> list[Row]:
    """Where an experience was before it came here, the nearest first."""
    rows = database.fetch("origins_of_experience", experience_id=experience)
    return [hop for row in rows for hop in (row, *reversed(row["earlier"]))]


def _tell(database: Database, experience: int) -> None:
    """What its steps do not say: where it comes from, where it went, and whether it was purged."""
    for row in database.fetch("origins_of_experience", experience_id=experience):
        place = "this buffer" if row["same_buffer"] else f"buffer {row['buffer_id']}"
        step = "" if row["policy_step"] is None else f", sampled by the policy of step {row['policy_step']}"
        print(f"comes from experience {row['experience_id']} of run {row['run']!r} in {place}{step}")
    for row in database.fetch("copies_of_experience", experience_id=experience):
        print(f"was imported into run {row['run']!r} as experience {row['experience_id']}")
    for row in database.fetch("kin_of_experience", experience_id=experience):
        if row["kin"] == "parent":
            print(f"was made of experience {row['experience_id']}")
        elif row["kin"] == "child":
            print(f"experience {row['experience_id']} was made of it")
        else:
            print(f"task {row['task_key']!r} of {row['source']!r} was made of it")
    for row in database.fetch("purge_of_experience", experience_id=experience):
        when = f"{row['purged_at']:%Y-%m-%d %H:%M}"
        print(
            f"its text and arrays were purged by {row['author']} on {when} (purge {row['purge_id']}): {row['reason']}"
        )
