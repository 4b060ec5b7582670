"""`/experience/N` and `/rollout/N`: what was sampled, what people and pipelines made of it, and where it went."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Form
from fastapi.responses import JSONResponse, Response

from rftcore.studio.chats import chat_parts
from rftcore.studio.failures import NotFoundError
from rftcore.studio.numbers import number_from, whole_from
from rftcore.studio.page import Page
from rftcore.studio.tokens import MOST_TOKENS, decoder_of, heat_tokens
from rftcore.studio.visits import Visit, VisitOf
from rftdata import labels, reviews
from rftdata.errors import QueryError
from rftdata.reports import lineage
from rftdata.reports.stored_rollouts import StoredExperience, StoredRollout, stored_experience, stored_rollout

PAGE = Page("Experience", "/experience")
router = APIRouter()
_LONGEST_REASON = 20_000


@router.get("/experience/{experience_id}")
def experience_page(visit: Visit, experience_id: int) -> Response:
    """Show one experience."""
    rollout = _experience(visit, experience_id)
    return _page(visit, rollout, rollout.experiences[0])


@router.get("/rollout/{rollout_id}")
def rollout_page(visit: Visit, rollout_id: int) -> Response:
    """Show a rollout: its experiences in order."""
    try:
        rollout = stored_rollout(visit.buffer, rollout_id)
    except QueryError as error:
        raise NotFoundError(visit.text("There is no such rollout.")) from error
    shown = [{"experience": each, "parts": _parts(each)} for each in rollout.experiences]
    return visit.render("rollout.html", rollout=rollout, shown=shown)


@router.get("/experience/{experience_id}/tokens")
def tokens(visit: Visit, experience_id: int) -> Response:
    """Return the tokens of an experience with their log-probabilities."""
    rollout = _experience(visit, experience_id)
    decode, reason = decoder_of(visit.buffer.find_run(rollout.run_id).config)
    found = heat_tokens(rollout.experiences[0], decode)
    is_cut = rollout.experiences[0].num_response_tokens > MOST_TOKENS
    return visit.render("tokens.html", tokens=found, reason=reason, most=MOST_TOKENS if is_cut else None)


@router.post("/experience/{experience_id}/reward")
def set_reward(
    visit: Visit,
    experience_id: int,
    reward: Annotated[str, Form()],
    seen: Annotated[str, Form()] = "",
    turn: Annotated[str, Form()] = "",
    reason: Annotated[str, Form(max_length=_LONGEST_REASON)] = "",
) -> Response:
    """Set the reward of an experience, or of one of its turns."""
    label = labels.RewardLabel(experience_id, number_from(reward), reason=reason.strip() or None, turn=whole_from(turn))
    batch = reviews.set_seen_reward(visit.buffer, label, whole_from(seen), author=visit.author)
    visit.live.hint()
    return JSONResponse({"label_batch_id": batch})


@router.post("/labels/undo")
def undo_labels(visit: Visit, label_batch_id: Annotated[int, Form()]) -> Response:
    """Undo a batch of labels. One that is undone stays so."""
    done = labels.undo(visit.buffer, label_batch_id, author=visit.author)
    visit.live.hint()
    return JSONResponse({"num_changed": done.num_changed, "overruled": list(done.overruled)})


def _experience(visit: VisitOf, experience_id: int) -> StoredRollout:
    try:
        return stored_experience(visit.buffer, experience_id)
    except QueryError as error:
        raise NotFoundError(visit.text("There is no such experience.")) from error


def _parts(experience: StoredExperience) -> list[Any]:
    return chat_parts(experience.messages, experience.prompt, experience.response)


def _page(visit: VisitOf, rollout: StoredRollout, experience: StoredExperience) -> Response:
    database, key = visit.buffer.database, experience.experience_id
    related = lineage.related_rows(database, key)
    return visit.render(
        "experience.html",
        rollout=rollout,
        experience=experience,
        parts=_parts(experience),
        seen=reviews.newest_label_id(visit.buffer, key),
        history=labels.history(visit.buffer, key, limit=200),
        annotations=visit.fetch(
            "studio_annotations", experience_id=key, rollout_id=rollout.rollout_id, group_id=rollout.group_id
        ),
        findings=lineage.findings(database, key),
        parents=[each for each in related if each.relation == "parent"],
        children=[each for each in related if each.relation == "child"],
        tasks=[each for each in related if each.relation == "task"],
        origin=lineage.origin(database, key),
        copies=lineage.copies(database, key),
        place=rollout.experience_ids.index(key),
    )
