"""Argilla's JSON: a list of records with `fields`, `responses` of people and `suggestions` of models, by question.

Kinds become its questions: bool and choice label, tags multi-label, number and each criterion of a rubric or turn rating, text and edit text, ranking
ranking (its values are ids of experiences), spans span. Spans of tokens are left out, because the characters of a token are not known here. The
metadata `target` and `target_id` lead back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rftdata.annotations.annotation import Annotation
from rftdata.annotations.exported import LeftOut, Target
from rftdata.annotations.kinds import LabelKind, refuse_other_target
from rftdata.errors import QueryError
from rftdata.postgres.database import Row

_TOKENS = "spans of tokens, whose characters are not known"


def write_records(targets: Iterable[Target], left_out: LeftOut) -> list[dict[str, Any]]:
    """Return records, one for each target."""
    records = []
    for target in targets:
        responses: dict[str, list[dict[str, Any]]] = {}
        suggestions: dict[str, dict[str, Any]] = {}
        for row in target.annotations:
            for question, value in _answers(row, left_out):
                if row["source"] == "judge":
                    agent = row["model"] or row["author"]
                    suggestions[question] = {"value": value, "score": row["confidence"], "agent": agent}
                else:
                    responses.setdefault(question, []).append({"value": value, "user_id": row["author"]})
        fields = {"prompt": target.prompt, "response": target.response}
        for response in target.responses if target.target == "group" else ():
            fields[str(response["id"])] = response["response"]
        records.append(
            {
                "id": f"{target.target}-{target.target_id}",
                "fields": fields,
                "metadata": {"target": target.target, "target_id": target.target_id},
                "suggestions": suggestions,
                "responses": responses,
            }
        )
    return records


def _answers(row: Row, left_out: LeftOut) -> list[tuple[str, Any]]:
    kind, value = row["kind"], row["value"]
    match row["type"]:
        case "bool":
            return [(kind, "true" if value else "false")]
        case "rubric":
            return [(f"{kind}.{name}", number) for name, number in value.items()]
        case "turns":
            return [(f"{kind}.{turn['turn']}", turn["value"]) for turn in value]
        case "edit":
            return [(kind, value["response"])]
        case "ranking":
            ranks = [{"value": str(key), "rank": i} for i, tie in enumerate(value["order"], 1) for key in tie]
            return [(kind, ranks)]
        case "spans":
            spans = [span for span in value if span.get("unit", "token") == "char"]
            for _ in range(len(value) - len(spans)):
                left_out.add(_TOKENS)
            return (
                [(kind, [{name: span[name] for name in ("start", "end", "label")} for span in spans])] if spans else []
            )
    return [(kind, value)]


def read_records(
    records: Sequence[Mapping[str, Any]], kinds: Mapping[str, LabelKind], with_judges: bool
) -> list[Annotation]:
    """Return the annotations of records; of suggestions only `with_judges`.

    Raises:
        QueryError: a record without target_id, an answer to an unknown question, of another shape, or about another target.
    """
    found = []
    for number, record in enumerate(records, 1):
        where = f"record {number}"
        metadata = record.get("metadata")
        if not isinstance(metadata, Mapping) or not str(metadata.get("target_id", "")).isdigit():
            raise QueryError(f"{where} has no metadata.target_id", todo="export the records with rft label export")
        target_id, target = int(metadata["target_id"]), metadata.get("target")
        people: dict[str | None, dict[str, Any]] = {}
        for question, answers in (record.get("responses") or {}).items():
            for answer in answers:
                user = None if answer.get("user_id") is None else str(answer["user_id"])
                people.setdefault(user, {})[question] = answer.get("value")
        for user, by_question in people.items():
            values = _values(by_question, kinds, where, target)
            found += [Annotation(kind, target_id, value, author=user) for kind, value in values.items()]
        if with_judges:
            found += _suggestions(record.get("suggestions") or {}, (target, target_id), kinds, where)
    return found


def _suggestions(
    suggestions: Mapping[str, Mapping[str, Any]], place: tuple[object, int], kinds: Mapping[str, LabelKind], where: str
) -> list[Annotation]:
    target, target_id = place
    values = _values({question: given.get("value") for question, given in suggestions.items()}, kinds, where, target)
    found = []
    for kind, value in values.items():
        given = next(given for question, given in suggestions.items() if question.partition(".")[0] == kind)
        model = str(given.get("agent") or "suggestions")
        score = given.get("score")
        confidence = float(score) if isinstance(score, int | float) else None
        found.append(
            Annotation(kind, target_id, value, author=model, source="judge", model=model, confidence=confidence)
        )
    return found


def _values(answers: Mapping[str, Any], kinds: Mapping[str, LabelKind], where: str, target: object) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for question, value in answers.items():
        name, _, part = question.partition(".")
        kind = kinds.get(name)
        if kind is None:
            raise QueryError(f"{where} answers {name}", allowed=", ".join(kinds), todo="define the kind first")
        refuse_other_target(where, kind, target)
        try:
            match kind.type:
                case "bool":
                    values[name] = {"true": True, "false": False}[value]
                case "rubric":
                    values.setdefault(name, {})[part] = value
                case "turns":
                    values.setdefault(name, []).append({"turn": int(part), "value": value})
                case "edit":
                    values[name] = {"response": value}
                case "ranking":
                    ranks: dict[int, list[int]] = {}
                    for item in value:
                        ranks.setdefault(int(item["rank"]), []).append(int(item["value"]))
                    values[name] = {"order": [ranks[rank] for rank in sorted(ranks)]}
                case "spans":
                    values[name] = [{**span, "unit": "char"} for span in value]
                case _:
                    values[name] = value
        except (KeyError, TypeError, ValueError) as error:
            raise QueryError(
                f"{where} has an answer to {question} that is none of the type {kind.type}", value=str(value)[:200]
            ) from error
    return values
