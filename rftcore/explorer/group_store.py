"""Stores finished groups. A group that cannot be stored with the others is stored alone, and its rollouts that cannot be stored as failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rftdata.errors import FencedError, RftError
from rftdata.experience import Group
from rftdata.writing.rollout_check import unstorable_arrays
from rftdata.writing.writer import Writer


def store_groups(writer: Writer, groups: Sequence[Group], on_failure: Callable[[str, str], None]) -> None:
    """Store groups in one write if that is possible. Those whose claims have passed to other explorers are not stored.

    Args:
        on_failure: receives the error of each rollout that is stored as failed, and an empty stack.

    Raises:
        RftError: a group cannot be stored for another reason than its rollouts' arrays.
    """
    try:
        writer.insert(*groups)
    except RftError as error:
        if type(error) not in (RftError, FencedError):  # the database or the disk, which the next group would meet, too
            raise
    else:
        return
    for group in groups:
        for place, why in unstorable_arrays(group.rollouts).items():
            group.rollouts[place] = replace(
                group.rollouts[place], outcome="failed", reward=None, sequences=[], error=str(why)
            )
            on_failure(str(why), "")
        try:
            writer.insert(group)
        except FencedError:
            continue
