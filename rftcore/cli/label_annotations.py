"""`rft label annotate|export`: labels of every kind, one by one and in files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rftcore.cli.session import AuthorOption, BufferOption, JsonOption, author, opened

if TYPE_CHECKING:
    from rftdata.annotations import AnnotationBatch


def annotate(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="Kind of label; `rft label kind list` has them.")],
    target: Annotated[
        int, typer.Argument(metavar="TARGET", help="Id of the experience, rollout, group or task, as the kind says.")
    ],
    value: Annotated[
        str, typer.Argument(metavar="VALUE", help="JSON, or the words themselves for a choice, a text or an edit.")
    ],
    reason: Annotated[str | None, typer.Option("--reason", help="Reason, stored with it.")] = None,
    confidence: Annotated[float | None, typer.Option("--confidence", help="How sure you are, from 0 to 1.")] = None,
    key: Annotated[
        str | None, typer.Option("--key", help="Key of the request: repeating it with the same key stores nothing.")
    ] = None,
    by: AuthorOption = None,
    uri: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Store a label of any kind. A further one by the same author about the same target supersedes it."""
    from rftdata.annotations import Annotation, kinds
    from rftdata.annotations import annotate as store
    from rftdata.annotations.values import value_of_text

    with opened(uri, "rft label", schema="migrate") as buffer:
        known = {found.kind: found for found in kinds(buffer)}.get(kind)
        meant = value_of_text(value, known)
        annotation = Annotation(kind, target, meant, reason=reason, confidence=confidence, key=key)
        stored = store(buffer, [annotation], author=by or author())
    print_annotations(stored, as_json)


def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help=".jsonl, .csv, .parquet, or .json for other tools.")],
    kinds: Annotated[
        list[str] | None, typer.Option("--kind", metavar="KIND", help="Only this kind; may be repeated.")
    ] = None,
    run: Annotated[str | None, typer.Option("--run", metavar="RUN", help="Only what is about this run.")] = None,
    to: Annotated[
        Literal["rows", "label-studio", "argilla"] | None,
        typer.Option("--format", help="Format; by default that of the file's name, and label-studio for .json."),
    ] = None,
    uri: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the annotations that stand to a file. `rft label import` reads all formats."""
    from rftcore.cli.output import print_json
    from rftdata.annotations.files import export_annotations

    with opened(uri, "rft label") as buffer:
        done = export_annotations(buffer, file, of_kinds=kinds, run=run, to=to)
    if as_json:
        files = [str(path) for path in done.files]
        print_json({"num_annotations": done.num_annotations, "left_out": done.left_out, "files": files})
        return
    print(f"{done.num_annotations} annotations written to {' and '.join(map(str, done.files))}")
    for sentence in done.left_out:
        print(sentence)


def print_annotations(batch: AnnotationBatch, as_json: bool) -> None:
    """Print the result of a batch of annotations."""
    from dataclasses import asdict

    from rftcore.cli.output import print_json

    if as_json:
        print_json(asdict(batch))
        return
    stored = len(batch.annotation_ids) - batch.num_repeated - batch.num_unchanged
    line = (
        f"label batch {batch.label_batch_id}: {stored} stored, {batch.num_superseded} of them in place of earlier ones"
    )
    if batch.num_unchanged:
        line += f", {batch.num_unchanged} stood already"
    if batch.num_repeated:
        line += f", {batch.num_repeated} stored before under the same key"
    print(line + (f"; undo with `rft label undo {batch.label_batch_id}`" if stored else ""))
