"""`rft label edits`: renders edited responses as experiences to train on."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rftcore.cli.session import BufferOption, JsonOption, RunArgument, opened
from rftdata.errors import QueryError

if TYPE_CHECKING:
    from rftdata.run import Run


def edits(
    run: RunArgument = None,
    into: Annotated[
        str | None, typer.Option("--into", metavar="NAME", help="Run that takes the experiences; RUN-edits by default.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Folder or Hugging Face id with the tokenizer; the model of RUN by default."),
    ] = None,
    include_blind: Annotated[
        bool,
        typer.Option(
            "--include-blind",
            help="Also render edits of blind kinds. This shows them: every account that may read sees the experiences.",
        ),
    ] = False,
    uri: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Render the edited responses of RUN's experiences as experiences, each once.

    An experience that renders an edit is a child of the one that was edited, with the same prompt. It has no log-probabilities:
    train on it with sft, or prefer it to its parent (`rft pairs labels`). Once the edit is undone or superseded, stored selections leave it out.
    """
    from transformers import AutoTokenizer

    from rftcore.cli.output import print_json
    from rftcore.pipeline.edited_responses import render_edits

    with opened(uri, "rft label", schema="migrate") as buffer:
        edited = buffer.find_run(run)
        tokenizer: Any = AutoTokenizer.from_pretrained(_model(edited, model))
        result = render_edits(buffer, edited, tokenizer, into=into, include_blind=include_blind)
    if as_json:
        print_json(asdict(result))
        return
    for reason in result.refused.values():
        print(f"not rendered: {reason}")
    if result.num_blind:
        print(f"{result.num_blind} edits of blind kinds left out; --include-blind renders and shows them")
    if result.run is None:
        print(f"no edit of {edited.name} waits to be rendered")
        return
    print(f"{result.num_rendered} edits of {edited.name} rendered in the run {result.run}")
    if result.num_rendered:
        print(
            f"train on them: sampling.source: {{sql: \"select experience_id from rft.v_experience where run = '{result.run}'\"}}, algorithm: {{name: sft}}"
        )


def _model(run: Run, model: str | None) -> str:
    """Return the folder of the model whose chat template renders edits."""
    from rftcore.model_folder import resolve_model
    from rftdata.attempts.run_models import models_of

    policies = [used.uri for used in models_of(run) if used.used_as == "policy"]
    if model is None and not policies:
        raise QueryError(
            f"the run {run.name!r} names no model, whose chat template would render its edits",
            todo="name one: --model FOLDER",
        )
    return str(resolve_model(model or policies[0], key="--model"))
