"""Edited responses that wait to be rendered as experiences, and the run that takes these experiences.

An edit is rendered once: `rft.edited_response` is written with its experience, and the write has a receipt. Renderings belong to a run of their
own, so that what a run sampled, and its queue, stay as they are.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from rftdata.buffer import Buffer
from rftdata.errors import ConflictError, QueryError
from rftdata.postgres.database import records
from rftdata.postgres.locks import Lock, holding
from rftdata.run import NO_PIPELINE, Run

_RECEIPTS = uuid.UUID("0a4b1c52-54c3-4f0e-9d0c-7f6f2f0e8b31")
_AT_ONCE = 256


@dataclass(frozen=True, kw_only=True)
class Edit:
    """An edited response, and the experience that was edited.

    Attributes:
        annotation_id: the edit.
        parent_id: the experience.
        response: the new last answer.
        num_prompt_tokens, role, prompt, messages: of the parent; messages with its response, None for a plain prompt.
    """

    annotation_id: int
    parent_id: int
    response: str
    author: str
    num_prompt_tokens: int
    role: str | None
    prompt: str
    messages: list[dict[str, Any]] | None
    taskset: str
    task_key: str

    @property
    def receipt(self) -> uuid.UUID:
        """The receipt under which it is written."""
        return uuid.uuid5(_RECEIPTS, str(self.annotation_id))


@contextlib.contextmanager
def rendering(run: Run) -> Iterator[None]:
    """Lock the rendering of a run's edits, so that only this process renders them.

    Raises:
        ConflictError: another process renders them.
    """
    with holding(run.database, Lock("edits", run.run_id)) as held_by:
        if held_by is not None:
            raise ConflictError(
                f"another process renders edits of this run: {held_by}", todo="wait until it has finished"
            )
        yield


def blind_edits(run: Run) -> dict[str, int]:
    """Return the blind kinds, with the number of their standing edits of a run's experiences that no experience renders yet."""
    return {row["kind"]: row["num"] for row in run.database.fetch("waiting_edits_of_blind_kinds", run_id=run.run_id)}


def edits_to_render(run: Run, without_kinds: Collection[str] = ()) -> Iterator[Edit]:
    """Yield the standing edits of a run's experiences that no experience renders yet, the oldest first.

    Args:
        without_kinds: kinds whose edits are left out.

    Raises:
        ArchivedError: the run is archived.
    """
    run.refuse_archived("edits are rendered behind its arrays")
    after = 0
    page = {"run_id": run.run_id, "limit": _AT_ONCE, "without_kinds": list(without_kinds)}
    while edits := records(Edit, run.database.fetch("edits_to_render", after=after, **page)):
        after = edits[-1].annotation_id
        yield from edits


def run_of_edits(buffer: Buffer, edited: Run, name: str | None) -> Run:
    """Return the run that takes the renderings of a run's edits, `RUN-edits` by default; create it if needed. The caller holds a lock.

    Raises:
        QueryError: the name belongs to a run that samples or trains.
        ArchivedError: that run is archived.
    """
    name = name or f"{edited.name}-edits"
    for run in buffer.runs(name):
        if "edits" not in run.config:
            raise QueryError(
                f"the run {name!r} has experiences of its own and cannot take edited responses",
                value=name,
                todo="give another name: --into NAME",
            )
        run.refuse_archived("nothing can be added")
        return run
    # The folder of the arrays is stored, so that commands find it if the buffer is on a server.
    segments = edited.config.get("buffer", {}).get("segments")
    config = {"run": {"name": name}, "buffer": {"segments": segments}, "edits": {"run": edited.name}}
    return buffer.create_run(name=name, config=config, seed=0, steps=0, pipeline_version=NO_PIPELINE, mode="train")
