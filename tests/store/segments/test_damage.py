"""Damaged segments: reported with their file, place and rows; other rows stay readable; a run continues without them."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rftcore.cli import run_command
from rftdata import Buffer
from rftdata.errors import BufferUnavailableError, SegmentCorruptError
from rftdata.segments.posix import PosixSegmentStore
from rftdata.segments.reader import SegmentReader
from tests.support.store_roles import Roles

Segment = dict[str, Any]


def segments(buffer: Buffer) -> list[Segment]:
    """Every segment with its file and the experiences in it."""
    rows: list[Segment] = buffer.sql(
        "SELECT s.segment_id, uri, offset_bytes, length_bytes, array_agg(experience_id ORDER BY experience_id) AS rows"
        " FROM rft.segment s JOIN rft.segment_file USING (file_id) JOIN rft.experience USING (segment_id) GROUP BY 1, 2, 3, 4"
        " ORDER BY 1"
    ).to_pylist()
    return rows


def path_of(buffer: Buffer, segment: Segment) -> Path:
    return Path(buffer.config.segments or "") / segment["uri"]


def flip(buffer: Buffer, segment: Segment, at: int) -> None:
    path = path_of(buffer, segment)
    content = bytearray(path.read_bytes())
    content[segment["offset_bytes"] + at] ^= 0x10
    path.write_bytes(content)


def cut(buffer: Buffer, segment: Segment) -> None:
    os.truncate(path_of(buffer, segment), segment["offset_bytes"] + segment["length_bytes"] - 1)


# A segment is one Arrow stream: its schema with metadata first, the values of its last column near its end.
DAMAGES: dict[str, tuple[Callable[[Buffer, Segment], None], str]] = {
    "a bit of the values": (lambda b, s: flip(b, s, s["length_bytes"] - 40), "do not match their checksum"),
    "a bit of the metadata": (lambda b, s: flip(b, s, 20), "do not match their checksum"),
    "a cut file": (cut, "bytes long"),
    "a missing file": (lambda b, s: path_of(b, s).unlink(), "its file is missing"),
}


@pytest.fixture
def roles(buffer: Buffer) -> Roles:
    """Groups of two experiences, each written by a writer of its own: one file with one segment per group."""
    return Roles(buffer, batch_groups=2, offset=3, steps=4, max_refill=4)


def explore_one_by_one(roles: Roles) -> list[int]:
    roles.plan()
    groups = [roles.insert(roles.result(group, [0.0, 1.0]))[0] for group in roles.claim()]
    roles.decide()
    return groups


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_segment_is_named_with_its_rows_and_all_others_are_served(
    buffer: Buffer, roles: Roles, damage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with roles.attempt():
        explore_one_by_one(roles)
    good, bad, *others = segments(buffer)
    corrupt, why = DAMAGES[damage]
    corrupt(buffer, bad)
    fresh = SegmentReader(buffer.database, PosixSegmentStore(Path(buffer.config.segments or "")))
    with pytest.raises(SegmentCorruptError) as caught:
        fresh.take([(bad["segment_id"], 0)], ["token_ids"])
    first, last = bad["rows"]
    place = f"segment {bad['segment_id']} ({bad['length_bytes']} bytes at {bad['offset_bytes']} of {bad['uri']})"
    assert place in str(caught.value) and why in str(caught.value)
    assert f"experiences {first}-{last}" in str(caught.value) and caught.value.experience_ids == (first, last)
    carried = pickle.loads(pickle.dumps(caught.value))  # as between the processes of a cluster
    assert (str(carried), carried.segment_id, carried.experience_ids) == (
        str(caught.value),
        bad["segment_id"],
        (first, last),
    )
    for segment in (good, *others):
        assert fresh.take([(segment["segment_id"], 1)], ["token_ids"])["token_ids"].to_pylist() == [[5, 6, 7, 8, 9]]

    monkeypatch.setenv("RFT_SEGMENTS", str(buffer.config.segments))
    assert run_command(["doctor", "--json", "--buffer", buffer.config.uri]) == 1
    wrong = [finding["text"] for finding in json.loads(capsys.readouterr().out)["findings"] if not finding["ok"]]
    assert len(wrong) == 1 and place in wrong[0] and f"experiences {first}-{last}" in wrong[0]


def test_doctor_lists_every_damage(
    buffer: Buffer, roles: Roles, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with roles.attempt():
        explore_one_by_one(roles)
    *damaged, _ = segments(buffer)
    assert len(damaged) > len(DAMAGES)
    for segment, (corrupt, _) in zip(damaged, DAMAGES.values(), strict=False):
        corrupt(buffer, segment)
    buffer.sql("UPDATE rft.segment_file SET size_bytes = 1 WHERE uri = %s", [damaged[len(DAMAGES)]["uri"]])
    monkeypatch.setenv("RFT_SEGMENTS", str(buffer.config.segments))
    assert run_command(["doctor", "--buffer", buffer.config.uri]) == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WRONG")]
    assert len(wrong) == len(DAMAGES) + 1
    for segment in damaged[: len(DAMAGES) + 1]:
        assert sum(f"segment {segment['segment_id']} " in line for line in wrong) == 1
    assert "beyond the committed length" in wrong[-1]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_group_is_dropped_with_a_verdict_and_another_is_drawn(
    buffer: Buffer, roles: Roles, damage: str
) -> None:
    with roles.attempt() as attempt:
        first, second, third, *_ = explore_one_by_one(roles)
        bad = segments(buffer)[0]
        DAMAGES[damage][0](buffer, bad)
        assert attempt.draw(1, 2, timeout_s=0.5) is None, "the step waits for a group in the place of the lost one"
        state = roles.group(first)
        assert state["trainable"] is False
        assert state["closed_reason"].startswith(f"dropped by storage: segment {bad['segment_id']} ")
        verdicts = buffer.sql(
            "SELECT experience_id, kept, stage, reason FROM rft.verdict WHERE stage = 'storage'"
        ).to_pylist()
        assert [row["experience_id"] for row in verdicts] == bad["rows"]
        assert all(not row["kept"] and DAMAGES[damage][1] in row["reason"] for row in verdicts)
        roles.work()  # the planner fills the place
        batch = attempt.draw(1, 2, timeout_s=5)
        assert batch is not None and batch.num_groups == 2
        drawn = set(batch.rows["group_id"].to_pylist())
        assert second in drawn and first not in drawn and third not in drawn
        assert len(batch.packed("token_ids")) == 20
    with roles.attempt() as again:
        batch = again.draw(1, 2, timeout_s=5)
        assert batch is not None and first not in batch.rows["group_id"].to_pylist(), "a resume does not bring it back"


def test_a_run_whose_groups_are_all_damaged_ends_instead_of_drawing_them_forever(buffer: Buffer) -> None:
    roles = Roles(buffer, batch_groups=2, steps=1, max_refill=0)
    with roles.attempt() as attempt:
        explore_one_by_one(roles)
        for segment in segments(buffer):
            flip(buffer, segment, 300)
        batch = attempt.draw(1, 2, timeout_s=5)
        assert batch is not None and len(batch) == 0
        assert batch.short_reason == "0 of 2 groups survived: 2 planned and 0 refilled, explorer.max_refill is used up"
        attempt.record_step(1, batch, wait_seconds=0, train_seconds=0, publish_seconds=0, metrics={})
    steps = buffer.sql("SELECT outcome::text AS outcome FROM rft.train_step").to_pylist()
    assert steps == [{"outcome": "skipped"}]


def test_a_folder_out_of_reach_stops_the_trainer_and_condemns_no_group(buffer: Buffer, roles: Roles) -> None:
    with roles.attempt() as attempt:
        explore_one_by_one(roles)
        folder = Path(buffer.config.segments or "")
        folder.rename(folder.with_name("unmounted"))
        folder.mkdir()
        with pytest.raises(BufferUnavailableError, match="missing or empty"):
            attempt.draw(1, 2, timeout_s=5)
        folder.rmdir()
        folder.with_name("unmounted").rename(folder)
        batch = attempt.draw(1, 2, timeout_s=5)
        assert batch is not None and batch.num_groups == 2


def test_a_group_whose_file_was_restored_can_be_drawn_again(buffer: Buffer, roles: Roles) -> None:
    with roles.attempt() as attempt:
        first, *_ = explore_one_by_one(roles)
        bad = segments(buffer)[0]
        kept = path_of(buffer, bad).rename(path_of(buffer, bad).with_name("back-up"))
        assert attempt.draw(1, 2, timeout_s=0.2) is None
        kept.rename(path_of(buffer, bad))
        buffer.sql("SELECT rft.reopen_groups(ARRAY[%s]::bigint[])", [first])
        roles.decide()
        batch = attempt.draw(1, 2, timeout_s=5)
        assert batch is not None and first in batch.rows["group_id"].to_pylist()
        assert len(batch.packed("token_ids")) == 20
