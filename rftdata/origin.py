"""The origins of imported groups and experiences in their own buffer, and their labels there."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class LabelRecord:
    """A label as it was given, for an import; fields as in `rft.label`."""

    turn: int | None = None
    old_value: float | None
    new_value: float | None
    author: str
    session_user_name: str
    source: str
    reason: str | None
    label_batch_id: int
    final: bool
    labelled_at: datetime.datetime

    def renumbered(self, label_batch_ids: Mapping[int, int]) -> LabelRecord:
        """Return the label with the ids of its batch, and of the batch that it undoes, in this buffer.

        Args:
            label_batch_ids: id in the other buffer -> id here.
        """
        reason, undone = self.reason, undone_batch(self.reason)
        if undone is not None and undone in label_batch_ids:
            reason = undo_reason(label_batch_ids[undone], _UNDO.sub("", self.reason or ""))
        own = label_batch_ids.get(self.label_batch_id, self.label_batch_id)
        return replace(self, label_batch_id=own, reason=reason)


_UNDO = re.compile(r"^undo of label batch (\d+)(: )?")


def undo_reason(label_batch_id: int, reason: str | None) -> str:
    """Return the reason of the labels that undo a batch."""
    return f"undo of label batch {label_batch_id}" + (f": {reason}" if reason else "")


def undone_batch(reason: str | None) -> int | None:
    """Return the batch that labels with this reason undo; None if they undo none."""
    undo = _UNDO.match(reason or "")
    return None if undo is None else int(undo[1])


@dataclass(frozen=True, kw_only=True)
class SequenceOrigin:
    """The origin of an imported experience in its own buffer; fields as in `rft.experience_origin`.

    Attributes:
        reward, reward_final: with its latest label applied; `Sequence.reward` is the sampled one.
        turn_rewards: of its turns, with their latest labels applied; None if it has none. The array `step_reward` has the sampled ones.
        labels: its labels there, oldest first.
        annotations: what stands about it there, and about its rollout or group if it is the first of it; see `rft.v_annotation_in_file`.
        comments: those on it there, and on its rollout or group if it is the first of it; see `rft.v_comment_in_file`.
        edit: the edit that it renders; None for other experiences. See `rft.edited_response.origin`.
        source: source of the experience where it was first stored.
    """

    origin_experience_id: int
    origin_parent_id: int | None
    policy_version_min: int | None
    policy_version_max: int | None
    policy_step: int | None
    sampled_at: datetime.datetime
    earlier: list[dict[str, Any]]
    source: str
    reward: float | None
    reward_final: bool
    turn_rewards: tuple[float, ...] | None = None
    labels: tuple[LabelRecord, ...] = ()
    annotations: tuple[Mapping[str, Any], ...] = ()
    comments: tuple[Mapping[str, Any], ...] = ()
    edit: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class GroupOrigin:
    """The origin of an imported group in its own buffer; fields as in `rft.group_origin`."""

    buffer_id: str
    origin_run_id: int
    origin_run: str
    origin_group_id: int
    explore_step: int
    group_size: int
