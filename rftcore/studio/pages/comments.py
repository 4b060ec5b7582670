"""`/comments/TARGET/ID`: the thread about an experience, a rollout, a group or a task, which their pages show, too.

The database decides which comments an account sees: while a blind question about the target is open for it, only its own.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Form
from fastapi.responses import JSONResponse, Response

from rftcore.studio.page import Page
from rftcore.studio.visits import Visit
from rftdata.annotations.comments import add_comment, comments
from rftdata.annotations.kinds import LabelTarget

PAGE = Page("Comments", "/comments")
router = APIRouter()


@router.get("/comments/{target}/{target_id}")
def comments_page(visit: Visit, target: LabelTarget, target_id: int, kind: str = "") -> Response:
    """Show a thread; `kind`: new comments are about labelling the target with it."""
    return visit.render("comments_page.html", target=target, target_id=target_id, kind=kind)


@router.get("/comments/{target}/{target_id}/thread")
def thread(visit: Visit, target: LabelTarget, target_id: int) -> Response:
    """Return the comments alone."""
    return visit.render("comments_thread.html", comments=comments(visit.buffer, target, target_id))


@router.post("/comments/{target}/{target_id}")
def comment(
    visit: Visit,
    target: LabelTarget,
    target_id: int,
    comment: Annotated[str, Form()],
    kind: Annotated[str, Form()] = "",
    key: Annotated[str, Form()] = "",
) -> Response:
    """Store a comment; a repeated request stores nothing."""
    stored = add_comment(
        visit.buffer, target, target_id, comment.strip(), author=visit.author, kind=kind or None, key=key or None
    )
    visit.live.hint()
    return JSONResponse({"comment_id": stored})
