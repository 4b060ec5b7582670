"""Verification: compares the rows of the database with the segments and the files of archives, byte by byte."""

from __future__ import annotations

from collections.abc import Iterator

from rftdata.buffer import Buffer
from rftdata.errors import SegmentCorruptError
from rftdata.segments.codec import purged_rows


def verify(buffer: Buffer) -> Iterator[str]:
    """Check segments, references, purges, archives and rights of a buffer; yield one sentence per problem.

    Raises:
        BufferUnavailableError: the folder of the segments cannot be read.
    """
    database, reader = buffer.database, buffer.reader
    purged = {row["segment_id"]: set(row["rows"]) for row in database.fetch("purged_rows")}
    damaged: list[SegmentCorruptError] = []
    for address, num_rows in reader.all_addresses():
        try:
            batch = reader.read(address)
        except SegmentCorruptError as error:
            damaged.append(error)
            continue
        if batch.num_rows != num_rows:
            yield f"segment {address.segment_id} has {batch.num_rows} rows, but {num_rows} according to rft.segment"
        kept = sorted(purged.get(address.segment_id, set()) - purged_rows(batch))
        if kept:
            yield f"segment {address.segment_id} still contains row {kept[0]}, which was purged; restore the newer file, or purge again"
    yield from map(str, reader.with_experiences(damaged))
    for row in database.fetch("misplaced_segments"):
        yield f"segment {row['segment_id']} is in {row['place']}"
    for row in database.fetch("dangling_references"):
        place = f"row {row['segment_row']} of segment {row['segment_id']}"
        yield f"experience {row['experience_id']} refers to {place}, which does not exist"
    for row in database.fetch("wrong_annotations"):
        yield f"annotation {row['annotation_id']} is about {row['target']} {row['target_id']}, which does not exist or does not fit it"
    for row in database.fetch("wrong_comments"):
        yield f"comment {row['comment_id']} is about {row['target']} {row['target_id']}, which does not exist or does not fit it"
    for row in database.fetch("broken_references"):
        rows = "1 row" if row["num_rows"] == 1 else f"{row['num_rows']} rows"
        yield f"{rows} of rft.{row['child']} name what rft.{row['parent']} does not have: {row['referring']} {row['first_key']}"
    for row in database.fetch("open_to_everybody"):
        yield f"every account of the server may use the {row['name']}; run `rft db roles`"
    yield from verify_archives(buffer)


def verify_archives(buffer: Buffer) -> Iterator[str]:
    """Check the files of every archive: their checksums, and their rows against the database; yield one sentence per problem."""
    folder = buffer.archives
    files = buffer.database.fetch("archive_files", run_id=None)
    for row in files:
        if problem := folder.problem(row["path"], row["num_bytes"], row["checksum"]):
            yield f"{problem}: it holds {row['num_rows']} rows of {row['table_name']} of the run {row['run']!r}; restore it from a backup"
    archives = buffer.database.fetch("archives")
    for row in archives:
        name = row["run"]
        if row["status"] == "writing":
            yield f"archiving the run {name!r} was interrupted; the run is whole: `rft archive {name}` again, or `rft restore-run {name}`"
        elif row["status"] == "restored":
            yield f"the run {name!r} was restored, and files of its archive may be left: `rft restore-run {name}` removes them"
        else:
            held = sum(f["num_rows"] for f in files if f["run_id"] == row["run_id"] and f["table_name"] == "experience")
            if not held == row["num_experiences"] == row["num_in_database"]:
                yield (
                    f"the archive of the run {name!r} holds {held} experiences of {row['num_experiences']},"
                    f" and the database {row['num_in_database']}"
                )
    recorded = {folder.folder / row["path"] for row in files}
    busy = {row["run_id"] for row in archives if row["status"] != "archived"}
    for file in folder.all_files():
        if file not in recorded and folder.run_id_of(file) not in busy:
            yield f"the file {file} is of no archive; remove it"
