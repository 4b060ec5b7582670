"""Labels of every kind in a large buffer: what a labeller, a page and an undo wait for, with few annotations and with many.

A buffer is filled with experiences, and by SQL with annotations of several people. The same operations are measured before and after that.

    seconds     of each operation: the least and the median
    seq_scans   scans of whole tables (annotations, experiences, groups, rollouts) by these operations, as PostgreSQL counts them
    growth      median with many annotations per median with few

`insert` and `undo` are batches of `--batch` annotations, one statement each, undone as one; `insert_reopening` is of a kind that the chain reads, so each
group is locked and returned to the pipeline. `history` is that of one experience, `page` what stands about 50 experiences, of all kinds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import rftdata
from benchmarks.harness.arguments import argument_parser, integer, scratch_folder
from benchmarks.harness.report import say, write
from rftdata import Buffer, Group, Rollout, labels
from rftdata import Sequence as Experience
from rftdata.annotations import Annotation, LabelKind, annotate, define_kinds, history
from rftdata.config import BufferConfig

GROUP_SIZE, PAGE, NUM_READS, NUM_BATCHES = 8, 50, 20, 3
_TABLES = ("annotation", "experience", "rollout", "rollout_group", "label_batch")
_FILL = """
    INSERT INTO rft.annotation (annotation_id, kind, kind_version, type, target_id, group_id, value, author, session_user_name, label_batch_id, made_at)
    SELECT nextval('rft.label_label_id_seq'), 'score', 1, 'number', e.experience_id, e.group_id, to_jsonb(0.5), 'person ' || p, session_user,
           (SELECT min(label_batch_id) FROM rft.label_batch WHERE session_user_name = session_user), clock_timestamp()
    FROM generate_series(1, %s) p CROSS JOIN rft.experience e ORDER BY p, e.experience_id"""


def filled(folder: Path, num_experiences: int) -> Buffer:
    """Return a buffer with experiences of a few tokens in one run, whose chain reads the kind `good`."""
    buffer = rftdata.open(BufferConfig(uri=str(folder / "buffer"), min_free_bytes=0))
    run = buffer.create_run(name="labels", config={}, seed=1, steps=1, pipeline_version="none")
    with buffer.writer(run) as writer:
        for key in range(num_experiences // GROUP_SIZE):
            rollouts = [
                Rollout(i, "ok", 1.0, [Experience("a", "b", np.arange(16), 8, "stop", reward=1.0)])
                for i in range(GROUP_SIZE)
            ]
            writer.submit(Group(rollouts, source="import", taskset="t", task_key=str(key)))
    buffer.sql(
        "INSERT INTO rft.pipeline (pipeline_version, digest, stages, label_kinds) VALUES ('none', '', '[]', '{good}')"
    )
    kinds = [LabelKind("score", "number", spec={"min": 0, "max": 1}), LabelKind("good", "bool", reopens=True)]
    define_kinds(buffer, kinds, author="owner")
    return buffer


def seq_scans(buffer: Buffer) -> int:
    time.sleep(1.5)  # sessions report what they did with such a delay
    query = "SELECT sum(seq_scan)::bigint AS n FROM pg_stat_user_tables WHERE schemaname = 'rft' AND relname = ANY (%s)"
    return int(buffer.sql(query, [list(_TABLES)])["n"][0].as_py())


def timed(buffer: Buffer, action: Callable[[int], object], times: int) -> dict[str, Any]:
    """Return seconds of `action`, called with 0, 1, …, and the scans of whole tables that all calls made."""
    before, seconds = seq_scans(buffer), []
    for i in range(times):
        started = time.perf_counter()
        action(i)
        seconds.append(time.perf_counter() - started)
    found = {"least": round(min(seconds), 4), "median": round(statistics.median(seconds), 4)}
    return {**found, "seq_scans": seq_scans(buffer) - before}


def operations(buffer: Buffer, name: str, size: int) -> dict[str, dict[str, Any]]:
    """Measure all operations; `name` makes the authors, so that nothing is superseded."""
    batches: list[int] = []

    def insert(kind: str, value: Any, i: int) -> None:
        given = [Annotation(kind, key, value) for key in range(1, size + 1)]
        batches.append(annotate(buffer, given, author=f"{name} {i}").label_batch_id)

    numbers = np.random.default_rng(1)
    most = int(buffer.sql("SELECT max(experience_id) AS m FROM rft.experience")["m"][0].as_py())

    def page(i: int) -> None:
        ids = [int(key) for key in numbers.integers(1, most, PAGE)]
        buffer.database.fetch("annotations_to_show", target="experience", target_ids=ids)

    return {
        "insert": timed(buffer, lambda i: insert("score", 0.25, i), NUM_BATCHES),
        "insert_reopening": timed(buffer, lambda i: insert("good", True, i), NUM_BATCHES),
        "history": timed(
            buffer, lambda i: history(buffer, target="experience", target_id=int(numbers.integers(1, most))), NUM_READS
        ),
        "page": timed(buffer, page, NUM_READS),
        "undo": timed(buffer, lambda i: labels.undo(buffer, batches[i], author=name), NUM_BATCHES),
    }


def measure(folder: Path, num_experiences: int, num_annotations: int, size: int) -> dict[str, Any]:
    with filled(folder, num_experiences) as buffer:
        say(f"{num_experiences} experiences are written")
        few = operations(buffer, "few", size)
        say("measured with few annotations")
        with buffer.database.transaction() as connection:
            connection.execute("SET LOCAL rft.label_batch = ''")
            connection.execute(_FILL, [num_annotations // num_experiences])
        size_bytes = buffer.sql("SELECT pg_total_relation_size('rft.annotation') AS n")["n"][0].as_py()
        stored = buffer.sql("SELECT count(*) AS n FROM rft.annotation")["n"][0].as_py()
        say(f"{stored} annotations are stored")
        many = operations(buffer, "many", size)
    growth = {name: round(many[name]["median"] / few[name]["median"], 2) for name in few}
    return {
        "annotations": stored,
        "bytes_per_annotation": round(size_bytes / stored),
        "few": few,
        "many": many,
        "growth": growth,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser("annotations", __doc__)
    parser.add_argument("--experiences", type=integer(GROUP_SIZE), default=20_000)
    parser.add_argument("--annotations", type=integer(), default=400_000)
    parser.add_argument("--batch", type=integer(), default=10_000, help="annotations in one statement")
    options = parser.parse_args(arguments)
    with scratch_folder(options) as folder:
        write(options, measure(folder, options.experiences, options.annotations, options.batch))
    return 0
