"""`rft pairs build|labels|export`: preference pairs from the rewards of a run's groups, or from what people ranked and edited."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rftcore.cli.session import AuthorOption, BufferOption, JsonOption, RunArgument, author, opened

if TYPE_CHECKING:
    from rftcore.pipeline.pairs import BuiltPairs, PreferredPairs

IncludeDroppedOption = Annotated[
    bool, typer.Option("--include-dropped", help="Also use answers that the chain of the run dropped.")
]

IncludeBlindOption = Annotated[
    bool,
    typer.Option(
        "--include-blind",
        help="Also use rankings and edits of blind kinds. This shows them: every account that may read sees the pairs.",
    ),
]

app = typer.Typer(help="Preference pairs: which of two answers to a prompt is better.", no_args_is_help=True)


@app.command("build")
def build(
    run: RunArgument = None,
    margin: Annotated[
        float, typer.Option("--margin", help="Smallest difference of rewards between chosen and rejected.")
    ] = 0.5,
    max_pairs: Annotated[int, typer.Option("--max-pairs", help="Maximum number of pairs per group.")] = 4,
    ties: Annotated[
        str, typer.Option("--ties", help="Choice between equally distant pairs: length (closest in length) or order.")
    ] = "length",
    max_length_ratio: Annotated[
        float | None,
        typer.Option("--max-length-ratio", help="Largest ratio between the numbers of tokens of the two answers."),
    ] = None,
    include_dropped: IncludeDroppedOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count the pairs and store none.")] = False,
    by: AuthorOption = None,
    uri: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Build preference pairs from the current rewards of RUN's groups; pairs that are already stored are skipped.

    The rules are those of the operator pair_builder. Answers that the chain of RUN dropped are not compared.
    Pairs are stored in rft.preference_pair; rft.v_pair shows them with their texts,
    the current rewards, whether these still support them, and how each answer ended.
    """
    from operators.experience.pair_builder import PairBuilder
    from rftcore.cli.output import print_json
    from rftcore.pipeline.pairs import build_pairs

    arguments = {"margin": margin, "max_pairs": max_pairs, "ties": ties, "max_length_ratio": max_length_ratio}
    builder = PairBuilder.from_args(arguments)
    assert isinstance(builder, PairBuilder)
    with opened(uri, "rft pairs", schema="check" if dry_run else "migrate") as buffer:
        built = build_pairs(
            buffer.find_run(run), builder, author=by or author(), dry_run=dry_run, include_dropped=include_dropped
        )
    if as_json:
        print_json(asdict(built))
    else:
        _print_built(built)


@app.command("labels")
def labels(
    run: RunArgument = None,
    min_agreement: Annotated[
        float,
        typer.Option(
            "--min-agreement",
            help="Smallest share of people's comparisons in which the chosen answer is better; more than half in any case.",
        ),
    ] = 0.5,
    include_dropped: IncludeDroppedOption = False,
    include_blind: IncludeBlindOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count the pairs and store none.")] = False,
    by: AuthorOption = None,
    uri: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Store the preference pairs that people's rankings and edits of RUN give; pairs that are already stored are skipped.

    A ranking compares every two of its answers. An edited response (`rft label edits`) is better than what was edited.
    rft.v_preference has what each person prefers; rft.v_preferred_pair has each pair on which most people agree once, with their number and share.
    """
    from rftcore.cli.output import print_json
    from rftcore.pipeline.pairs import pairs_of_labels

    with opened(uri, "rft pairs", schema="check" if dry_run else "migrate") as buffer:
        found = pairs_of_labels(
            buffer.find_run(run),
            author=by or author(),
            min_agreement=min_agreement,
            dry_run=dry_run,
            include_dropped=include_dropped,
            include_blind=include_blind,
        )
    if as_json:
        print_json(asdict(found))
    else:
        _print_preferred(found)


@app.command("export")
def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .jsonl or .parquet file to write.")],
    run: RunArgument = None,
    include_dropped: IncludeDroppedOption = False,
    uri: BufferOption = None,
) -> None:
    """Write the pairs of RUN that its rewards support to FILE, with columns prompt, chosen, rejected and their origin.

    Pairs with an answer that the chain of RUN dropped are left out.
    """
    from rftdata.attempts.dropped import by_reason
    from rftdata.exchange.pairs import export_pairs

    with opened(uri, "rft pairs") as buffer:
        of_run = buffer.find_run(run)
        exported = export_pairs(of_run, file, include_dropped=include_dropped)
    print(f"{exported.num_pairs} pairs of {of_run.name} written to {file}")
    if exported.dropped:
        print(
            f"left out: pairs with answers that the chain dropped, {by_reason(exported.dropped)}; --include-dropped writes them"
        )


def _print_preferred(found: PreferredPairs) -> None:
    from rftdata.attempts.dropped import by_reason

    new = f"{found.num_new} of them new" + ("" if found.stored else ", none stored (--dry-run)")
    print(f"{found.num_pairs} pairs from labels of {found.run}, {found.num_from_edits} of them from edits, {new}")
    if found.num_undecided:
        print(f"{found.num_undecided} compared pairs on which people agree too little")
    if found.num_blind:
        print(
            f"{found.num_blind} pairs compared in blind kinds, whose rankings and edits were not used; --include-blind uses and shows them"
        )
    if found.num_other_prompts:
        print(f"{found.num_other_prompts} compared pairs of answers to different prompts")
    if found.dropped:
        print(f"not used, since the chain dropped them: {by_reason(found.dropped)}; --include-dropped uses them")
    if found.num_pairs and found.stored:
        more = ", include_dropped: true" if found.include_dropped else ""
        print(
            'train on them: sampling.source: {sql: "select pair_id from rft.v_preferred_pair where '
            f"run in ('{found.run}', '{found.run}-edits')\"{more}}}"
        )


def _print_built(built: BuiltPairs) -> None:
    from rftdata.attempts.dropped import by_reason

    new = f"{built.num_new} of them new" + ("" if built.stored else ", none stored (--dry-run)")
    print(
        f"{built.num_pairs} pairs in {built.num_groups_with_pairs} of {built.num_groups} groups of {built.run}, {new}"
    )
    if built.num_pairs:
        print(
            f"length: the chosen answer is longer in {built.chosen_longer:.0%} and shorter in {built.rejected_longer:.0%} of them; "
            f"on average {built.chosen_tokens:.1f} against {built.rejected_tokens:.1f} tokens"
        )
    if built.dropped:
        print(
            f"not compared, since the chain dropped them: {by_reason(built.dropped)}; --include-dropped compares them"
        )
    if built.num_pairs and built.stored:
        more = ", include_dropped: true" if built.include_dropped else ""
        print(
            f"train on them: sampling.source: {{sql: \"select pair_id from rft.v_preferred_pair where run = '{built.run}'\"{more}}}"
        )
