"""`/review`: one question after another to a person (stage human_review), for hands that stay on the keyboard.

The browser keeps the next items ready and sends answers one after another (static/queue.js), so no reader waits for the database. An account that may
answer claims its items by lease, as in the queues of labels (`rftdata.annotations.questions`); one that may only look walks through what waits. An item
carries what its reader saw, and `rftdata.reviews` stores an answer only if that still holds.
"""

from __future__ import annotations

import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Form
from fastapi.responses import JSONResponse, Response

from rftcore.studio.chats import chat_parts
from rftcore.studio.claims import MOST_AT_ONCE, claimed
from rftcore.studio.numbers import number_from, whole_from
from rftcore.studio.page import Page
from rftcore.studio.visits import Visit, VisitOf
from rftdata import reviews
from rftdata.annotations import questions
from rftdata.annotations.comments import num_comments
from rftdata.errors import QueryError

PAGE = Page("Review", "/review", order=10)
router = APIRouter()
_LONGEST_REASON = 20_000


@router.get("/review")
def review_page(visit: Visit, run: str | None = None) -> Response:
    """Show the page, which then asks for items."""
    _run_id(visit, run)
    runs = visit.fetch("studio_runs_with_reviews")
    return visit.render("review.html", run=run or "", runs=runs, claims=visit.session.may_label)


@router.get("/review/items")
def review_items(visit: Visit, count: int = 3, cursor: str = "", run: str | None = None) -> Response:
    """Return the next items of the queue after a place."""
    place, run_id = _place(cursor), _run_id(visit, run)
    rows = reviews.next_reviews(visit.buffer, min(max(count, 1), MOST_AT_ONCE), after=place, run_id=run_id)
    return visit.render("review_items.html", items=_with_texts(visit, rows))


@router.post("/review/claim")
def claim(
    visit: Visit,
    count: Annotated[int, Form()] = 0,
    run: Annotated[str, Form()] = "",
    holding: Annotated[str, Form()] = "",
) -> Response:
    """Return the next reviews, leased to the account, and renew those that the page holds."""
    claims = claimed(visit, questions.REVIEWS, count, _run_id(visit, run), holding)
    found = reviews.claimed_reviews(visit.buffer, [each.review_id for each in claims if each.review_id is not None])
    rows = {row["review_id"]: row for row in found}
    with_question = [
        {**rows[each.review_id], "question_id": each.question_id} for each in claims if each.review_id in rows
    ]
    return visit.render("review_items.html", items=_with_texts(visit, with_question))


@router.post("/review/skip")
def skip(visit: Visit, question: Annotated[str, Form()]) -> Response:
    """Move a review to the end of the account's queue."""
    return JSONResponse({"is_moved": questions.skip(visit.buffer, whole_from(question) or 0)})


@router.post("/review/unskip")
def unskip(visit: Visit, question: Annotated[str, Form()]) -> Response:
    """Move a review back to its place."""
    return JSONResponse({"is_moved": questions.skip(visit.buffer, whole_from(question) or 0, is_skipped=False)})


@router.get("/review/item/{review_id}")
def review_item(visit: Visit, review_id: int) -> Response:
    """Return one item, answered or not."""
    return visit.render("review_items.html", items=_with_texts(visit, [reviews.review(visit.buffer, review_id)]))


@router.get("/review/progress")
def review_progress(visit: Visit, run: str | None = None) -> Response:
    """Return how far the queue is."""
    run_id = _run_id(visit, run)
    skipped = questions.skipped(visit.buffer, questions.REVIEWS, run_id=run_id) if visit.session.may_label else []
    return visit.render("review_progress.html", progress=reviews.progress(visit.buffer, run_id), skipped=skipped)


@router.post("/review/answer")
def answer(
    visit: Visit,
    item: Annotated[int, Form()],
    choice: Annotated[str, Form(pattern="^(pass|drop)$")],
    seen: Annotated[str, Form()] = "",
    reward: Annotated[str, Form()] = "",
    reason: Annotated[str, Form(max_length=_LONGEST_REASON)] = "",
) -> Response:
    """Store an answer."""
    given = reviews.ReviewAnswer(
        review_id=item,
        choice="drop" if choice == "drop" else "pass",
        reward=number_from(reward) if reward.strip() else None,
        reason=reason.strip() or None,
        seen_label_id=whole_from(seen),
    )
    receipt = reviews.answer(visit.buffer, given, author=visit.author)
    visit.live.hint()
    return JSONResponse({"label_batch_id": receipt.label_batch_id, "is_repeated": receipt.is_repeated})


@router.post("/review/undo")
def undo(visit: Visit, item: Annotated[int, Form()], label_batch_id: Annotated[str, Form()] = "") -> Response:
    """Withdraw one's own answer."""
    receipt = reviews.AnswerReceipt(item, whole_from(label_batch_id))
    reviews.withdraw(visit.buffer, receipt, author=visit.author)
    visit.live.hint()
    return JSONResponse({})


def _run_id(visit: VisitOf, run: str | None) -> int | None:
    return None if not run else visit.buffer.find_run(run).run_id


def _place(cursor: str) -> reviews.QueuePlace | None:
    if not cursor:
        return None
    deadline, _, review_id = cursor.rpartition("|")
    try:
        return reviews.QueuePlace(datetime.datetime.fromisoformat(deadline), int(review_id))
    except ValueError as error:
        raise QueryError("this is not a place in the queue", value=cursor, todo="load the page again") from error


def _with_texts(visit: VisitOf, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ids = [row["experience_id"] for row in rows]
    found = visit.buffer.database.fetch_by_index("studio_items", experience_ids=ids) if ids else []
    texts = {row["experience_id"]: row for row in found}
    num = num_comments(visit.buffer, "experience", ids)
    return [
        {
            **texts[row["experience_id"]],
            "question_id": None,
            **row,
            "num_comments": num.get(row["experience_id"], 0),
            "label_id": texts[row["experience_id"]]["label_id"],
            "cursor": f"{row['deadline'].isoformat()}|{row['review_id']}",
            "parts": chat_parts(*(texts[row["experience_id"]][name] for name in ("messages", "prompt", "response"))),
        }
        for row in rows
        if row["experience_id"] in texts
    ]
