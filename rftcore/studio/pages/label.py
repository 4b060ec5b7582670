"""`/label`, `/label/KIND` and `/compare`: labels of every kind, one target after another.

A queue has what the account has not labelled yet; where people were asked (`rft label ask`), it has the questions that the account claims. Judges'
answers are shown as suggestions; what a person was shown is stored with the label (`shown`). Rankings hide where answers come from, and each person
sees them in an order of their own.
"""

from __future__ import annotations

import hashlib
import json
import random
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response

from rftcore.studio.chats import chat_parts
from rftcore.studio.claims import MOST_AT_ONCE, claimed
from rftcore.studio.failures import NotFoundError
from rftcore.studio.numbers import number_from, whole_from
from rftcore.studio.page import Page
from rftcore.studio.tokens import HeatToken, decoder_of, heat_tokens
from rftcore.studio.values import list_from, value_from
from rftcore.studio.visits import Visit, VisitOf
from rftdata import labels
from rftdata.annotations import Annotation, LabelKind, annotate, kinds, questions
from rftdata.annotations.comments import num_comments
from rftdata.reports.stored_rollouts import stored_experience

PAGE = Page("Label", "/label", order=20)
router = APIRouter()
_MOST_ANSWERS = 9
_NONE_DONE = {"mine": 0, "num_all": 0}
_QUEUES = {
    "experience": "studio_experiences_to_label",
    "rollout": "studio_rollouts_to_label",
    "group": "studio_groups_to_label",
    "task": "studio_tasks_to_label",
}


async def _fields_of(request: Request) -> dict[str, str]:
    """Read the fields of a form, whose names depend on the kind."""
    return {name: value for name, value in (await request.form()).items() if isinstance(value, str)}


FormFields = Annotated[dict[str, str], Depends(_fields_of)]


@router.get("/label")
def kinds_page(visit: Visit) -> Response:
    """List the kinds of labels."""
    done = {each["kind"]: each for each in visit.fetch("studio_annotated", kind=None)}
    rows = [(each, done.get(each.kind, _NONE_DONE)) for each in kinds(visit.buffer)]
    return visit.render("label_kinds.html", rows=rows)


@router.get("/compare")
def compare_page(visit: Visit) -> Response:
    """Go to the first kind of ranking."""
    rankings = [each for each in kinds(visit.buffer) if each.type == "ranking"]
    return RedirectResponse(f"/label/{rankings[0].kind}" if rankings else "/label", status_code=303)


@router.get("/label/{kind}")
def label_page(visit: Visit, kind: str, run: str = "") -> Response:
    """Show the queue of a kind, which then asks for items."""
    _run_id(visit, run)
    claims = visit.session.may_label and questions.has_questions(visit.buffer, kind)
    runs = visit.fetch("studio_newest_runs")
    return visit.render("label.html", kind=_kind(visit, kind), run=run, runs=runs, claims=claims)


@router.get("/label/{kind}/items")
def label_items(visit: Visit, kind: str, count: int = 3, cursor: str = "", run: str = "") -> Response:
    """Return the next items of the queue after one."""
    found, after = _kind(visit, kind), whole_from(cursor) or 0
    rows = _queue(visit, found, after, min(max(count, 1), MOST_AT_ONCE), _run_id(visit, run))
    return _items(visit, found, [(row, None) for row in rows])


@router.post("/label/{kind}/claim")
def claim(visit: Visit, kind: str, fields: FormFields) -> Response:
    """Return the next questions, leased to the account, and renew those that the page holds."""
    found, run_id = _kind(visit, kind), _run_id(visit, fields.get("run", ""))
    claims = claimed(visit, kind, whole_from(fields.get("count", "")) or 0, run_id, fields.get("holding", ""))
    return _items(visit, found, [(_row(visit, found, each.target_id), each.question_id) for each in claims])


@router.post("/label/{kind}/skip")
def skip(visit: Visit, kind: str, fields: FormFields) -> Response:
    """Move a question to the end of the account's queue."""
    moved = questions.skip(visit.buffer, whole_from(fields.get("question", "")) or 0)
    return JSONResponse({"kind": kind, "is_moved": moved})


@router.post("/label/{kind}/unskip")
def unskip(visit: Visit, kind: str, fields: FormFields) -> Response:
    """Move a question back to its place in the account's queue."""
    moved = questions.skip(visit.buffer, whole_from(fields.get("question", "")) or 0, is_skipped=False)
    return JSONResponse({"kind": kind, "is_moved": moved})


@router.get("/label/{kind}/item/{target_id}")
def label_item(visit: Visit, kind: str, target_id: int) -> Response:
    """Return one item."""
    found = _kind(visit, kind)
    return _items(visit, found, [(_row(visit, found, target_id), None)])


@router.get("/label/{kind}/progress")
def label_progress(visit: Visit, kind: str) -> Response:
    """Return how many targets are labelled."""
    skipped = questions.skipped(visit.buffer, kind) if visit.session.may_label else []
    done = next(iter(visit.fetch("studio_annotated", kind=kind)), _NONE_DONE)
    return visit.render("label_progress.html", done=done, kind=_kind(visit, kind), skipped=skipped)


