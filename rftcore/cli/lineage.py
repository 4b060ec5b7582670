"""`rft lineage`: from an experience to steps and checkpoints, and back."""

from __future__ import annotations

from typing import Annotated

import typer

from rftcore.cli.session import BufferOption, JsonOption, opened
from rftdata.errors import QueryError


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
    buffer: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show which steps and checkpoints used an experience, or which experiences a checkpoint has seen.

    corrected_since: the reward was changed after this step used it.
    """
    from rftcore.cli.output import print_rows

    if (experience is None) == (checkpoint is None):
        raise QueryError(
            "rft lineage answers one question at a time",
            allowed="EXPERIENCE, or --checkpoint STEP",
            todo="give one of them",
        )
    with opened(buffer, "rft lineage") as found:
        database = found.database
        if experience is not None:
            if not database.fetch("experience_exists", experience_id=experience):
                raise QueryError(
                    "there is no such experience",
                    value=experience,
                    todo='`rft sql "select * from v_experience limit 5"` shows some',
                )
            rows = database.fetch("lineage_of_experience", experience_id=experience)
            names = (
                "run",
                "attempt_id",
                "trainer_step",
                "reward_used",
                "reward_now",
                "corrected_since",
                "checkpoint_step",
                "checkpoint_uri",
            )
        else:
            row = found.find_run(run)
            steps = [r["trainer_step"] for r in database.fetch("lineage_steps", run_id=row["run_id"])]
            if checkpoint not in steps:
                raise QueryError(
                    f"run {row['name']!r} has no checkpoint at this step",
                    value=checkpoint,
                    allowed=", ".join(map(str, steps)) or "none yet",
                )
            rows = database.fetch("lineage_of_checkpoint", run_id=row["run_id"], step=checkpoint)
            names = ("trainer_step", "experience_id", "reward_used", "reward_now", "corrected_since")
    print_rows(rows, names, as_json=as_json)
