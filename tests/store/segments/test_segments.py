"""Arrow segments: many in one file, checksummed; a damaged one is named and harms no other."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rftdata import Buffer
from rftdata.errors import BufferUnavailableError, SegmentCorruptError
from rftdata.maintenance.verification import verify
from rftdata.segments.base import Appended, SegmentAddress, SegmentAppender
from rftdata.segments.codec import SCHEMA
from rftdata.segments.posix import PosixSegmentStore
from tests.support.store_roles import Roles


@pytest.fixture
def store(tmp_path: Path) -> PosixSegmentStore:
    return PosixSegmentStore(tmp_path)


@pytest.fixture
def appender(store: PosixSegmentStore) -> Iterator[SegmentAppender]:
    with contextlib.closing(store.appender()) as appender:
        yield appender


def record_batch(rows: list[list[int]]) -> pa.RecordBatch:
    columns = {
        "token_ids": rows,
        "loss_mask": [[token % 2 for token in row] for row in rows],
        "behavior_logprobs": [[-0.5 * token for token in row] for row in rows],
        "policy_spans": [[{"start": 0, "policy_version_id": 4}] if row else [] for row in rows],
    }
    return pa.record_batch([pa.array(columns[name], SCHEMA.field(name).type) for name in SCHEMA.names], schema=SCHEMA)


def at(appended: Appended, segment_id: int = 1) -> SegmentAddress:
    return SegmentAddress(
        segment_id=segment_id,
        uri=appended.uri,
        offset_bytes=appended.offset_bytes,
        length_bytes=appended.length_bytes,
        checksum=appended.checksum,
    )


def test_segments_lie_one_after_the_other_in_one_file(
    tmp_path: Path, store: PosixSegmentStore, appender: SegmentAppender
) -> None:
    written = [appender.append(record_batch([[i, i + 1], [i]])) for i in range(3)]
    assert len({a.uri for a in written}) == 1
    assert [a.offset_bytes for a in written] == [
        0,
        written[0].length_bytes,
        written[0].length_bytes + written[1].length_bytes,
    ]
    assert (tmp_path / written[0].uri).stat().st_size == sum(a.length_bytes for a in written)
    for i in (2, 0, 1):
        assert store.read(at(written[i]), verify=True).column("token_ids").to_pylist() == [[i, i + 1], [i]]


def test_a_file_that_grew_after_it_was_mapped_is_read_to_its_new_end(
    store: PosixSegmentStore, appender: SegmentAppender
) -> None:
    first = appender.append(record_batch([[1]]))
    mapped = store.read(at(first))
    second = appender.append(record_batch([[2] * 10_000]))
    assert store.read(at(second), verify=True).column("token_ids").to_pylist() == [[2] * 10_000]
    assert mapped.column("token_ids").to_pylist() == [[1]]


def test_a_reader_of_a_growing_file_holds_no_descriptors_and_unmaps_what_it_has_forgotten(
    store: PosixSegmentStore, appender: SegmentAppender
) -> None:
    written = [appender.append(record_batch([[0]]))]
    read = [store.read(at(written[0]))]
    before = len(os.listdir("/proc/self/fd"))
    for i in range(1, 50):
        written.append(appender.append(record_batch([[i]])))
        read.append(store.read(at(written[-1]), verify=True))
    assert len(os.listdir("/proc/self/fd")) <= before
    store.remove([written[0].uri])  # what was read stays
    assert [batch.column("token_ids").to_pylist() for batch in read] == [[[i]] for i in range(50)]
    assert written[0].uri in Path("/proc/self/maps").read_text()
    del read
    gc.collect()
    assert written[0].uri not in Path("/proc/self/maps").read_text()


def test_a_file_that_was_replaced_is_mapped_anew(
    tmp_path: Path, store: PosixSegmentStore, appender: SegmentAppender
) -> None:
    written = [appender.append(record_batch([[i] * 20_000])) for i in range(2)]
    assert store.read(at(written[0]), verify=True).num_rows == 1
    path = tmp_path / written[0].uri
    shutil.copy(path, tmp_path / "copy")
    os.truncate(path, 1000)
    with pytest.raises(SegmentCorruptError, match="only 1000 bytes long"):
        store.read(at(written[1]), verify=True)
    (tmp_path / "copy").replace(path)  # as restored from a backup
    assert store.read(at(written[1]), verify=True).column("token_ids").to_pylist() == [[1] * 20_000]


def test_a_file_that_is_cut_after_it_was_read_is_damage_and_does_not_end_the_process(buffer: Buffer) -> None:
    roles = Roles(buffer)
    roles.attempt()
    roles.plan()
    roles.explore()
    ids = buffer.sql("SELECT experience_id FROM rft.experience ORDER BY 1")["experience_id"].to_pylist()
    assert buffer.read_arrays(ids, ["token_ids"]).num_rows == len(ids)
    for file in Path(buffer.config.segments or "").glob("*.arrows"):
        os.truncate(file, 10)
    with pytest.raises(SegmentCorruptError, match="only 10 bytes long"):
        buffer.read_arrays(ids, ["token_ids"])


def test_bytes_beyond_the_committed_length_mean_nothing(
    tmp_path: Path, store: PosixSegmentStore, appender: SegmentAppender
) -> None:
    appended = appender.append(record_batch([[1]]))
    with (tmp_path / appended.uri).open("ab") as file:
        file.write(b"a writer died here")
    assert store.read(at(appended), verify=True).num_rows == 1


def test_every_writer_has_a_file_of_its_own(store: PosixSegmentStore, appender: SegmentAppender) -> None:
    with contextlib.closing(store.appender()) as other:
        assert appender.append(record_batch([[1]])).uri != other.append(record_batch([[1]])).uri


@pytest.mark.parametrize("damage", ["cut", "cut after it was mapped", "emptied", "missing", "one bit"])
def test_a_damaged_segment_is_named(
    tmp_path: Path, store: PosixSegmentStore, appender: SegmentAppender, damage: str
) -> None:
    good, bad = appender.append(record_batch([[1]])), appender.append(record_batch([[2]]))
    with contextlib.closing(store.appender()) as other:
        elsewhere = other.append(record_batch([[3]]))
    path = tmp_path / bad.uri
    content = bytearray(path.read_bytes())
    if damage == "cut after it was mapped":
        store.read(at(bad))
    if damage.startswith("cut"):
        with path.open("r+b") as file:
            file.truncate(len(content) - 1)
    elif damage == "emptied":
        path.write_bytes(b"")
    elif damage == "missing":
        path.unlink()
    else:
        content[bad.offset_bytes + bad.length_bytes // 2] ^= 1
        path.write_bytes(content)
    with pytest.raises(SegmentCorruptError, match=r"segment 77 .* cannot be served"):
        store.read(at(bad, 77), verify=True)
    if damage.startswith("cut") or damage == "one bit":
        assert store.read(at(good), verify=True).num_rows == 1
    assert store.read(at(elsewhere), verify=True).num_rows == 1


def test_a_folder_that_is_not_there_condemns_no_segment(
    tmp_path: Path, store: PosixSegmentStore, appender: SegmentAppender
) -> None:
    """As if a file system were not mounted: the segments are unavailable, not damaged."""
    appended = appender.append(record_batch([[1]]))
    away = tmp_path / appended.uri
    away.rename(tmp_path / "elsewhere")
    with pytest.raises(BufferUnavailableError, match="missing or empty"):
        store.read(at(appended), verify=True)


def test_damage_is_found_by_verify_and_other_experiences_are_still_served(buffer: Buffer) -> None:
    roles = Roles(buffer)
    roles.attempt()
    roles.plan()
    first, second = roles.claim()
    roles.insert(roles.result(first, [0.0, 1.0]))
    roles.insert(roles.result(second, [0.0, 1.0]))
    segment = buffer.sql(
        "SELECT s.*, uri FROM rft.segment s JOIN rft.segment_file USING (file_id) ORDER BY segment_id"
    ).to_pylist()[1]
    path = Path(buffer.config.segments or "") / segment["uri"]
    content = bytearray(path.read_bytes())
    content[segment["offset_bytes"] + segment["length_bytes"] // 2] ^= 4
    path.write_bytes(content)
    (problem,) = verify(buffer)
    assert f"segment {segment['segment_id']} " in problem
    rows = buffer.sql("SELECT experience_id, group_id FROM rft.experience ORDER BY 1").to_pylist()
    assert buffer.read_arrays([rows[0]["experience_id"]], ["token_ids"]).num_rows == 1
    with pytest.raises(SegmentCorruptError, match=f"segment {segment['segment_id']} "):
        buffer.read_arrays([rows[2]["experience_id"]], ["token_ids"])


def test_a_dangling_reference_is_reported(buffer: Buffer) -> None:
    roles = Roles(buffer)
    roles.attempt()
    roles.plan()
    roles.explore()
    buffer.sql("DELETE FROM rft.segment")
    assert len(list(verify(buffer))) == 4


TOKENS = st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.lists(TOKENS, min_size=1, max_size=4))
def test_whatever_is_appended_is_read_back_exactly(tmp_path: Path, batches: list[list[list[int]]]) -> None:
    store = PosixSegmentStore(tmp_path)
    with contextlib.closing(store.appender()) as appender:
        written = [(rows, appender.append(record_batch(rows))) for rows in batches]
    for rows, appended in reversed(written):
        batch = store.read(at(appended), verify=True)
        assert appended.num_rows == batch.num_rows == len(rows)
        assert batch.column("token_ids").to_pylist() == rows
        expected = [list(np.asarray([-0.5 * token for token in row], dtype=np.float32)) for row in rows]
        assert batch.column("behavior_logprobs").to_pylist() == expected
