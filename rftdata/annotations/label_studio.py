"""Label Studio's JSON: a list of tasks with `data`, `annotations` of people and `predictions` of models.

Kinds become its controls: bool and choice Choices, tags Choices with several answers, number and each criterion of a rubric or turn Number, text and
edit TextArea, ranking Ranker with a bucket per rank, spans Labels. Offsets of spans are in UTF-16 there. Spans of tokens are left out, because the
characters of a token are not known here. The keys `target` and `target_id` of `data` lead back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any
from xml.sax.saxutils import quoteattr

from rftdata.annotations.annotation import Annotation
from rftdata.annotations.exported import LeftOut, Target, character_offset, utf16_offset
from rftdata.annotations.kinds import LabelKind, refuse_other_target
from rftdata.errors import QueryError
from rftdata.postgres.database import Row

_TOKENS = "spans of tokens, whose characters are not known"


def write_tasks(targets: Iterable[Target], left_out: LeftOut) -> list[dict[str, Any]]:
    """Return tasks, one for each target."""
    tasks = []
    for number, target in enumerate(targets, 1):
        task: dict[str, Any] = {"id": number, "data": _data(target), "annotations": [], "predictions": []}
        by_author = sorted(target.annotations, key=lambda row: (row["source"] == "judge", row["author"]))
        for (is_judge, author), rows in groupby(by_author, key=lambda row: (row["source"] == "judge", row["author"])):
            same = list(rows)
            result = [item for row in same for item in _result(row, target, left_out)]
            if not result:
                continue
            if is_judge:
                named = {"model_version": same[0]["model"] or author, "score": same[0]["confidence"]}
                task["predictions"].append({**named, "result": result})
                continue
            seconds = [row["seconds"] for row in same if row["seconds"] is not None]
            task["annotations"].append(
                {
                    "completed_by": {"email": author},
                    "was_cancelled": False,
                    "ground_truth": any(row["source"] == "adjudication" for row in same),
                    "lead_time": sum(seconds) if seconds else None,
                    "result": result,
                }
            )
        tasks.append(task)
    return tasks


def _data(target: Target) -> dict[str, Any]:
    data = {
        "target": target.target,
        "target_id": target.target_id,
        "prompt": target.prompt,
        "response": target.response,
    }
    if target.target == "group":
        data["items"] = [
            {"id": str(r["id"]), "title": f"experience {r['id']}", "body": r["response"]} for r in target.responses
        ]
    return data


def _result(row: Row, target: Target, left_out: LeftOut) -> list[dict[str, Any]]:
    kind, value = row["kind"], row["value"]

    def item(name: str, control: str, content: dict[str, Any]) -> dict[str, Any]:
        to_name = "items" if control == "ranker" else "response" if target.responses else "prompt"
        return {"from_name": name, "to_name": to_name, "type": control, "value": content}

    match row["type"]:
        case "bool":
            return [item(kind, "choices", {"choices": ["true" if value else "false"]})]
        case "choice":
            return [item(kind, "choices", {"choices": [value]})]
        case "tags":
            return [item(kind, "choices", {"choices": value})]
        case "number":
            return [item(kind, "number", {"number": value})]
        case "rubric":
            return [item(f"{kind}.{name}", "number", {"number": number}) for name, number in value.items()]
        case "turns":
            return [item(f"{kind}.{turn['turn']}", "number", {"number": turn["value"]}) for turn in value]
        case "text":
            return [item(kind, "textarea", {"text": [value]})]
        case "edit":
            return [item(kind, "textarea", {"text": [value["response"]]})]
        case "ranking":
            ranks = {str(i): [str(key) for key in tie] for i, tie in enumerate(value["order"], 1)}
            return [item(kind, "ranker", {"ranker": ranks})]
    found = []
    for span in value:
        if span.get("unit", "token") != "char":
            left_out.add(_TOKENS)
            continue
        text = target.response
        place = {name: utf16_offset(text, span[name]) for name in ("start", "end")}
        content = {**place, "text": text[span["start"] : span["end"]], "labels": [span["label"]]}
        note = {"meta": {"text": [span["note"]]}} if span.get("note") else {}
        found.append({**item(kind, "labels", content), **note})
    return found


def read_tasks(
    tasks: Sequence[Mapping[str, Any]], kinds: Mapping[str, LabelKind], texts: Mapping[int, str], with_judges: bool
) -> list[Annotation]:
    """Return the annotations of tasks; of predictions only `with_judges`. Cancelled annotations are skipped.

    Args:
        texts: responses of experiences, in which spans are.

    Raises:
        QueryError: a task without target_id, a result of an unknown kind or shape, or of one about another target.
    """
    found = []
    for number, task in enumerate(tasks, 1):
        where = f"task {number}"
        data = task.get("data")
        if not isinstance(data, Mapping) or not str(data.get("target_id", "")).isdigit():
            raise QueryError(f"{where} has no data.target_id", todo="export the tasks with rft label export")
        target_id, target = int(data["target_id"]), data.get("target")
        for given in task.get("annotations") or ():
            if not given.get("was_cancelled"):
                about = {"author": _person(given.get("completed_by")), "seconds": given.get("lead_time")}
                found += _annotations(given.get("result") or (), (target, target_id), kinds, texts, where, about)
        for given in (task.get("predictions") or ()) if with_judges else ():
            model = str(given.get("model_version") or "predictions")
            about = {"author": model, "source": "judge", "model": model, "confidence": given.get("score")}
            found += _annotations(given.get("result") or (), (target, target_id), kinds, texts, where, about)
    return found


def _person(completed_by: Any) -> str | None:
    if isinstance(completed_by, Mapping):
        return str(completed_by.get("email") or completed_by.get("id") or "") or None
    return None if completed_by is None else f"user {completed_by}"


def _annotations(
    result: Sequence[Mapping[str, Any]],
    place: tuple[object, int],
    kinds: Mapping[str, LabelKind],
    texts: Mapping[int, str],
    where: str,
    about: Mapping[str, Any],
) -> list[Annotation]:
    """Return one annotation for each kind: several results of a kind are one value."""
    target, target_id = place
    values: dict[str, Any] = {}
    for item in result:
        name, _, part = str(item.get("from_name")).partition(".")
        kind = kinds.get(name)
        if kind is None:
            raise QueryError(f"{where} has a result of {name}", allowed=", ".join(kinds), todo="define the kind first")
        refuse_other_target(where, kind, target)
        try:
            _refuse_unclear(item, kind, part, values)
            _add(values, kind, part, item["value"], texts.get(target_id, ""), item.get("meta"))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            why = f": {error}" if type(error) is ValueError else ""
            raise QueryError(
                f"{where} has a result of {name} that is none of the type {kind.type}{why}",
                value=str(item.get("value"))[:200],
                todo="correct it; nothing was stored",
            ) from error
    return [Annotation(name, target_id, value, **about) for name, value in values.items()]


def _refuse_unclear(item: Mapping[str, Any], kind: LabelKind, part: str, values: Mapping[str, Any]) -> None:
    """Refuse a result that could be stored only in part, or in another place.

    Raises:
        ValueError: a second result of what has one value, a part of a type without parts, or a region that is not of the response.
    """
    in_parts = kind.type in ("rubric", "turns")
    if in_parts != bool(part) or (kind.type == "turns" and not re.fullmatch("[0-9]{1,6}", part)):
        raise ValueError(f"{item['from_name']} is no control of it")
    known = values.get(kind.kind, ())
    if kind.type == "turns":
        is_second = any(turn["turn"] == int(part) for turn in known)
    elif kind.type == "rubric":
        is_second = part in known
    else:
        is_second = kind.kind in values and kind.type != "spans"
    if is_second:
        raise ValueError("it is a second one in the same annotation")
    if kind.type == "spans" and item.get("to_name", "response") != "response":
        raise ValueError(f"its region is of {item['to_name']}, and spans are of response")


def _add(values: dict[str, Any], kind: LabelKind, part: str, value: Any, text: str, meta: Any) -> None:
    match kind.type:
        case "bool":
            values[kind.kind] = {"true": True, "false": False}[_only(value["choices"])]
        case "choice":
            values[kind.kind] = _only(value["choices"])
        case "tags":
            values[kind.kind] = _texts(value["choices"])
        case "number":
            values[kind.kind] = value["number"] if "number" in value else value["rating"]
        case "rubric":
            values.setdefault(kind.kind, {})[part] = value["number"] if "number" in value else value["rating"]
        case "turns":
            values.setdefault(kind.kind, []).append({"turn": int(part), "value": value["number"]})
        case "text":
            values[kind.kind] = "\n".join(_texts(value["text"]))
        case "edit":
            values[kind.kind] = {"response": _only(value["text"])}
        case "ranking":
            buckets = {name: keys for name, keys in value["ranker"].items() if keys and name != "_"}  # _: not ranked
            ranks = sorted(buckets.items(), key=lambda bucket: int(bucket[0]))
            values[kind.kind] = {"order": [[int(key) for key in tie] for _, tie in ranks]}
        case "spans":
            place = {name: character_offset(text, value[name]) for name in ("start", "end")}
            note = {"note": "\n".join(_texts(meta["text"]))} if meta and meta.get("text") else {}
            if not value["labels"]:
                raise ValueError("its region has no label")
            spans = [{**place, "unit": "char", "label": label, **note} for label in _texts(value["labels"])]
            values.setdefault(kind.kind, []).extend(spans)


def _texts(given: Any) -> list[str]:
    """Return texts, which may be one without a list."""
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("it is neither a text nor a list of texts")
    return texts


def _only(given: Any) -> str:
    """Return the text where one is allowed."""
    texts = _texts(given)
    if len(texts) != 1:
        raise ValueError(f"it has {len(texts)} values, and one is allowed")
    return texts[0]


def interface(kinds: Sequence[LabelKind], turns: int = 1) -> str:
    """Return the XML of a labelling interface with a control for each kind.

    Args:
        turns: number of turns for kinds of the type turns.
    """
    lines = ["<View>", '  <Text name="prompt" value="$prompt"/>', '  <Text name="response" value="$response"/>']
    if any(kind.type == "ranking" for kind in kinds):
        lines.append('  <List name="items" value="$items"/>')
    for kind in kinds:
        lines += [f"  {line}" for line in _control(kind, turns)]
    return "\n".join([*lines, "</View>"]) + "\n"


def _control(kind: LabelKind, turns: int) -> list[str]:
    to_name = "prompt" if kind.target == "task" else "response"

    def tag(name: str, control: str, inner: Sequence[str] = (), **more: Any) -> str:
        attributes = {"name": name, "toName": "items" if control == "Ranker" else to_name, **more}
        written = " ".join(f"{key}={quoteattr(str(value))}" for key, value in attributes.items() if value is not None)
        return f"<{control} {written}>{''.join(inner)}</{control}>" if inner else f"<{control} {written}/>"

    def words(control: str, values: Sequence[str]) -> list[str]:
        return [f"<{control} value={quoteattr(value)}/>" for value in values]

    def number(name: str, limits: Mapping[str, Any]) -> str:
        return tag(name, "Number", (), **{key: limits.get(key) for key in ("min", "max", "step")})

    header = f"<Header value={quoteattr(kind.instruction or kind.kind)}/>"
    match kind.type:
        case "bool":
            return [header, tag(kind.kind, "Choices", words("Choice", ["true", "false"]))]
        case "choice":
            return [header, tag(kind.kind, "Choices", words("Choice", kind.spec["choices"]))]
        case "tags":
            return [header, tag(kind.kind, "Choices", words("Choice", kind.spec.get("tags", ())), choice="multiple")]
        case "number":
            return [header, number(kind.kind, kind.spec)]
        case "rubric":
            return [header, *(number(f"{kind.kind}.{name}", limits) for name, limits in kind.spec["criteria"].items())]
        case "turns":
            return [header, *(number(f"{kind.kind}.{turn}", kind.spec) for turn in range(turns))]
        case "ranking":
            buckets = [f'<Bucket name="{i}" title="{i}"/>' for i in range(1, 9)]
            return [header, tag(kind.kind, "Ranker", buckets)]
        case "spans":
            return [header, tag(kind.kind, "Labels", words("Label", kind.spec["labels"]))]
    return [header, tag(kind.kind, "TextArea")]
