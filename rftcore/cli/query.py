"""`rft query`: DuckDB on the buffer, including token arrays."""

from __future__ import annotations

from typing import Annotated

import typer

from rftcore.cli.session import BufferOption, JsonOption, opened
from rftdata.errors import RftError


def query(
    text: Annotated[str, typer.Argument(metavar="QUERY", help="DuckDB SQL.")],
    uri: BufferOption = None,
    as_json: JsonOption = False,
    run: Annotated[
        str | None, typer.Option("--run", metavar="RUN", help="Read only the experiences of this run.")
    ] = None,
    limit_bytes: Annotated[
        int | None,
        typer.Option(min=0, metavar="BYTES", help="Refuse a query that would read more bytes than this, by estimate."),
    ] = None,
    skip_damaged: Annotated[
        bool, typer.Option("--skip-damaged", help="Leave out, and name, experiences whose arrays are damaged.")
    ] = False,
) -> None:
    """Query experiences with their token arrays in DuckDB: `rft query "select avg(len(token_ids)) from experience"`.

    This is DuckDB, read-only, for token arrays and analysis. `rft sql` is PostgreSQL, live, for rows and changes.

    `experience` has the columns of rft.v_experience and token_ids, loss_mask, behavior_logprobs, and if a query names them
    token_rewards, teacher_logprobs, step_reward, state_hash and turns (lists, NULL where a workflow recorded none). `turn` has a row for
    each turn, with its place in token_ids, its state_hash, its reward_sampled and its reward as it stands. All other tables and
    views of schema rft have their own names (run, draw, verdict, task, evaluation, v_group, …). Arrays of purged experiences are
    NULL. Archived runs are read from their files. Only the columns that the query needs are read, and by simple conditions only such rows:
    `rft query "select avg(list_sum(behavior_logprobs)) from experience where reward = 1"`.
    """
    from rftcore.cli.output import print_json_rows, print_rows
    from rftdata.query.sql_result import unique_names

    with opened(uri, "rft query") as buffer:
        damage = _report_damage if skip_damaged else None
        with buffer.query(text, run=run, limit_bytes=limit_bytes, on_damage=damage) as reader:
            names = reader.schema.names
            columns = dict(zip(unique_names(names), names, strict=True))
            rows = (row for batch in reader for row in batch.rename_columns(list(columns)).to_pylist())
            if as_json:
                print_json_rows(rows)
            else:
                print_rows(list(rows), columns)


def _report_damage(error: RftError) -> None:
    typer.echo(f"left out: {error.what}", err=True)