@router.post("/label/{kind}/answer")
def answer(visit: Visit, kind: str, fields: FormFields) -> Response:
    """Store a label; a repeated request stores nothing."""
    found = _kind(visit, kind)
    shown: dict[str, Any] = {"page": "label"}
    if found.type == "ranking":
        shown["order"] = list_from(fields.get("shown", ""))
    elif fields.get("shown"):
        shown["suggestion"] = fields["shown"]
        shown["suggestion_id"] = _suggestion_id(visit, kind, whole_from(fields.get("item", "")) or 0, fields["shown"])
    annotation = Annotation(
        kind,
        whole_from(fields.get("item", "")) or 0,
        value_from(found, fields),
        reason=fields.get("reason", "").strip() or None,
        seconds=number_from(fields["seconds"]) if fields.get("seconds") else None,
        shown=shown,
        kind_version=whole_from(fields.get("version", "")),
        key=fields.get("key") or None,
    )
    batch = annotate(visit.buffer, [annotation], author=visit.author)
    visit.live.hint()
    return JSONResponse({"label_batch_id": batch.label_batch_id, "is_repeated": bool(batch.num_repeated)})


@router.post("/label/{kind}/undo")
def undo(visit: Visit, kind: str, fields: FormFields) -> Response:
    """Undo a label of this account."""
    labels.undo(visit.buffer, whole_from(fields.get("label_batch_id", "")) or 0, author=visit.author)
    visit.live.hint()
    return JSONResponse({"kind": kind})


def _suggestion_id(visit: VisitOf, kind: str, target_id: int, shown: str) -> int | None:
    """Return the newest annotation of a judge with the value that was shown; None if it no longer stands."""
    said = visit.fetch("studio_suggestions", kind=kind, target_ids=[target_id])
    ids = [each["annotation_id"] for each in said if json.dumps(each["value"], ensure_ascii=False) == shown]
    return ids[-1] if ids else None


def _run_id(visit: VisitOf, run: str) -> int | None:
    return visit.buffer.find_run(run).run_id if run else None


def _kind(visit: VisitOf, name: str) -> LabelKind:
    found = next((each for each in kinds(visit.buffer) if each.kind == name), None)
    if found is None:
        raise NotFoundError(visit.text("There is no such kind of label, or it was retired."))
    return found


def _queue(visit: VisitOf, kind: LabelKind, after: int, count: int, run_id: int | None) -> list[dict[str, Any]]:
    return visit.buffer.database.fetch_by_index(
        _QUEUES[kind.target], kind=kind.kind, after=after, count=count, run_id=run_id
    )


def _row(visit: VisitOf, kind: LabelKind, target_id: int) -> dict[str, Any] | None:
    """Return a target; None if it was labelled or purged meanwhile."""
    rows = _queue(visit, kind, target_id - 1, 1, None)
    return rows[0] if rows and rows[0]["target_id"] == target_id else None


def _items(visit: VisitOf, kind: LabelKind, found_rows: list[tuple[dict[str, Any] | None, int | None]]) -> Response:
    """Return targets, each with the question that was claimed."""
    rows = [{**row, "question_id": question_id} for row, question_id in found_rows if row is not None]
    ids = sorted({each for row in rows for each in row["experience_ids"]})
    found = visit.buffer.database.fetch_by_index("studio_items", experience_ids=ids) if ids else []
    texts = {each["experience_id"]: each for each in found}
    said = visit.fetch("studio_suggestions", kind=kind.kind, target_ids=[row["target_id"] for row in rows])
    suggestions = {each["target_id"]: each for each in said}
    num = num_comments(visit.buffer, kind.target, [row["target_id"] for row in rows])
    items = [
        {"num_comments": num.get(row["target_id"], 0)}
        | _item(visit, kind, row, texts, suggestions.get(row["target_id"]))
        for row in rows
    ]
    return visit.render("label_items.html", kind=kind, items=items)


def _item(
    visit: VisitOf,
    kind: LabelKind,
    row: dict[str, Any],
    texts: dict[int, dict[str, Any]],
    suggestion: dict[str, Any] | None,
) -> dict[str, Any]:
    """Return what the template shows of one target."""
    answers = [texts[each] for each in row["experience_ids"] if each in texts]
    if kind.type == "ranking":
        # The same person sees the same order again, and no two people the same one for a reason.
        seed = hashlib.sha256(f"{visit.session.account} {kind.kind} {row['target_id']}".encode()).digest()
        answers = random.Random(seed).sample(answers, min(len(answers), _MOST_ANSWERS))
    chats = [chat_parts(each["messages"], each["prompt"], each["response"]) for each in answers]
    if not answers:
        payload = row.get("payload") or {}
        chats = [chat_parts(payload.get("messages"), str(payload.get("prompt", "")), None)[:1]]
    shown = (
        [each["experience_id"] for each in answers] if kind.type == "ranking" else suggestion and suggestion["value"]
    )
    return {
        **row,
        "answers": answers,
        "chats": chats,
        "num_common": _num_common(chats),
        "suggestion": suggestion,
        "tokens": _tokens(visit, row["target_id"]) if kind.type == "spans" else [],
        "shown": json.dumps(shown, ensure_ascii=False) if shown is not None else "",
    }


def _tokens(visit: VisitOf, experience_id: int) -> list[HeatToken]:
    rollout = stored_experience(visit.buffer, experience_id)
    decode, _ = decoder_of(visit.buffer.find_run(rollout.run_id).config)
    return heat_tokens(rollout.experiences[0], decode)


def _num_common(chats: list[list[Any]]) -> int:
    """Return how many first parts all chats share: the prompt."""
    shortest = min((len(chat) for chat in chats), default=0)
    same = (i for i in range(shortest) if any(chat[i] != chats[0][i] for chat in chats))
    return next(same, shortest - 1 if shortest else 0)
