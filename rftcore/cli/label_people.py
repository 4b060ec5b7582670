"""`rft label ask|agreement|disagreements|adjudicate|gold|permit`: labelling by several people."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rftcore.cli.session import AuthorOption, BufferOption, JsonOption, author, opened

if TYPE_CHECKING:
    from rftdata.annotations.quality import KindQuality
    from rftdata.buffer import Buffer

KindArgument = Annotated[str, typer.Argument(metavar="KIND", help="Name of the kind.")]
RunOption = Annotated[str | None, typer.Option("--run", metavar="RUN", help="Only this run; all runs by default.")]


def ask(
    kind: KindArgument,
    query: Annotated[
        str,
        typer.Argument(
            metavar="SQL", help="A query with the ids of the targets in its first column, in the order of the queue."
        ),
    ],
    people: Annotated[
        int, typer.Option("--people", min=1, max=100, help="How many accounts are to label each target.")
    ] = 1,
    by: Annotated[
        Literal["given", "uncertainty", "disagreement"],
        typer.Option(
            "--by",
            help="Order of the queue: as given, least confident judge first, or most different annotations first.",
        ),
    ] = "given",
    author_name: AuthorOption = None,
    uri: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ask people to label targets. Each is handed to as many accounts as are wanted, and to no more."""
    from rftcore.cli.output import print_json
    from rftdata.annotations import questions

    with opened(uri, "rft label", schema="migrate") as buffer:
        ids = buffer.sql(query).column(0).to_pylist()
        num = questions.ask(buffer, kind, ids, author=author_name or author(), wanted=people, order=by)
    if as_json:
        print_json({"num_targets": num})
    else:
        print(f"{num:,} targets for {people} {'person' if people == 1 else 'people'} each: {kind}")


def agreement(
    kind: Annotated[str | None, typer.Option("--kind", metavar="KIND", help="Only this kind; all by default.")] = None,
    run: RunOption = None,
    uri: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how well people agree (Krippendorff's alpha, kappas, F1 of spans), and how each of them works."""
    from rftcore.cli.output import print_json
    from rftdata.annotations.quality import quality

    with opened(uri, "rft label") as buffer:
        found = quality(buffer, kind=kind, run_id=_run_id(buffer, run))
    if as_json:
        print_json([_plain(each) for each in found])
    elif not found:
        print("there are no labels" + (f" with {kind}" if kind else ""))
    else:
        for each in found:
            _print_kind(each)


def _plain(found: KindQuality) -> dict[str, Any]:
    cohen = [{"people": pair, "kappa": kappa, "num_units": num} for pair, (kappa, num) in found.cohen.items()]
    return {**asdict(found), "cohen": cohen}


def _print_kind(found: KindQuality) -> None:
    from rftcore.cli.output import print_rows

    print(f"{found.kind} ({found.type}, {found.level}): {found.num_targets:,} targets, {len(found.people)} people")
    if found.alpha is not None:
        span = "" if found.alpha.low is None else f", 95 % interval {found.alpha.low:.3f} to {found.alpha.high:.3f}"
        print(
            f"  Krippendorff's alpha {_number(found.alpha.value)}{span}, {found.alpha.num_units:,} units with several ratings"
        )
        print(f"  Fleiss' kappa {_number(found.fleiss)}")
    for (one, two), (kappa, num) in found.cohen.items():
        print(f"  Cohen's kappa of {one} and {two}: {_number(kappa)} ({num:,} units)")
    if found.type == "spans":
        print(f"  F1 of spans {_number(found.span_f1)}")
    print_rows(found.people)


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.3f}"


def disagreements(
    kind: KindArgument,
    run: RunOption = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Maximum number of lines.")] = 20,
    uri: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """List targets about which people disagree, with all answers, for `rft label adjudicate`."""
    from rftcore.cli.output import print_rows
    from rftdata.annotations import questions

    with opened(uri, "rft label") as buffer:
        rows = questions.disagreements(buffer, kind, run_id=_run_id(buffer, run), limit=limit)
    print_rows(rows, ("target_id", "group_id", "num_people", "answers"), as_json=as_json)


def adjudicate(
    kind: KindArgument,
    target: Annotated[int, typer.Argument(metavar="TARGET", help="Id of the target.")],
    value: Annotated[str, typer.Argument(metavar="VALUE", help="The right value, as JSON.")],
    reason: Annotated[str | None, typer.Option("--reason", help="Reason, stored with the decision.")] = None,
    by: AuthorOption = None,
    uri: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Decide on a target about which people disagree. Chains use the decision alone, and the value becomes a known answer."""
    from rftcore.cli.output import print_json
    from rftdata.annotations import questions

    with opened(uri, "rft label", schema="migrate") as buffer:
        key = questions.adjudicate(buffer, kind, target, _json(value), author=by or author(), reason=reason)
    if as_json:
        print_json({"annotation_id": key})
    else:
        print(f"{kind} of {target} is decided: annotation {key}")


def gold(
    kind: KindArgument,
    values: Annotated[
        list[str] | None, typer.Argument(metavar="[TARGET=VALUE]…", help="Known answers: an id and a value as JSON.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", min=0, max=0.5, help="Share of handed-out questions with a known answer.")
    ] = None,
    by: AuthorOption = None,
    uri: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Store known answers, which the queue of the kind mixes in to measure people."""
    from rftcore.cli.output import print_json
    from rftdata.annotations import questions

    known: dict[int, Any] = {}
    for text in values or []:
        target, _, value = text.partition("=")
        if not target.isdecimal():
            raise typer.BadParameter(f"{text}: write TARGET=VALUE, for example 12=true")
        known[int(target)] = _json(value)
    if not known and rate is None:
        raise typer.BadParameter("name a known answer or a --rate")
    with opened(uri, "rft label", schema="migrate") as buffer:
        questions.add_gold(buffer, kind, known, author=by or author(), rate=rate)
    if as_json:
        print_json({"num_gold": len(known), "rate": rate})
    else:
        print(
            f"{kind}: {len(known)} known answers stored"
            + ("" if rate is None else f", handed out at a rate of {rate:g}")
        )


def permit(
    account: Annotated[str, typer.Argument(metavar="ACCOUNT", help="The database account.")],
    kind: Annotated[
        str | None, typer.Option("--kind", metavar="KIND", help="Only this kind; `reward`: rewards and reviews.")
    ] = None,
    run: Annotated[str | None, typer.Option("--run", metavar="RUN", help="Only this run.")] = None,
    taskset: Annotated[str | None, typer.Option("--taskset", metavar="TASKSET", help="Only this taskset.")] = None,
    by: AuthorOption = None,
    uri: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Limit an account to what it is permitted to label, and add a permission. rft.label_permission lists them; revoked_at ends one."""
    from rftcore.cli.output import print_json
    from rftdata.annotations import questions

    with opened(uri, "rft label", schema="migrate") as buffer:
        questions.permit(
            buffer, account, author=by or author(), kind=kind, run_id=_run_id(buffer, run), taskset=taskset
        )
    if as_json:
        print_json({"account": account, "kind": kind, "run": run, "taskset": taskset})
    else:
        limits = ", ".join(
            f"{name} {value}" for name, value in (("kind", kind), ("run", run), ("taskset", taskset)) if value
        )
        print(f"{account} may label: {limits or 'everything'}")


def _run_id(buffer: Buffer, run: str | None) -> int | None:
    return None if run is None else buffer.find_run(run).run_id


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f'{text}: a value is JSON, for example true, 0.5 or "good"') from error
