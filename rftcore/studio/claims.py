"""Claims of an open page: the next questions of a queue, and those that it holds."""

from __future__ import annotations

from rftcore.studio.numbers import whole_from
from rftcore.studio.visits import VisitOf
from rftdata.annotations import questions

MOST_AT_ONCE = 10
_MOST_HELD = 200


def claimed(visit: VisitOf, queue: str, count: int, run_id: int | None, holding: str) -> list[questions.Claim]:
    """Lease the next questions to the account, and renew those in `holding`, a list with commas, as the page sends it."""
    held = [whole_from(each) or 0 for each in holding.split(",") if each][:_MOST_HELD]
    return questions.claim(visit.buffer, queue, min(max(count, 0), MOST_AT_ONCE), run_id=run_id, holding=held)
