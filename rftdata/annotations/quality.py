"""How well people agree, and how each of them works: what `rft label agreement` prints and the page `/quality` shows.

What is compared follows from the type of the kind: bool, number and choice as they are; tags as a set; a rubric and turns part by part; a ranking as pairs of
experiences; spans by the F1 of their places. Texts and edits are counted only. Of blind kinds an account's first answer counts, since a later one was given
after looking at others. Row security holds: an account that may not see an annotation or gold gets figures without it.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rftdata.annotations.agreement import (
    Alpha,
    Level,
    cohen_kappas,
    fleiss_kappa,
    krippendorff_alpha,
    mean_span_f1,
)
from rftdata.buffer import Buffer
from rftdata.postgres.database import Row

Ratings = dict[Hashable, dict[str, Any]]


@dataclass(frozen=True)
class PersonQuality:
    """How one person labels with a kind.

    Attributes:
        person: the author, with the account if that has another name.
        median_seconds: per answer; None if unknown.
        num_gold, gold_accuracy: answers to questions with a known answer, and the share that is right.
        agreement: share of other people's ratings of the same units that are equal to this person's; of spans None.
        num_shown, first_shown_share: pairs of answers in rankings that were shown in a known order, without ties, and the share in which the one that was
            shown first (on the left) is ranked higher. Far from 0.5 is a bias.
    """

    person: str
    num_answers: int
    median_seconds: float | None
    num_gold: int
    gold_accuracy: float | None
    agreement: float | None
    num_shown: int
    first_shown_share: float | None


@dataclass(frozen=True)
class KindQuality:
    """Agreement on a kind. `alpha`, `fleiss` and `cohen` are None or empty for spans, texts and edits; `span_f1` is of spans alone."""

    kind: str
    type: str
    level: Level
    num_targets: int
    alpha: Alpha | None
    fleiss: float | None
    cohen: dict[tuple[str, str], tuple[float | None, int]]
    span_f1: float | None
    people: list[PersonQuality]


def quality(buffer: Buffer, *, kind: str | None = None, run_id: int | None = None) -> list[KindQuality]:
    """Return agreement and people of each kind that anyone has labelled with, or of one kind."""
    rows = buffer.database.fetch("answers_of_people", kind=kind, run_id=run_id)
    by_kind = itertools.groupby(sorted(rows, key=lambda row: str(row["kind"])), key=lambda row: str(row["kind"]))
    return [_of_kind(name, list(group)) for name, group in by_kind]


def _of_kind(kind: str, rows: Sequence[Row]) -> KindQuality:
    newest = rows[-1]
    kind_type, level = newest["type"], newest["level"]
    parts = _PARTS.get(kind_type)
    ratings: Ratings = {}
    for row in rows:
        for part, value in parts(row) if parts else ():
            ratings.setdefault((row["target_id"], part), {})[_person(row)] = value
    if kind_type in ("tags", "bool") or (kind_type == "choice" and level != "ordinal"):
        level = "nominal"
    is_rated = bool(parts) and kind_type != "spans"
    own: dict[str, list[Row]] = {}
    for row in rows:
        own.setdefault(_person(row), []).append(row)
    others = _equal_ratings(ratings) if is_rated else {}
    return KindQuality(
        kind,
        kind_type,
        level,
        len({row["target_id"] for row in rows}),
        krippendorff_alpha(ratings, level) if is_rated else None,
        fleiss_kappa(ratings) if is_rated else None,
        cohen_kappas(ratings) if is_rated else {},
        mean_span_f1(ratings) if kind_type == "spans" else None,
        [_of_person(person, own[person], others.get(person, (0, 0))) for person in sorted(own)],
    )


def _equal_ratings(ratings: Ratings) -> dict[str, tuple[int, int]]:
    """Return, for each person, how many ratings of the same units by others are equal to this person's, and how many there are."""
    found: dict[str, tuple[int, int]] = {}
    for given in ratings.values():
        for person, value in given.items():
            num_equal, num = found.get(person, (0, 0))
            found[person] = num_equal + sum(each == value for each in given.values()) - 1, num + len(given) - 1
    return found


def _of_person(person: str, own: Sequence[Row], others: tuple[int, int]) -> PersonQuality:
    seconds = [row["seconds"] for row in own if row["seconds"] is not None]
    known = [_same(row, row["gold"]) for row in own if row["gold"] is not None]
    firsts = [won for row in own if row["type"] == "ranking" for won in _first_shown_wins(row)]
    return PersonQuality(
        person,
        len(own),
        statistics.median(seconds) if seconds else None,
        len(known),
        _share(known),
        others[0] / others[1] if others[1] else None,
        len(firsts),
        _share(firsts),
    )


def _person(row: Row) -> str:
    return row["author"] if row["author"] == row["account"] else f"{row['author']} ({row['account']})"


def _share(found: Sequence[bool]) -> float | None:
    return sum(found) / len(found) if found else None


def _same(row: Row, gold: Any) -> bool:
    """Whether an answer is the known one: part by part, and spans by places and labels."""
    parts = _PARTS[row["type"]]
    if row["type"] == "spans":
        return mean_span_f1({0: {"answer": row["value"], "gold": gold}}) == 1
    return dict(parts(row)) == dict(parts({**row, "value": gold}))


def _whole(row: Row) -> Iterator[tuple[Hashable, Any]]:
    yield None, row["value"]


def _choice(row: Row) -> Iterator[tuple[Hashable, Any]]:
    choices = row["spec"].get("choices", [])
    is_ordinal = row["level"] == "ordinal" and row["value"] in choices
    yield None, choices.index(row["value"]) if is_ordinal else row["value"]


def _tags(row: Row) -> Iterator[tuple[Hashable, Any]]:
    yield None, json.dumps(sorted(row["value"]))


def _criteria(row: Row) -> Iterator[tuple[Hashable, Any]]:
    yield from row["value"].items()


def _turns(row: Row) -> Iterator[tuple[Hashable, Any]]:
    yield from ((item["turn"], item["value"]) for item in row["value"])


def _pairs(row: Row) -> Iterator[tuple[Hashable, Any]]:
    """Yield, for every two ranked experiences, 1 if the one with the smaller id is better, -1 if it is worse, 0 for a tie."""
    place = _places(row["value"])
    for one, two in itertools.combinations(sorted(place), 2):
        yield (one, two), (place[one] < place[two]) - (place[one] > place[two])


def _places(value: Mapping[str, Any]) -> dict[int, int]:
    return {experience: place for place, tie in enumerate(value["order"]) for experience in tie}


def _first_shown_wins(row: Row) -> list[bool]:
    shown = row["shown"].get("order") if isinstance(row["shown"], dict) else None
    place = _places(row["value"])
    in_order = [each for each in shown if each in place] if isinstance(shown, list) else []
    pairs = itertools.combinations(in_order, 2)
    return [place[one] < place[two] for one, two in pairs if place[one] != place[two]]


_PARTS: dict[str, Callable[[Row], Iterator[tuple[Hashable, Any]]]] = {
    "bool": _whole,
    "number": _whole,
    "choice": _choice,
    "tags": _tags,
    "rubric": _criteria,
    "turns": _turns,
    "ranking": _pairs,
    "spans": _whole,
}
