"""Partial answers of groups: stored by the explorer that samples them, continued by the explorer that claims the group next.

They are work in progress, and no facts: the group's seal and the run's end by its last step delete them, and nothing but the next claim reads them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rftdata.planning.claims import ClaimedGroup
from rftdata.postgres.database import Row, send
from rftdata.postgres.retry import ride_out
from rftdata.run import Run


@dataclass(frozen=True, kw_only=True)
class PartialAnswer:
    """What has been sampled of one answer. R = its tokens so far.

    Attributes:
        rollout_index, generation_index: of the rollout in the group, and of the answer in the rollout.
        input_digest: of the prompt and the sampling parameters.
        token_ids, logprobs: [R].
        version_spans: (first token, policy_version_id), ascending.
        finish_reason: stop or length; None while it is unfinished.
    """

    rollout_index: int
    generation_index: int
    input_digest: bytes
    token_ids: list[int]
    logprobs: list[float]
    version_spans: list[tuple[int, int]]
    finish_reason: str | None


@dataclass(frozen=True, kw_only=True)
class Part:
    """New tokens of an answer, from `first_token` on; the answer's spans are whole."""

    group_id: int
    claim_token: int
    first_token: int
    answer: PartialAnswer


def keep(run: Run, parts: Iterable[Part]) -> None:
    """Store parts of answers; those of groups that are no longer held under their claim, or of a finished run, are left out."""
    with run.database.transaction() as connection, connection.pipeline():
        send(connection, "limit_idleness")
        # In one order, as other transactions lock groups.
        for part in sorted(parts, key=lambda part: part.group_id):
            answer = part.answer
            send(
                connection,
                "keep_partial_tokens",
                run_id=run.run_id,
                group_id=part.group_id,
                claim_token=part.claim_token,
                rollout_index=answer.rollout_index,
                generation_index=answer.generation_index,
                first_token=part.first_token,
                input_digest=answer.input_digest,
                token_ids=answer.token_ids,
                logprobs=answer.logprobs,
                version_starts=[start for start, _ in answer.version_spans],
                policy_version_ids=[version for _, version in answer.version_spans],
                finish_reason=answer.finish_reason,
            )


def take_up(
    run: Run, worker_id: int, groups: Iterable[ClaimedGroup], *, policy_step: int, max_staleness: int
) -> dict[int, list[PartialAnswer]]:
    """Return what was sampled before for claimed groups, by group; without answers that would be too old to be trained on.

    Args:
        policy_step: trainer step of the policy that continues them.
    """
    begun = {group.group_id: group for group in groups if group.is_begun}
    if not begun:
        return {}
    rows = ride_out(lambda: run.database.fetch("partial_tokens", run_id=run.run_id, group_ids=list(begun)))
    found: dict[int, list[PartialAnswer]] = {}
    oldest: dict[int, int] = {}
    for parts in _by_answer(rows):
        group = begun[parts[0]["group_id"]]
        steps = [part["oldest_step"] for part in parts if part["oldest_step"] is not None]
        if steps and min(steps) < max(group.explore_step, policy_step, parts[0]["drawn_step"]) - max_staleness:
            continue
        found.setdefault(group.group_id, []).append(_joined(parts))
        oldest[group.group_id] = min([oldest.get(group.group_id, policy_step), *steps])
    if oldest:
        ride_out(
            lambda: run.database.run(
                "claims_continue", worker_id=worker_id, group_ids=list(oldest), policy_steps=list(oldest.values())
            )
        )
    return found


def _by_answer(rows: list[Row]) -> Iterable[list[Row]]:
    """Yield the parts of each answer. A part for another input, or from the first token on, begins an answer anew.

    A part that does not begin where an earlier one ended is left out: going back has deleted what was between.
    """
    parts: list[Row] = []
    length = 0
    for row in rows:
        key = (row["group_id"], row["rollout_index"], row["generation_index"])
        if parts and key != (parts[0]["group_id"], parts[0]["rollout_index"], parts[0]["generation_index"]):
            yield parts
            parts = []
        if row["first_token"] == 0 or (parts and row["input_digest"] != parts[0]["input_digest"]):
            parts = []
        if row["first_token"] > (length if parts else 0):
            continue
        parts.append(row)
        length = row["first_token"] + len(row["token_ids"])
    if parts:
        yield parts


def _joined(parts: list[Row]) -> PartialAnswer:
    token_ids: list[int] = []
    logprobs: list[float] = []
    for part in parts:
        # The next claim may have sampled the last tokens again.
        token_ids[part["first_token"] :] = part["token_ids"]
        logprobs[part["first_token"] :] = part["logprobs"]
    last = parts[-1]
    return PartialAnswer(
        rollout_index=last["rollout_index"],
        generation_index=last["generation_index"],
        input_digest=bytes(last["input_digest"]),
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=last["finish_reason"],
        version_spans=list(zip(last["version_starts"], last["policy_version_ids"], strict=True)),
    )
