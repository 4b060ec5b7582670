"""What annotations of an export are about: their targets, with the texts that other tools show beside them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from rftdata.buffer import Buffer
from rftdata.postgres.database import Row


@dataclass(frozen=True)
class Target:
    """Something that was labelled.

    Attributes:
        responses: ids and texts of its experiences; none for a task.
        annotations: rows as `exported_annotations` returns them.
    """

    target: str
    target_id: int
    prompt: str
    responses: Sequence[dict[str, Any]] = ()
    annotations: Sequence[Row] = field(default_factory=tuple)

    @property
    def response(self) -> str:
        return "\n\n".join(response["response"] for response in self.responses)


@dataclass
class LeftOut:
    """Counts of what a format cannot hold, with the reasons."""

    counts: dict[str, int] = field(default_factory=dict)

    def add(self, why: str) -> None:
        self.counts[why] = self.counts.get(why, 0) + 1

    @property
    def sentences(self) -> list[str]:
        return [f"{count} left out: {why}" for why, count in self.counts.items()]


def targets_of(buffer: Buffer, rows: Iterable[Row], at_once: int = 500) -> Iterator[Target]:
    """Yield the targets of annotations, with their texts."""

    def place(row: Row) -> tuple[str, int]:
        return row["target"], row["target_id"]

    groups = [(key, list(same)) for key, same in groupby(sorted(rows, key=place), key=place)]
    for start in range(0, len(groups), at_once):
        part = groups[start : start + at_once]
        found = buffer.database.fetch_by_index(
            "texts_of_targets", targets=[key[0] for key, _ in part], target_ids=[key[1] for key, _ in part]
        )
        texts = {(row["target"], row["target_id"]): row for row in found}
        for key, same in part:
            text = texts.get(key, {})
            yield Target(*key, prompt=text.get("prompt") or "", responses=text.get("responses") or (), annotations=same)


def utf16_offset(text: str, offset: int) -> int:
    """Return the place of a character in UTF-16, as programs in JavaScript count."""
    return offset + sum(character > "\uffff" for character in text[:offset])


def character_offset(text: str, offset: object) -> int:
    """Return the character at a place in UTF-16.

    Raises:
        ValueError: it is behind the end, or within a character.
    """
    if not isinstance(offset, int) or isinstance(offset, bool):
        raise ValueError(f"the offset {offset} is no whole number")
    place = i = 0
    while place < offset and i < len(text):
        place += 1 + (text[i] > "\uffff")
        i += 1
    if place != offset:
        raise ValueError(f"the offset {offset} is no place in the response, which has {utf16_offset(text, len(text))}")
    return i
