"""`/group/N`: the answers to one task side by side, with what distinguishes each from another one."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response

from rftcore.studio.chats import chat_parts
from rftcore.studio.differences import difference
from rftcore.studio.failures import NotFoundError
from rftcore.studio.page import Page
from rftcore.studio.visits import Visit
from rftdata.errors import QueryError
from rftdata.reports.stored_rollouts import stored_group

PAGE = Page("Group", "/group")
router = APIRouter()


@router.get("/group/{group_id}")
def group_page(visit: Visit, group_id: int, base: int | None = None) -> Response:
    """Show a group; `base`: the experience with which the others are compared."""
    try:
        group = stored_group(visit.buffer, group_id)
    except QueryError as error:
        raise NotFoundError(visit.text("There is no such group.")) from error
    rows = visit.buffer.database.fetch_by_index("studio_group", group_id=group_id)
    chosen = next((row for row in rows if row["experience_id"] == base), None)
    for row in rows:
        is_other = chosen is not None and row is not chosen
        row["difference"] = difference(chosen["response"], row["response"]) if chosen and is_other else None
    return visit.render(
        "group.html",
        group=group,
        rows=rows,
        base=chosen,
        prompt=_prompt(rows),
        failed=[each for each in group.rollouts if not each.experience_ids],
    )


def _prompt(rows: list[dict[str, object]]) -> list[object]:
    """Return the parts of the chat before the first answer, which the experiences of a group share."""
    if not rows:
        return []
    parts = chat_parts(rows[0]["messages"], str(rows[0]["prompt"] or ""), "")
    first = next((i for i, part in enumerate(parts) if part.role == "assistant"), len(parts))
    return list(parts[:first])
