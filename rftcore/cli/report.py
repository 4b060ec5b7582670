"""`rft report`: the final table of a run, or of two side by side, read from the buffer only."""

from __future__ import annotations

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
        Path | None,
        typer.Option(
            "--timeline",
            metavar="FILE",
            help="Also draw what each process of RUN did when: an image, or with the suffix .json a trace for Perfetto.",
        ),
    ] = None,
) -> None:
    """Print the results of a run: held-out score before and after, steps, tokens, dropped rows with reasons."""
    from rftcore.reporting import report as reports
    from rftcore.reporting.table import print_report
    from rftdata.reports.results import RunResults

    with opened(uri, "rft report") as buffer:
        built = [reports.build_report(buffer, name) for name in ([run] if other is None else [run, other])]
        spans = RunResults(buffer.find_run(built[0].run_id)).spans() if timeline is not None else []
        between = reports.compare(*(buffer.find_run(one.run_id) for one in built)) if other is not None else []
    if png is not None:
        from rftcore.reporting.learning_curve import write_learning_curve

        write_learning_curve(built[0], png)
    if timeline is not None:
        from rftcore.reporting.timeline import write_timeline

        write_timeline(built[0].run, spans, timeline)
    if as_json and other is None:
        print_json(built[0].model_dump(mode="json"))
    elif as_json:
        runs = [one.model_dump(mode="json") for one in built]
        print_json({"runs": runs, "comparison": [gain.model_dump(mode="json") for gain in between]})
    else:
        print_report(built, between)
