"""Arrays that a write appended without committing them do not survive an erasure."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rftdata import Buffer, Group, Rollout
from rftdata.errors import FencedError
from rftdata.maintenance import erasure, purge
from rftdata.maintenance.verification import verify
from rftdata.writing.writer import Writer
from tests.support.secret_rows import MARK, SECRET, all_ids, erase_at_once, files_hold, secret_group, store_secret
from tests.support.store_roles import Roles, own_group, tokens


@pytest.fixture
def stored(buffer: Buffer) -> Buffer:
    return store_secret(buffer)


def abandon(writer: Writer) -> None:
    """Append arrays with the secret that no row will name, like a write whose outcome stays unknown."""
    arrays = writer._store.begin_arrays(secret_group("lost").rollouts[0].sequences)
    assert arrays is not None
    arrays.result()


def test_a_write_that_is_refused_leaves_no_bytes(buffer: Buffer) -> None:
    roles = Roles(buffer, num_tasks=2, batch_groups=2, steps=4)
    roles.attempt()
    roles.plan()
    late, other = roles.claim()
    secret = tokens(prompt=SECRET, response=SECRET, arrays={"image": MARK})
    with buffer.writer(roles.run) as writer:
        writer.insert(roles.result(other, [0.0, 1.0]))
        buffer.sql("UPDATE rft.rollout_group SET claim_token = claim_token + 1 WHERE group_id = %s", [late.group_id])
        with pytest.raises(FencedError):
            writer.insert(Group([Rollout(i, "ok", 1.0, [secret]) for i in range(2)], late.group_id, late.claim_token))
        assert files_hold(buffer, SECRET.encode()) == []
        writer.insert(own_group(task_key="next"))
    assert files_hold(buffer, SECRET.encode()) == []
    assert list(verify(buffer)) == []


def erase_now(buffer: Buffer) -> None:
    erasure.erase(buffer, now=True)


def erase_later(buffer: Buffer) -> None:
    assert erasure.erase(buffer).num_ranges_left == 2  # what was purged, and the gap
    erase_at_once(buffer)


@pytest.mark.parametrize("erase", [erase_now, erase_later])
def test_ranges_that_no_row_names_are_overwritten(stored: Buffer, erase: Callable[[Buffer], object]) -> None:
    with stored.writer("r") as writer:
        abandon(writer)
        writer.insert(own_group(task_key="after"))
        purge.purge(stored, "prompt LIKE '%Mallory%'", reason="x", author="ada")
        assert len(files_hold(stored, SECRET.encode())) == 2  # of the purged group, and of the other write
        erase(stored)
        assert files_hold(stored, SECRET.encode()) == []
        writer.insert(own_group(task_key="later"))
    erased = "SELECT count(*) AS n FROM rft.retired_range"
    num_ranges = stored.sql(erased)["n"].to_pylist()
    assert erasure.erase(stored, now=True).num_ranges == 0
    assert stored.sql(erased)["n"].to_pylist() == num_ranges
    assert list(verify(stored)) == []
    assert stored.read_arrays(all_ids(stored)[-4:], ["token_ids"])["token_ids"].to_pylist() == [[5, 6, 7, 8, 9]] * 4


def test_a_write_in_flight_survives_an_erasure_and_what_it_left_behind_does_not(stored: Buffer) -> None:
    with stored.writer("r") as writer:
        writer.insert(own_group(task_key="before"))
        purge.purge(stored, "prompt LIKE '%Mallory%'", reason="x", author="ada")
        abandon(writer)
        erasure.erase(stored)
        assert len(files_hold(stored, SECRET.encode())) == 2  # it may be about to commit
        erasure.erase(stored, now=True)
        assert files_hold(stored, SECRET.encode()) == []
        writer.insert(own_group(task_key="after"))
    assert list(verify(stored)) == []
    assert stored.read_arrays(all_ids(stored)[-4:], ["token_ids"])["token_ids"].to_pylist() == [[5, 6, 7, 8, 9]] * 4
