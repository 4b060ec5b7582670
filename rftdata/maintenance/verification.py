"""Verification: compares the rows of the database with the segments, byte by byte."""

from __future__ import annotations

from collections.abc import Iterator

from rftdata.buffer import Buffer
from rftdata.errors import SegmentCorruptError
from rftdata.segments.codec import purged_rows


def verify(buffer: Buffer) -> Iterator[str]:
    """Check every segment's checksum, references and purges; yield one sentence per problem.

    Raises:
        BufferUnavailableError: the folder of the segments cannot be read.
    """
    database, reader = buffer.database, buffer.reader
    purged = {row["segment_id"]: set(row["rows"]) for row in database.fetch("purged_rows")}
    damaged: list[SegmentCorruptError] = []
    for address, num_rows in reader.all_addresses():
        try:
            found = reader.read(address)
        except SegmentCorruptError as error:
            damaged.append(error)
            continue
        if found.num_rows != num_rows:
            yield f"segment {address.segment_id} has {found.num_rows} rows, but {num_rows} according to rft.segment"
        kept = sorted(purged.get(address.segment_id, set()) - purged_rows(found))
        if kept:
            yield f"segment {address.segment_id} still contains row {kept[0]}, which was purged; restore the newer file, or purge again"
    yield from map(str, reader.with_experiences(damaged))
    for row in database.fetch("misplaced_segments"):
        yield f"segment {row['segment_id']} is in {row['place']}"
    for row in database.fetch("dangling_references"):
        place = f"row {row['segment_row']} of segment {row['segment_id']}"
        yield f"experience {row['experience_id']} refers to {place}, which does not exist"
