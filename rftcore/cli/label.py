"""`rft label set|rollout|import|queue|undo|history`: corrections of rewards and answers to reviews."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rftcore.cli import label_kind
from rftcore.cli.session import AuthorOption, BufferOption, JsonOption, author, check_experience, opened

if TYPE_CHECKING:
    from rftdata.labels import LabelBatch

app = typer.Typer(
    help="Correct rewards while training runs. Every change is recorded and can be undone.", no_args_is_help=True
)

app.add_typer(label_kind.app, name="kind")

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
        Path, typer.Argument(metavar="FILE", help=".csv, .jsonl or .parquet: experience_id, reward[, turn, reason].")
    ],
    reason: ReasonOption = None,
    by: AuthorOption = None,
    final: FinalOption = False,
    uri: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Set many rewards from a file, all or none of them."""
    from rftdata import labels

    with opened(uri, "rft label", schema="migrate") as buffer:
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
    batch: Annotated[int, typer.Argument(metavar="BATCH", help="Id of the batch, as printed by `rft label history`.")],
    reason: ReasonOption = None,
    by: AuthorOption = None,
    uri: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Restore the rewards from before a batch; rows labelled again since then keep the later label."""
    from rftdata import labels

    with opened(uri, "rft label", schema="migrate") as buffer:
        done = labels.undo(buffer, batch, author=by or author(), reason=reason)
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
    """List changes of rewards with author, time and reason, newest first."""
    from rftcore.cli.output import print_rows
    from rftdata import labels

    with opened(uri, "rft label") as buffer:
        if experience is None and batch is None:
            rows = labels.batches(buffer, limit)
        else:
            rows = labels.history(buffer, experience, batch, limit)
        if not rows and experience is not None:
            check_experience(buffer, experience)
    if rows or as_json:
        print_rows(rows, as_json=as_json)
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
    if overruled := [*map(str, batch.overruled), *turns]:
        print(f", {len(overruled)} labelled again since then and not changed: {', '.join(overruled[:20])}", end="")
    print(f"; undo with `rft label undo {batch.label_batch_id}`" if batch.num_changed else "")
