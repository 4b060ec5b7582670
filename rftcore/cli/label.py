"""`rft label set|rollout|import|queue|undo|history`: corrections of rewards and answers to reviews."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rftcore.cli import label_annotations, label_edits, label_kind, label_people
from rftcore.cli.session import AuthorOption, BufferOption, JsonOption, author, check_experience, opened

if TYPE_CHECKING:
    from rftdata.labels import LabelBatch

app = typer.Typer(
    help="Correct rewards while training runs. Every change is recorded and can be undone.", no_args_is_help=True
)

app.add_typer(label_kind.app, name="kind")
app.command("annotate")(label_annotations.annotate)
app.command("export")(label_annotations.export)
app.command("edits")(label_edits.edits)
for _command in (
    label_people.ask,
    label_people.agreement,
    label_people.disagreements,
    label_people.adjudicate,
    label_people.gold,
    label_people.permit,
):
    app.command(_command.__name__)(_command)

ReasonOption = Annotated[str | None, typer.Option("--reason", help="Reason, stored with every label.")]
FinalOption = Annotated[bool, typer.Option("--final", help="These rewards bypass reward shaping by the pipeline.")]


# A negative reward must not be read as an option.
@app.command("set", context_settings={"ignore_unknown_options": True})
def set_one(
    experience: Annotated[int, typer.Argument(metavar="EXPERIENCE", help="Id of the experience.")],
    reward: Annotated[float, typer.Argument(metavar="REWARD", help="The new reward.")],
    turn: Annotated[
        int | None,
        typer.Option(
            "--turn", metavar="TURN", min=0, help="Set the reward of this turn alone, by its number in the rollout."
        ),
    ] = None,
    reason: ReasonOption = None,
    by: AuthorOption = None,
    final: FinalOption = False,
    uri: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Set the reward of one experience, or of one of its turns. rft.turn_reward has the rewards of turns."""
    from rftdata import labels

    label = labels.RewardLabel(experience, reward, final, reason, turn)
    with opened(uri, "rft label", schema="migrate") as buffer:
        batch = labels.apply(buffer, [label], author=by or author(), source="set")
    _print_batch(batch, as_json)


