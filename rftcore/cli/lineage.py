"""`rft lineage`: from an experience to steps and checkpoints, and from a checkpoint to experiences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rftcore.cli.session import BufferOption, JsonOption, check_experience, opened
from rftdata.errors import QueryError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rftdata.buffer import Buffer
    from rftdata.reports.lineage import EarlierExperience, Finding, Use

_STEPS = (
    "run",
    "attempt_id",
    "trainer_step",
    "reward_used",
    "reward_now",
    "corrected_since",
    "checkpoint_step",
    "checkpoint_uri",
)
_OF_TURNS = ("turn_rewards_used", "turn_rewards_now")
_OF_CHECKPOINT = ("trainer_step", "experience_id", "reward_used", "reward_now", "corrected_since")


def lineage(
    experience: Annotated[
        int | None, typer.Argument(metavar="EXPERIENCE", help="Show the steps and checkpoints trained on it.")
    ] = None,
    checkpoint: Annotated[
        int | None,
        typer.Option("--checkpoint", metavar="STEP", help="Show the experiences this checkpoint was trained on."),
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="RUN", help="Run of the checkpoint; the newest by default.")
    ] = None,
    origin: Annotated[
        bool,
        typer.Option("--origin", help="With EXPERIENCE: show the buffers it was imported from, nearest first."),
    ] = False,
    pipeline: Annotated[
        bool,
        typer.Option(
            "--pipeline", help="With EXPERIENCE: show the scores and verdicts of all stages and pipeline versions."
        ),
    ] = False,
    uri: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show which steps and checkpoints used an experience, or which experiences a checkpoint was trained on.

    corrected_since: the reward, or that of a turn, was changed after this step used it. turn_rewards_used is empty where they were as
    sampled. For an imported experience it shows the origin, for a purged one the author and the reason of the purge.
    """
    from rftcore.cli.output import print_rows
    from rftdata.reports.lineage import trained_on

    if (experience is None) == (checkpoint is None) or ((origin or pipeline) and experience is None):
        raise QueryError(
            "rft lineage answers one question at a time",
            allowed="EXPERIENCE, or --checkpoint STEP",
            todo="use only one of them",
        )
    with opened(uri, "rft lineage") as buffer:
        if experience is None:
            print_rows(trained_on(buffer.find_run(run), checkpoint), _OF_CHECKPOINT, as_json=as_json)
            return
        check_experience(buffer, experience)
        rows, columns, none = _answer(buffer, experience, origin=origin, pipeline=pipeline)
        if not (origin or as_json):
            _print_archive(buffer, experience)
        if not (origin or pipeline or as_json):
            _print_facts(buffer, experience)
        if rows or as_json:
            print_rows(rows, columns, as_json=as_json)
        else:
            print(f"experience {experience} {none}")


def _answer(
    buffer: Buffer, experience: int, *, origin: bool, pipeline: bool
) -> tuple[Sequence[EarlierExperience] | Sequence[Finding] | Sequence[Use], tuple[str, ...], str]:
    """Return the rows that answer a question about an experience, the columns to show, and a sentence for no rows."""
    from rftdata.reports import lineage

    if origin:
        none = "was not imported: it was first stored in this buffer"
        return lineage.earlier_experiences(buffer.database, experience), ("buffer_id", "run", "experience_id"), none
    if pipeline:
        columns = ("at", "version", "stage", "what", "detail")
        return lineage.findings(buffer.database, experience), columns, "has not been decided on by any pipeline"
    uses = lineage.uses(buffer.database, experience)
    of_turns = _OF_TURNS if any(use.turn_rewards_now for use in uses) else ()
    return uses, (*_STEPS[:5], *of_turns, *_STEPS[5:]), "has not been trained on: no step drew it"


def _print_archive(buffer: Buffer, experience: int) -> None:
    from rftdata.reports.lineage import archived_with

    if (run := archived_with(buffer.database, experience)) is not None:
        there = f"its text, arrays and scores are archived with the run {run!r}"
        print(f"{there}: `rft query` reads them, and `rft restore-run {run}` brings them back")


def _print_facts(buffer: Buffer, experience: int) -> None:
    """Print facts beyond the steps: origin, imports, created rows and a purge."""
    from rftdata.reports import lineage

    if (origin := lineage.origin(buffer.database, experience)) is not None:
        place = "this buffer" if origin.same_buffer else f"buffer {origin.buffer_id}"
        step = "" if origin.policy_step is None else f", sampled by the policy of step {origin.policy_step}"
        print(f"comes from experience {origin.experience_id} of run {origin.run!r} in {place}{step}")
    for model in lineage.reward_models(buffer.database, experience):
        trained = "" if model.trained_by is None else f" of step {model.trainer_step} of run {model.trained_by!r}"
        print(f"its reward is the score of the model{trained}: {model.uri}")
    for copy in lineage.copies(buffer.database, experience):
        print(f"was imported into run {copy.run!r} as experience {copy.experience_id}")
    for row in lineage.related_rows(buffer.database, experience):
        if row.relation == "parent":
            print(f"was created from experience {row.experience_id}")
        elif row.relation == "child":
            print(f"experience {row.experience_id} was created from it")
        else:
            print(f"task {row.task_key!r} of {row.source!r} was created from it")
    if (purge := lineage.purge_of(buffer.database, experience)) is not None:
        when = f"{purge.purged_at:%Y-%m-%d %H:%M}"
        print(f"its text and arrays were purged by {purge.author} on {when} (purge {purge.purge_id}): {purge.reason}")
