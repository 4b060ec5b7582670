"""Data-parallel ranks: each draws its share of a step by itself, and no process hands experiences to another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftdata import Buffer
from rftdata.attempts.batch import Batch
from rftdata.errors import FencedError, QueryError
from tests.support.preloaded import PreloadedCall
from tests.support.ranks import draw_as_rank
from tests.support.store_roles import Roles
from tests.support.waiting import PATIENCE_S


def start(
    buffer: Buffer, roles: Roles, store: Path, rank: int, steps: int, stop_after: int = 0
) -> subprocess.Popen[str]:
    return PreloadedCall(
        draw_as_rank,
        buffer.config,
        roles.run.name,
        str(store),
        rank,
        2,
        steps,
        stop_after,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )


def lines(process: subprocess.Popen[str], count: int) -> list[dict[str, Any]]:
    assert process.stdout is not None
    found = [process.stdout.readline() for _ in range(count)]
    assert all(found), process.communicate()[1]
    return [json.loads(line) for line in found]


@pytest.mark.slow
def test_two_ranks_draw_disjoint_shares_and_one_is_killed(buffer: Buffer, tmp_path: Path) -> None:
    roles = Roles(buffer, steps=8, batch_groups=4, offset=8)
    with roles.attempt():
        assert roles.work() == 32
    ranks = [start(buffer, roles, tmp_path / "first", rank, 4, stop_after=2) for rank in (0, 1)]
    seen = [line for process in ranks for line in lines(process, 2)]
    ranks[1].send_signal(signal.SIGKILL)
    ranks[1].communicate()
    ranks[0].communicate("go on\n", timeout=PATIENCE_S)
    assert ranks[0].returncode != 0, "a trainer that lost a rank cannot continue"
    # The surviving rank may have drawn step 3 before it noticed: its draws belong to an attempt that has ended.
    ranks = [start(buffer, roles, tmp_path / "second", rank, 4) for rank in (0, 1)]
    for process in ranks:
        output, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, errors
        seen += [json.loads(line) for line in output.splitlines()]
    by_step: dict[int, list[dict[str, Any]]] = {}
    for line in seen:
        by_step.setdefault(line["step"], []).append(line)
    assert sorted(by_step) == [1, 2, 3, 4]
    for parts in by_step.values():
        assert [sorted(part["rank"] for part in parts), len(parts)] == [[0, 1], 2]
        assert not set(parts[0]["rows"]) & set(parts[1]["rows"])
        assert [len(part["groups"]) for part in parts] == [2, 2]
        assert parts[0]["tokens"] == parts[1]["tokens"]
    consumed = buffer.sql("SELECT trainer_step, experience_id FROM rft.v_consumption").to_pylist()
    assert len({row["experience_id"] for row in consumed}) == len(consumed) == 4 * 4 * 2
    assert {(row["trainer_step"], row["experience_id"]) for row in consumed} == {
        (line["step"], experience_id) for line in seen for experience_id in line["rows"]
    }


def test_a_rank_of_an_attempt_that_was_replaced_is_fenced(buffer: Buffer) -> None:
    roles = Roles(buffer, offset=4)
    with roles.attempt() as attempt:
        roles.work()
        joined = buffer.join_attempt(roles.run, attempt.attempt_id)
    with roles.attempt():
        with pytest.raises(FencedError):
            joined.draw(1, 2, share=(1, 2), timeout_s=0)
        with pytest.raises(FencedError):
            buffer.join_attempt(roles.run, attempt.attempt_id)
    joined.close()


def test_a_rank_that_leaves_does_not_end_the_attempt(buffer: Buffer) -> None:
    roles = Roles(buffer, offset=4)
    with roles.attempt() as attempt:
        roles.work()
        buffer.join_attempt(roles.run, attempt.attempt_id).close()
        assert attempt.draw(1, 2, share=(0, 2), timeout_s=5) is not None


def a_batch(lengths: list[int]) -> Batch:
    """Groups of one experience each."""
    rows = [
        {
            "slot": i,
            "experience_id": 100 + i,
            "group_id": i,
            "rollout_index": 0,
            "turn_index": 0,
            "reward": 0.0,
            "reward_parts": {},
            "staleness": 0,
            "num_prompt_tokens": 1,
            "num_response_tokens": length - 1,
            "segment_id": 1,
            "segment_row": i,
        }
        for i, length in enumerate(lengths)
    ]
    return Batch(1, rows, None, (), None)  # type: ignore[arg-type]  # nothing is read


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 8))
def test_shares_are_disjoint_complete_and_even(lengths: list[int], world_size: int) -> None:
    parts = [a_batch(lengths).share(rank, world_size) for rank in range(world_size)]
    together = sorted(i for part in parts for i in part.rows["experience_id"].to_pylist())
    assert together == [100 + i for i in range(len(lengths))]
    loads = [int(part.lengths.sum()) for part in parts]
    assert max(loads) <= max(
        4 / 3 * np.ceil(sum(lengths) / world_size) + 1,
        max(lengths),
        sum(sorted(lengths)[-world_size - 1 :][:2]) * 4 / 3,
    )
    assert all(part.rows["slot"].to_pylist() == sorted(part.rows["slot"].to_pylist()) for part in parts)


def test_a_rank_that_does_not_exist_is_refused() -> None:
    with pytest.raises(QueryError, match=r"the rank does not exist.*2.*0 to 1"):
        a_batch([3, 4]).share(2, 2)
