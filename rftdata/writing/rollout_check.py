"""The check that a rollout can be stored, for producers that must record one bad rollout instead of losing its group.

It encodes what the writer will encode, so both accept the same values. Arrays are encoded together, which takes longer than all the rest, so
they are checked only when a write has failed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from rftdata.errors import RftError
from rftdata.experience import Group, Rollout, Sequence
from rftdata.experience_checks import validate
from rftdata.postgres.binary_copy import NULL, ExperienceKeys, experience_row, rollout_row, text
from rftdata.postgres.driver_errors import one_line
from rftdata.postgres.values import jsonb_bytes
from rftdata.segments.codec import encode
from rftdata.writing.write_batch import UNSTORABLE


def check_rollout(rollout: Rollout) -> None:
    """Refuse a rollout that cannot be stored, whatever its arrays hold.

    Raises:
        RftError: which part of it, and why.
    """
    for sequence in rollout.sequences:
        for name in ("messages", "reward_parts", "metrics"):
            _check_json(name, getattr(sequence, name))
    try:
        validate((Group([replace(rollout, index=0)], 0, 0),))
        rollout_row(0, 0, rollout)
        for sequence in rollout.sequences:
            keys = ExperienceKeys(0, 0, 0, 0, 0, 0, sequence.first_turn(0))
            experience_row(keys, "explorer", sequence, sequence.parent_id, (text(sequence.prompt), NULL))
    except RftError:
        raise
    except UNSTORABLE as error:
        raise _unstorable(error) from error


def unstorable_arrays(rollouts: Iterable[Rollout]) -> dict[int, RftError]:
    """Return the places of rollouts whose arrays cannot be stored alone, or not with those before them, with the reasons."""
    found: dict[int, RftError] = {}
    kept: list[Sequence] = []
    for place, rollout in enumerate(rollouts):
        together = [*kept, *rollout.sequences]
        try:
            if together:
                encode(together)
            kept = together
        except RftError as error:
            found[place] = error
        except UNSTORABLE as error:
            found[place] = _unstorable(error)
    return found


def _unstorable(error: Exception) -> RftError:
    return RftError(
        f"a rollout cannot be stored: {type(error).__name__}: {one_line(error)}",
        todo="correct what the workflow records",
    )


def _check_json(name: str, value: Any) -> None:
    try:
        jsonb_bytes(value)
    except UNSTORABLE as error:
        raise RftError(
            f"the {name} of a rollout cannot be stored: {one_line(error)}",
            allowed="texts, numbers, true, false, None, lists, and dicts of these",
            todo="convert other objects, for example with str(…)",
        ) from error