@app.command("rollout", context_settings={"ignore_unknown_options": True})
def set_rollout(
    rollout: Annotated[
        int, typer.Argument(metavar="ROLLOUT", help="Id of the rollout: rollout_id in rft.v_experience.")
    ],
    reward: Annotated[float, typer.Argument(metavar="REWARD", help="The new reward.")],
    reason: ReasonOption = None,
    by: AuthorOption = None,
    final: FinalOption = False,
    uri: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Set the reward of all experiences of a rollout, as one batch. A rollout whose chats branched has several."""
    from rftdata import labels

    with opened(uri, "rft label", schema="migrate") as buffer:
        batch = labels.set_rollout_reward(buffer, rollout, reward, author=by or author(), reason=reason, final=final)
    _print_batch(batch, as_json)


@app.command("import")
def import_file(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help=".csv, .jsonl or .parquet with experience_id, reward[, turn, reason], or with kind, target_id, value[, author, reason, …];"
            " or the .json of Label Studio or Argilla.",
        ),
    ],
    reason: ReasonOption = None,
    by: AuthorOption = None,
    final: FinalOption = False,
    suggestions: Annotated[
        bool,
        typer.Option("--suggestions", help="Import predictions and suggestions of models, too, as those of judges."),
    ] = False,
    uri: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Set many rewards, or store many annotations, from a file, all or none of them. Importing a file again changes nothing."""
    from rftdata import labels
    from rftdata.annotations.files import import_annotations, is_annotations

    with opened(uri, "rft label", schema="migrate") as buffer:
        if is_annotations(file):
            stored = import_annotations(buffer, file, author=by or author(), reason=reason, with_judges=suggestions)
            label_annotations.print_annotations(stored, as_json)
            return
        batch = labels.import_rewards(buffer, file, author=by or author(), reason=reason, final=final)
    _print_batch(batch, as_json)


@app.command("queue")
def queue(
    run: Annotated[str | None, typer.Option("--run", metavar="RUN", help="Only this run; all runs by default.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Maximum number of lines.")] = 20,
    uri: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """List reviews that wait for a person (stage human_review), most urgent first.

    Any new reward is an answer. To answer without a change, use `rft label set EXPERIENCE REWARD` with the current reward.
    """
    from rftcore.cli.output import print_rows
    from rftdata import labels

    with opened(uri, "rft label") as buffer:
        rows = labels.review_queue(buffer, None if run is None else buffer.find_run(run).run_id, limit)
    names = ("experience_id", "run", "name", "question", "reward", "seconds_left", "otherwise", "prompt", "response")
    print_rows(rows, names, as_json=as_json)


@app.command("undo")
def undo(
    batch: Annotated[
        int | None, typer.Argument(metavar="BATCH", help="Id of the batch, as printed by `rft label history`.")
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", help="Undo the annotation that was stored under this key, and no batch.")
    ] = None,
    reason: ReasonOption = None,
    by: AuthorOption = None,
    uri: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Restore the rewards and annotations from before a batch; what was labelled again since then keeps the later label."""
    from rftdata import labels
    from rftdata.annotations import undo_key

    if (batch is None) == (key is None):
        raise typer.BadParameter("name either a batch or a --key")
    with opened(uri, "rft label", schema="migrate") as buffer:
        if batch is not None:
            done = labels.undo(buffer, batch, author=by or author(), reason=reason)
        elif key is not None:
            done = undo_key(buffer, key, author=by or author(), reason=reason)
    _print_batch(done, as_json)


@app.command("history")
def history(
    experience: Annotated[
        int | None, typer.Argument(metavar="EXPERIENCE", help="Show its labels; omit it for the newest batches.")
    ] = None,
    batch: Annotated[int | None, typer.Option("--batch", help="Show the labels of one batch.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Maximum number of lines.")] = 20,
    uri: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """List changes of rewards, and annotations, with author, time and reason, newest first."""
    from rftcore.cli.output import print_rows
    from rftdata import annotations, labels

    annotated: list[dict[str, object]] = []
    with opened(uri, "rft label") as buffer:
        if experience is None and batch is None:
            rows = labels.batches(buffer, limit)
        else:
            rows = labels.history(buffer, experience, batch, limit)
            about = {} if experience is None else {"target": "experience", "target_id": experience}
            annotated = annotations.history(buffer, label_batch_id=batch, limit=limit, **about)  # type: ignore[arg-type]
        if not rows and not annotated and experience is not None:
            check_experience(buffer, experience)
    if as_json:
        print_rows([*rows, *annotated], as_json=True)
    elif rows or annotated:
        for found in filter(None, (rows, annotated)):
            print_rows(found)
    elif batch is not None:
        of = "" if experience is None else f" of experience {experience}"
        print(f"batch {batch} has no label{of}: `rft label history` lists the newest batches")
    elif experience is not None:
        print(f"experience {experience} was never labelled: it still has its first reward")
    else:
        print("nothing was labelled in this buffer")


def _print_batch(batch: LabelBatch, as_json: bool) -> None:
    from rftcore.cli.output import print_json

    if as_json:
        print_json(asdict(batch))
        return
    print(
        f"label batch {batch.label_batch_id}: {batch.num_changed} changed, {batch.num_unchanged} already had the value",
        end="",
    )
    if batch.num_answered:
        print(f", {batch.num_answered} reviews answered", end="")
    turns = [f"turn {turn} of {key}" for key, turn in batch.overruled_turns]
    if batch.num_annotations:
        print(f", {batch.num_annotations} annotations undone", end="")
    annotations = [f"annotation {key}" for key in batch.overruled_annotations]
    if overruled := [*map(str, batch.overruled), *turns, *annotations]:
        print(f", {len(overruled)} labelled again since then and not changed: {', '.join(overruled[:20])}", end="")
    print(f"; undo with `rft label undo {batch.label_batch_id}`" if batch.num_changed or batch.num_annotations else "")
