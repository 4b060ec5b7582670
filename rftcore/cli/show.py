"""`rft show`: a stored experience, rollout or group, or the answers to a question of an evaluation, in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from rftcore.cli.session import BufferOption, JsonOption, opened
from rftdata.errors import QueryError

if TYPE_CHECKING:
    from rftcore.reporting.rollout_text import Decode
    from rftdata.buffer import Buffer


def show(
    experience: Annotated[int | None, typer.Argument(metavar="EXPERIENCE", help="Id of an experience.")] = None,
    rollout: Annotated[
        int | None, typer.Option("--rollout", metavar="ID", help="Show all experiences of this rollout.")
    ] = None,
    group: Annotated[int | None, typer.Option("--group", metavar="ID", help="Show the rollouts of this group.")] = None,
    evaluation: Annotated[
        int | None, typer.Option("--evaluation", metavar="ID", help="With --task: show the answers of this evaluation.")
    ] = None,
    task: Annotated[
        str | None, typer.Option("--task", metavar="KEY", help="With --evaluation: the task_key of the question.")
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Show a line for each token, with its id and its log-probability.")
    ] = False,
    uri: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a stored experience: its chat, its tokens, its rewards and what became of it.

    What is trained on has a bar (┃) at its left: the answers of the model. Prompts and what tools or environments wrote have none. Control characters
    of the texts are shown as escapes. Texts and arrays of archived runs are read from their files.
    """
    from rftcore.cli.output import print_json
    from rftcore.reporting.rollout_text import RolloutPrinter
    from rftcore.reporting.stored_rollout import json_of, print_answers, print_group, print_rollout
    from rftdata.reports import stored_rollouts

    if sum(each is not None for each in (experience, rollout, group, evaluation)) != 1:
        raise QueryError(
            "rft show shows one thing at a time",
            allowed="EXPERIENCE, --rollout ID, --group ID or --evaluation ID",
            todo="use only one of them",
        )
    with opened(uri, "rft show") as buffer:
        if evaluation is not None:
            answers = stored_rollouts.stored_answers(buffer, evaluation, task)
            if as_json:
                print_json([json_of(answer) for answer in answers])
            else:
                print_answers(RolloutPrinter(None), answers)
            return
        if group is not None:
            found_group = stored_rollouts.stored_group(buffer, group)
            if as_json:
                print_json(json_of(found_group))
            else:
                print_group(RolloutPrinter(None), found_group)
            return
        if experience is not None:
            found = stored_rollouts.stored_experience(buffer, experience)
        else:
            assert rollout is not None
            found = stored_rollouts.stored_rollout(buffer, rollout)
        decode = None if as_json else _decode(buffer, found.run_id)
    if as_json:
        print_json(json_of(found))
    else:
        print_rollout(RolloutPrinter(decode, each_token=tokens), found)


def _decode(buffer: Buffer, run_id: int) -> Decode | None:
    """Return what turns tokens of a run into text; None if its model's tokenizer is not on this machine."""
    from rftcore.cli.output import warn
    from rftcore.reporting.stored_rollout import tokenizer_of

    tokenizer, reason = tokenizer_of(buffer.find_run(run_id).config)
    if tokenizer is None:
        warn(f"tokens are shown as ids: {reason}")
        return None

    def decode(ids: Any) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    return decode
