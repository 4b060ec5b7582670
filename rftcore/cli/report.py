"""`rft report`: the final table of a run, or of two side by side, read from the buffer only."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from rftcore.cli.output import print_json
from rftcore.cli.session import BufferOption, JsonOption, opened


def report(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="Name or id; the newest run by default.")] = None,
    other: Annotated[str | None, typer.Argument(metavar="OTHER", help="A second run to compare with.")] = None,
    uri: BufferOption = None,
    as_json: JsonOption = False,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="Also draw the learning curve of RUN into this file.")
    ] = None,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Also print where every second of each role went, by activity.")
    ] = False,
    timeline_file: Annotated[
        Path | None,
        typer.Option(
            "--timeline-file",
            metavar="FILE",
            help="Also draw what each process of RUN did when: an image, or with the suffix .json a trace for Perfetto.",
        ),
    ] = None,
) -> None:
    """Print the results of a run: held-out score before and after, steps, tokens, dropped rows with reasons.

    With OTHER, both runs are compared question by question on the tasksets that both answered, each at its best step, or with what `rft eval` stored:
    the mean difference with its standard error, 95 % interval and two-sided p of a paired test by the normal approximation, and on how many
    questions each is better.
    """
    from rftcore.reporting import report as reports
    from rftcore.reporting.table import print_report
    from rftcore.reporting.timeline_table import print_timeline
    from rftdata.reports.results import RunResults
    from rftdata.reports.timeline import timeline_of

    with opened(uri, "rft report") as buffer:
        built = [reports.build_report(buffer, name) for name in ([run] if other is None else [run, other])]
        runs = [buffer.find_run(one.run_id) for one in built]
        spans = RunResults(runs[0]).spans() if timeline_file is not None else []
        timelines = [timeline_of(one) for one in runs] if timeline else []
        between = reports.compare(*runs) if other is not None else None
    if png is not None:
        from rftcore.reporting.learning_curve import write_learning_curve

        write_learning_curve(built[0], png)
    if timeline_file is not None:
        from rftcore.reporting.timeline import write_timeline

        write_timeline(built[0].run, spans, timeline_file)
    if not as_json:
        print_report(built, between)
        for one, times in zip(built, timelines, strict=False):
            print_timeline(one.run, times)
        return
    documents = [one.model_dump(mode="json") for one in built]
    for document, times in zip(documents, timelines, strict=False):
        document["timeline"] = dataclasses.asdict(times)
    if between is None:
        print_json(documents[0])
    else:
        comparison = between.model_dump(mode="json")
        print_json({"runs": documents, "comparison": comparison["gains"], "not_compared": comparison["not_compared"]})
