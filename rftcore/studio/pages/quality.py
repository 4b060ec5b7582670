"""`/quality`: how well people agree, and how each of them works; `/quality/KIND`: what they disagree about, to decide it with one key."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import APIRouter, Form
from fastapi.responses import JSONResponse, Response

from rftcore.studio.chats import chat_parts
from rftcore.studio.failures import NotFoundError
from rftcore.studio.page import Page
from rftcore.studio.values import json_from
from rftcore.studio.visits import Visit, VisitOf
from rftdata.annotations import LabelKind, kinds, questions
from rftdata.annotations.quality import quality

PAGE = Page("Quality", "/quality", order=25)
router = APIRouter()
_SHOWN_ANSWERS = 9


@router.get("/quality")
def quality_page(visit: Visit, run: int | None = None) -> Response:
    """Show agreement and people of each kind."""
    return visit.render(
        "quality.html",
        kinds=quality(visit.buffer, run_id=run),
        run=visit.buffer.find_run(run) if run is not None else None,
        runs=visit.fetch("studio_newest_runs"),
    )


@router.get("/quality/{kind}")
def disagreements_page(visit: Visit, kind: str) -> Response:
    """Show the next target about which people disagree, with all answers."""
    found = _kind(visit, kind)
    rows = questions.disagreements(visit.buffer, kind, limit=1)
    item = _with_texts(visit, found, rows[0]) if rows else None
    return visit.render("disagreement.html", kind=found, item=item, may_decide=questions.may_judge(visit.buffer))


@router.post("/quality/{kind}/decide")
def decide(
    visit: Visit,
    kind: str,
    target_id: Annotated[int, Form()],
    value: Annotated[str, Form(max_length=1_000_000)],
    reason: Annotated[str, Form(max_length=20_000)] = "",
) -> Response:
    """Store a decision: an annotation of the source adjudication, and gold."""
    chosen = json_from(value)
    open_ones = questions.disagreements(visit.buffer, _kind(visit, kind).kind, limit=1000)
    if target_id in [row["target_id"] for row in open_ones]:  # a repeated request finds it decided
        questions.adjudicate(visit.buffer, kind, target_id, chosen, author=visit.author, reason=reason.strip() or None)
        visit.live.hint()
    return JSONResponse({})


def _kind(visit: VisitOf, name: str) -> LabelKind:
    found = next((each for each in kinds(visit.buffer) if each.kind == name), None)
    if found is None:
        raise NotFoundError(visit.text("There is no such kind of label, or it was retired."))
    return found


def _with_texts(visit: VisitOf, kind: LabelKind, row: dict[str, Any]) -> dict[str, Any]:
    values = list(dict.fromkeys(json.dumps(each["value"], ensure_ascii=False) for each in row["answers"]))
    ids = [row["target_id"]] if kind.target == "experience" else []
    texts = visit.buffer.database.fetch_by_index("studio_items", experience_ids=ids) if ids else []
    chats = [chat_parts(each["messages"], each["prompt"], each["response"]) for each in texts]
    said = [{**each, "text": json.dumps(each["value"], ensure_ascii=False)} for each in row["answers"]]
    return {**row, "answers": said, "values": values[:_SHOWN_ANSWERS], "chats": chats}
