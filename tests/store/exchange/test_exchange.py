"""Moving experiences out of a buffer and into another: exact in every format, once, and with their origin."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from rftcore.cli import run_command
from rftdata import Buffer, Group, Rollout, exchange, labels
from rftdata.errors import ArchivedError, QueryError
from rftdata.experience import AbandonedTry, Baseline
from rftdata.maintenance.archive import archive
from rftdata.maintenance.verification import verify
from rftdata.segments.codec import ColumnReader
from tests.support.store_roles import Roles, own_group, tokens

FORMATS = ["out.parquet", "out.jsonl", "out"]
TEXT = 'Füße 🦶 \u2028 "quoted" \\n\n\ttab 中文 \U0001f9ea'
TRIES = [
    AbandonedTry("lost"),
    AbandonedTry(
        TEXT, [{"messages": [{"role": "assistant", "content": TEXT}], "turns": [{"turn": 0, "num_tokens": 3}]}]
    ),
]
ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "bf16": np.array([1.5, float("nan"), -0.0], dtype=ml_dtypes.bfloat16),
    "image": np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
    "mask": np.array([True, False, True]),
    "nothing": np.zeros((0, 7), dtype=np.int16),
    "scalar": np.array(2.5),
    "teacher": np.array([[float("nan"), float("inf")], [-float("inf"), 1e-300]]),
}


@pytest.fixture
def full(buffer: Buffer) -> Buffer:
    """Everything an experience can be: turns, failures, a greedy rollout, odd texts and arrays, labels, a parent, spans of policies."""
    roles = Roles(buffer)
    with roles.attempt() as attempt:
        roles.plan()
        claimed, *others = roles.claim()
        first = tokens(
            1.0,
            roles.version,
            prompt=TEXT,
            response=TEXT,
            messages=[{"role": "user", "content": TEXT, "n": [1, 2.5, None]}],
            reward_parts={"accuracy": 1.0},
            metrics={"entropy": 0.1, "ünï": 2},
            arrays=ARRAYS,
            behavior_logprobs=[float("nan"), -math.pi],
        )
        second = tokens(
            None, roles.version, loss_mask=[0, 1], arrays={"bf16": ARRAYS["bf16"][:1]}, finish_reason="length"
        )
        rollouts = [
            Rollout(0, "ok", 1.0, [first, second], seconds=1.25),
            Rollout(1, "failed", None, [], seconds=0.5, error=f"ValueError: {TEXT}", tries=TRIES),
        ]
        baseline = Baseline.of(Rollout(2, "ok", 0.5, [second, first], seconds=0.25))
        roles.insert(Group(rollouts, claimed.group_id, claimed.claim_token, baseline=baseline))
        roles.insert(*[roles.result(group, [0.25, 0.75]) for group in others])
        del attempt
    ids = experience_ids(buffer)
    made = tokens(0.5, parent_id=ids[0], behavior_logprobs=None)
    with buffer.writer(roles.run) as writer:
        writer.insert(
            Group(
                [Rollout(0, "ok", 0.5, [made])],
                source="synthesis",
                taskset="mine",
                task_key=TEXT,
                payload={"answer": TEXT},
            )
        )
    buffer.sql("UPDATE rft.task SET features = '{\"level\": 3}' WHERE taskset = 'mine'")
    labels.set_rewards(buffer, {ids[0]: 0.125, ids[1]: 1 / 3}, author="ada", reason=f"because {TEXT}")
    labels.set_rewards(buffer, {ids[0]: 0.5}, author="bo", final=True)
    return buffer


def experience_ids(buffer: Buffer, run: str | None = None) -> list[int]:
    found = buffer.sql(
        "SELECT experience_id FROM rft.experience JOIN rft.run USING (run_id) WHERE coalesce(name = %s, true) ORDER BY 1",
        [run],
    )
    return found["experience_id"].to_pylist() if found.num_rows else []


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The content of a file without what each buffer assigns: ids, the run's name, batches, hops."""
    rows = []
    for _, row in exchange.formats.read(path):
        for name in ("buffer_id", "run_id", "run", "group_id", "experience_id", "parent_id", "earlier"):
            row.pop(name)
        for name in ("token_ids", "loss_mask", "behavior_logprobs"):
            row[name] = None if row[name] is None else row[name].tobytes()
        for name in ("baseline", "tries", "messages", "metrics", "reward_parts", "task_payload", "task_features"):
            row[name] = None if row[name] is None else json.loads(row[name], parse_int=_number)
        for label in row["labels"] or ():
            label.pop("label_batch_id")
        rows.append(row)
    return rows


def _number(text: str) -> float:
    """A number of JSON: PostgreSQL writes 1e39 with all its digits."""
    return int(text) if len(text) < 39 else float(text)


@pytest.mark.parametrize("name", FORMATS)
def test_out_and_in_again_is_exact(full: Buffer, other: Buffer, tmp_path: Path, name: str) -> None:
    done = exchange.export(full, tmp_path / name)
    assert (done.num_groups, done.num_rollouts, done.num_experiences, done.num_purged) == (3, 5, 5, 0)
    loaded = exchange.load(other, tmp_path / name)
    assert (loaded.runs, loaded.num_groups, loaded.num_experiences, loaded.num_present) == (["roles"], 3, 5, 0)
    again = tmp_path / ("again-" + name)
    exchange.export(other, again)
    assert rows_of(again) == rows_of(tmp_path / name)
    assert list(verify(other)) == []


def test_every_format_states_the_same(full: Buffer, tmp_path: Path) -> None:
    for name in FORMATS:
        exchange.export(full, tmp_path / name)
    first, *others = [rows_of(tmp_path / name) for name in FORMATS]
    assert others == [first, first]
    assert [row["error"] for row in first if row["outcome"] == "failed"] == [f"ValueError: {TEXT}"]


def test_arrays_of_every_type_and_shape_arrive_bit_by_bit(full: Buffer, other: Buffer, tmp_path: Path) -> None:
    exchange.export(full, tmp_path / "a.jsonl")
    exchange.load(other, tmp_path / "a.jsonl")
    row = other.sql("SELECT segment_id, segment_row FROM rft.experience ORDER BY experience_id LIMIT 1").to_pylist()[0]
    batch = other.reader.batches([row["segment_id"]])[row["segment_id"]]
    for name, array in ARRAYS.items():
        found = ColumnReader(batch, name).row(row["segment_row"])
        assert found is not None
        assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_a_second_import_adds_nothing_and_an_interrupted_one_is_completed(
    full: Buffer, other: Buffer, tmp_path: Path
) -> None:
    file = tmp_path / "a.parquet"
    exchange.export(full, file)
    exchange.load(other, file)
    before = other.sql("SELECT count(*) AS n, max(experience_id) AS m FROM rft.experience").to_pylist()
    again = exchange.load(other, file)
    assert (again.runs, again.num_groups, again.num_experiences, again.num_present) == (["roles"], 0, 0, 3)
    assert other.sql("SELECT count(*) AS n, max(experience_id) AS m FROM rft.experience").to_pylist() == before
    # As if only the first group had been written when the process died: a run of its own has part of the file.
    part = tmp_path / "part.parquet"
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(file).slice(0, 3), part)
    assert exchange.load(other, part, run="half").num_groups == 1
    rest = exchange.load(other, file, run="half")
    assert (rest.num_groups, rest.num_present) == (2, 1)
    assert len(experience_ids(other, "half")) == 5


@pytest.mark.parametrize("run", [None, "mine"])
def test_two_imports_of_one_file_at_once_store_it_once(
    full: Buffer, other: Buffer, tmp_path: Path, run: str | None
) -> None:
    exchange.export(full, tmp_path / "out.jsonl")
    together = threading.Barrier(2)

    def load(_: int) -> exchange.ImportResult:
        together.wait()
        return exchange.load(other, tmp_path / "out.jsonl", run=run)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(load, range(2))
    assert first.runs == second.runs and len(first.runs) == 1
    assert first.num_groups + second.num_groups == first.num_present + second.num_present > 0
    assert len(experience_ids(other)) == len(experience_ids(full))


def test_an_import_killed_half_way_continues_and_a_file_changed_meanwhile_is_refused(
    buffer: Buffer, other: Buffer, tmp_path: Path
) -> None:
    for name in ("first", "second"):
        run = buffer.create_run(name=name, config={}, seed=1, steps=1, pipeline_version="none")
        with buffer.writer(run) as writer:
            writer.insert(own_group())  # one: how many of them a transaction takes depends on how busy the machine is
    file, changed = tmp_path / "a.parquet", tmp_path / "changed.parquet"
    exchange.export(buffer, file)
    table = pyarrow.parquet.read_table(file)
    pyarrow.parquet.write_table(
        table.set_column(table.column_names.index("response"), "response", [["x"] * 4]), changed
    )
    program = (
        "import sys, pathlib, rftdata; from rftdata import exchange; from rftdata.config import BufferConfig\n"
        "with rftdata.open(BufferConfig(uri=sys.argv[1], segments=sys.argv[2])) as b: exchange.load(b, pathlib.Path(sys.argv[3]))"
    )
    # Killed when the groups of one run are stored and those of the other are not.
    done = subprocess.run(
        [sys.executable, "-c", program, other.config.uri, str(other.config.segments), str(file)],
        check=False,
        env={**os.environ, "RFT_FAILPOINT": "writer.committed"},
    )
    assert done.returncode == -signal.SIGKILL
    assert len(experience_ids(other)) == 2
    whole = file.read_bytes()
    file.write_bytes(changed.read_bytes())
    with pytest.raises(
        QueryError, match=r"was changed since .*'(first|second)' was interrupted.*put the old file back"
    ):
        exchange.load(other, file)
    assert len(experience_ids(other)) == 2
    file.write_bytes(whole)
    rest = exchange.load(other, file)
    assert (rest.num_groups, rest.num_present) == (1, 1)
    exchange.export(other, tmp_path / "again.parquet")
    assert rows_of(tmp_path / "again.parquet") == rows_of(file)


def test_a_file_that_changes_between_its_check_and_its_import_is_refused(
    full: Buffer, other: Buffer, tmp_path: Path
) -> None:
    exchange.export(full, tmp_path / "a.jsonl")
    contents = exchange.check(tmp_path / "a.jsonl")
    _break(tmp_path / "a.jsonl", response="other")
    with pytest.raises(QueryError, match="was changed while it was imported"):
        exchange.load(other, contents)
    assert experience_ids(other) == []


def test_an_undone_label_of_an_imported_row_is_undone_here_too(full: Buffer, other: Buffer, tmp_path: Path) -> None:
    one = experience_ids(full)[-1]
    full.database.fetch("begin_label_batches", num=7)  # so that batches have other ids here
    first = labels.set_rewards(full, {one: 5.0}, author="eve")
    labels.undo(full, labels.set_rewards(full, {one: 6.0}, author="eve").label_batch_id, author="eve", reason="a slip")
    exchange.export(full, tmp_path / "x.parquet")
    exchange.load(other, tmp_path / "x.parquet")
    undone, set_to_6, set_to_5 = labels.history(other, experience_ids(other)[-1])[:3]
    assert undone["reason"] == f"undo of label batch {set_to_6['label_batch_id']}: a slip"
    assert set_to_6["label_batch_id"] != first.label_batch_id + 1
    for buffer, batch in ((full, first.label_batch_id), (other, set_to_5["label_batch_id"])):
        assert labels.undo(buffer, batch, author="eve").num_changed == 1


def test_labels_come_with_their_history_and_can_be_undone_here(full: Buffer, other: Buffer, tmp_path: Path) -> None:
    exchange.export(full, tmp_path / "a.parquet")
    exchange.load(other, tmp_path / "a.parquet")
    first, second = experience_ids(other)[:2]
    history = labels.history(other, first)
    assert [(row["old_value"], row["new_value"], row["author"], row["final"]) for row in history] == [
        (0.125, 0.5, "bo", True),
        (1.0, 0.125, "ada", False),
    ]
    theirs = labels.history(other, second)[0]
    assert theirs["label_batch_id"] == history[1]["label_batch_id"] and theirs["reason"] == f"because {TEXT}"
    labels.undo(other, history[0]["label_batch_id"], author="eve")
    rows = other.sql(
        "SELECT reward, reward_final, reward_sampled FROM rft.experience WHERE experience_id = %s", [first]
    )
    assert rows.to_pylist() == [{"reward": 0.125, "reward_final": False, "reward_sampled": 1.0}]


def test_an_imported_experience_names_its_origin_and_no_policy_of_this_buffer(
    full: Buffer, other: Buffer, tmp_path: Path
) -> None:
    exchange.export(full, tmp_path / "a.parquet")
    exchange.load(other, tmp_path / "a.parquet")
    rows = other.sql(
        "SELECT policy_version_min, source::text AS source, parent_id FROM rft.experience ORDER BY experience_id"
    ).to_pylist()
    assert {(row["policy_version_min"], row["source"]) for row in rows} == {(None, "import")}
    assert rows[-1]["parent_id"] == experience_ids(other)[0]  # the parent's id here
    theirs = full.sql("SELECT experience_id, policy_version_min FROM rft.experience ORDER BY 1").to_pylist()
    buffer_id = full.sql("SELECT buffer_id::text AS b FROM rft.buffer")["b"][0].as_py()
    for here, there in zip(experience_ids(other), theirs, strict=True):
        (origin,) = other.database.fetch("origins_of_experience", experience_id=here)
        assert (origin["buffer_id"], origin["run"], origin["experience_id"]) == (
            buffer_id,
            "roles",
            there["experience_id"],
        )
    spans = other.read_arrays(experience_ids(other)[:1], ["policy_spans"])["policy_spans"][0].as_py()
    assert [span["policy_version_id"] for span in spans] == [theirs[0]["policy_version_min"]]


def test_a_chain_of_imports_names_every_hop(full: Buffer, other: Buffer, tmp_path: Path) -> None:
    """From one buffer to another, there into a second run, and home again."""
    exchange.export(full, tmp_path / "1.parquet")
    exchange.load(other, tmp_path / "1.parquet")
    exchange.export(other, tmp_path / "2.parquet")
    exchange.load(other, tmp_path / "2.parquet", run="copy")
    exchange.export(other, tmp_path / "3.parquet", runs=["copy"])
    assert exchange.load(full, tmp_path / "3.parquet", run="home").num_experiences == 5
    (origin,) = full.database.fetch("origins_of_experience", experience_id=experience_ids(full, "home")[0])
    assert [hop["run"] for hop in origin["earlier"]] == ["roles", "roles"] and origin["run"] == "copy"
    assert origin["earlier"][0]["experience_id"] == experience_ids(full, "roles")[0]
    exchange.export(full, tmp_path / "4.parquet", runs=["home"])
    assert rows_of(tmp_path / "4.parquet") == rows_of(tmp_path / "1.parquet")


def test_an_imported_run_can_be_trained_on(buffer: Buffer, tmp_path: Path) -> None:
    run = buffer.create_run(name="old", config={}, seed=1, steps=1, pipeline_version="p")
    with buffer.writer(run) as writer:
        writer.insert(own_group(task_key="a"), own_group(task_key="b"))
    exchange.export(buffer, tmp_path / "a.parquet", runs=["old"])
    exchange.load(buffer, tmp_path / "a.parquet", run="new")
    with buffer.attempt("new") as attempt:
        batch = attempt.draw(1, 2, timeout_s=5)
        assert batch is not None and batch.rows["reward"].to_pylist() == [0.0, 1.0, 0.0, 1.0]
        assert set(batch.rows["staleness"].to_pylist()) == {0}
        assert batch.packed("token_ids").tolist() == [5, 6, 7, 8, 9] * 4


def test_an_import_within_a_buffer_is_shown_from_both_ends(
    buffer: Buffer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = buffer.create_run(name="old", config={}, seed=1, steps=1, pipeline_version="p")
    with buffer.writer(run) as writer:
        writer.insert(own_group(task_key="a"))
    exchange.export(buffer, tmp_path / "a.parquet")
    exchange.load(buffer, tmp_path / "a.parquet", run="new")
    monkeypatch.setenv("RFT_SEGMENTS", str(buffer.config.segments))
    (first, _), (copy, _) = experience_ids(buffer, "old"), experience_ids(buffer, "new")
    _, out, _ = rft(capsys, "lineage", str(first), "--buffer", buffer.config.uri)
    assert f"was imported into run 'new' as experience {copy}" in out
    _, out, _ = rft(capsys, "lineage", str(copy), "--buffer", buffer.config.uri)
    assert f"comes from experience {first} of run 'old' in this buffer" in out
    code, _, err = rft(capsys, "lineage", "--checkpoint", "1", "--origin", "--buffer", buffer.config.uri)
    assert code == 2 and "one question at a time" in err


def test_only_what_is_chosen_is_exported(full: Buffer, other: Buffer, tmp_path: Path) -> None:
    done = exchange.export(full, tmp_path / "a.jsonl", where="reward > 0.6 -- the good ones")
    assert (done.num_experiences, done.num_groups, done.num_rollouts) == (1, 1, 1)
    assert exchange.load(other, tmp_path / "a.jsonl").num_experiences == 1
    whole = exchange.export(full, tmp_path / "b.jsonl", where="reward > 0.6", whole_groups=True)
    assert (whole.num_experiences, whole.num_groups) == (2, 1)
    # The rest of a group that is there in part is refused rather than lost.
    with pytest.raises(QueryError, match=r", without experience \d+.*another run"):
        exchange.load(other, tmp_path / "b.jsonl")
    assert exchange.load(other, tmp_path / "b.jsonl", run="whole").num_experiences == 2


def test_tasks_with_another_content_are_refused_and_a_prefix_helps(full: Buffer, other: Buffer, tmp_path: Path) -> None:
    exchange.export(full, tmp_path / "a.parquet")
    other.sql("INSERT INTO rft.task (taskset, task_key, payload) VALUES ('mine', %s, '{\"answer\": 42}')", [TEXT])
    with pytest.raises(QueryError, match=r"has other content in this buffer.*--taskset-prefix"):
        exchange.load(other, tmp_path / "a.parquet")
    assert other.sql("SELECT (SELECT count(*) FROM rft.run) + (SELECT count(*) FROM rft.task) AS n")[
        "n"
    ].to_pylist() == [1]
    exchange.load(other, tmp_path / "a.parquet", taskset_prefix="theirs/")
    assert other.sql("SELECT DISTINCT taskset FROM rft.v_experience ORDER BY 1")["taskset"].to_pylist() == [
        "theirs/mine",
        "theirs/set0",
    ]


def _break(file: Path, **changes: Any) -> None:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for name, value in changes.items():
        if value is None:
            lines[-1].pop(name)
        else:
            lines[-1][name] = value
    file.write_text("\n".join(json.dumps(line) for line in lines))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"group_id": None}, "lacks group_id"),
        ({"prompt": None}, "the row has no prompt"),
        ({"buffer_id": "here"}, "buffer_id is not the id of a buffer"),
        ({"loss_mask": [1]}, "one value per token"),
        ({"loss_mask": [0, 0, 0, 1, 300]}, "out of bounds"),
        ({"token_ids": ["a"]}, "token_ids cannot be .*expected whole numbers"),
        ({"num_prompt_tokens": 99}, "a wrong number of prompt tokens"),
        (
            {"reward": "NaN"},
            r"the column reward is not a finite number \(got nan\); allowed: finite numbers between -3.4e.38 and 3.4e.38, or none",
        ),
        ({"reward": "high"}, r"line 6 .*the column reward cannot be 'high': expected a number"),
        ({"turn_index": True}, "the column turn_index cannot be True: expected a whole number"),
        ({"response": 4}, "the column response cannot be 4: expected a text"),
        ({"reward_final": "yes"}, "the column reward_final cannot be 'yes': expected true or false"),
        ({"loss_mask": [0, 300]}, "the column loss_mask cannot be"),
        ({"behavior_logprobs": 3}, "the column behavior_logprobs cannot be 3"),
        ({"labels": [{"new_value": 1}]}, "the column labels, label 1 has no author"),
        ({"source": "dream"}, "unknown source"),
        ({"outcome": "dream"}, "unknown outcome"),
        ({"created_at": "yesterday"}, "the column created_at cannot be .*Invalid isoformat"),
        ({"arrays": [{"name": "x", "dtype": "object", "shape": [1], "data": "AAAAAAAAAAA="}]}, "array 'x'"),
        ({"arrays": [{"name": "x", "dtype": "float32", "shape": [3], "data": "AAAA"}]}, "array 'x'"),
        ({"arrays": [{"name": "token_ids", "dtype": "int8", "shape": [1], "data": "AA=="}]}, "cannot have this name"),
        ({"task_payload": [1]}, "not a JSON object"),
    ],
)
def test_a_bad_row_is_named_and_nothing_is_imported(
    full: Buffer, other: Buffer, tmp_path: Path, changes: dict[str, Any], what: str
) -> None:
    file = tmp_path / "a.jsonl"
    exchange.export(full, file)
    _break(file, **changes)
    with pytest.raises(QueryError, match=what) as refused:
        exchange.load(other, file)
    assert "line 6" in str(refused.value) or "lacks" in str(refused.value)
    counts = "SELECT (SELECT count(*) FROM rft.run) + (SELECT count(*) FROM rft.task) + (SELECT count(*) FROM rft.rollout_group) AS n"
    assert other.sql(counts)["n"].to_pylist() == [0]


def test_a_parquet_column_of_another_type_is_named(full: Buffer, other: Buffer, tmp_path: Path) -> None:
    exchange.export(full, tmp_path / "a.parquet")
    table = pyarrow.parquet.read_table(tmp_path / "a.parquet")
    index = table.column_names.index("reward")
    pyarrow.parquet.write_table(table.set_column(index, "reward", [["high"] * table.num_rows]), tmp_path / "b.parquet")
    with pytest.raises(
        QueryError, match=r"row 1 of .*b\.parquet: the column reward cannot be read.*got 'string'.*allowed: double"
    ):
        exchange.load(other, tmp_path / "b.parquet")


def test_rows_of_a_group_must_stand_together(full: Buffer, other: Buffer, tmp_path: Path) -> None:
    exchange.export(full, tmp_path / "a.jsonl")
    lines = (tmp_path / "a.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "b.jsonl").write_text("".join([*lines[1:], lines[0]]))
    with pytest.raises(QueryError, match=r"line 6.*are not adjacent.*sort the file"):
        exchange.load(other, tmp_path / "b.jsonl")


# --- Damaged files ---------------------------------------------------------------------------------------------------

_ODD_TEXTS = st.sampled_from(
    [
        "",
        "a\x00b",
        "\ud800",
        "x\udfff",
        "ok",
        "NaN",
        "{}",
        "[1]",
        "null",
        '{"a": NaN}',
        '{"a": "\\u0000"}',
        '{"a": 1e999}',
    ]
)
_ODD_INTEGERS = st.sampled_from([0, -1, 1, 2**31 - 1, 2**31, -(2**31) - 1, 2**63 - 1, 2**63, -(2**63) - 1, 10**30])
_ODD_FLOATS = st.sampled_from([math.nan, math.inf, -math.inf, 1e39, -0.0, 0.5, 1e308, 10**400])
_ODD_TIMES = st.sampled_from(
    ["2024-01-01T00:00:00", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "0001-01-01T00:00:00+00:00"]
)
_ODD_VALUES = st.one_of(st.none(), st.booleans(), _ODD_TEXTS, _ODD_INTEGERS, _ODD_FLOATS, _ODD_TIMES)
_ODD = st.recursive(
    _ODD_VALUES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_ODD_TEXTS, inner, max_size=2)),
    max_leaves=4,
)
# Values that an import assigns itself, or that describe another part of the row.
_RENUMBERED = ("turn_index", "rollout_index", "group_size")


def _damaged(draw: st.DrawFn, value: Any, odd: st.SearchStrategy[Any]) -> Any:
    """The value with one odd value somewhere in it, or in place of it."""
    if isinstance(value, dict) and value and draw(st.booleans()):
        name = draw(st.sampled_from([*sorted(value), "unknown"]))
        if draw(st.integers(0, 5)) == 0:
            return {key: item for key, item in value.items() if key != name}
        return {**value, name: _damaged(draw, value.get(name), odd)}
    if isinstance(value, list) and value and draw(st.booleans()):
        i = draw(st.integers(0, len(value)))
        return [*value[:i], _damaged(draw, value[i] if i < len(value) else None, odd), *value[i + 1 :]]
    return draw(odd)


def _import_damaged(buffer: Buffer, file: Path, column: str, number: int) -> None:
    """Import a file with one damaged value: refused, by name and without a trace, or stored and exported as it is."""
    counts = (
        "SELECT (SELECT count(*) FROM rft.run) + (SELECT count(*) FROM rft.task) + (SELECT count(*) FROM rft.rollout_group)"
        " + (SELECT count(*) FROM rft.import_file) + (SELECT count(*) FROM rft.experience) AS n"
    )
    before = buffer.sql(counts)["n"][0].as_py()
    run, refusal = f"fuzz{number}", None
    try:
        exchange.load(buffer, file, run=run, taskset_prefix=run)
    except QueryError as error:
        refusal = str(error)
    if refusal is not None:
        assert str(file) in refusal
        assert re.search(r"(line|row) \d+ of|lacks|unknown field", refusal), refusal
        assert column in refusal or "are not adjacent" in refusal, refusal
        assert buffer.sql(counts)["n"][0].as_py() == before
        return
    again = file.with_name(f"again{number}{file.suffix}")
    exchange.export(buffer, again, runs=[run])
    for found, wanted in zip(_stored_rows(again), _stored_rows(file), strict=True):
        found["taskset"] = found["taskset"].removeprefix(run)
        assert found == wanted


def _stored_rows(file: Path) -> list[dict[str, Any]]:
    """What an import keeps of the rows of a file."""
    rows = rows_of(file)
    for row in rows:
        prompt = row["num_prompt_tokens"] or 0
        for name in _RENUMBERED:
            row.pop(name)
        for name in ("annotations", "tries"):  # there are none either way
            row[name] = None if row[name] in ("[]", []) else row[name]
        for name, size in (("loss_mask", 1), ("behavior_logprobs", 4)):  # of the prompt they mean nothing
            row[name] = row[name] and row[name][prompt * size :]
    return rows


def test_a_damaged_line_is_refused_by_name_or_stored_as_it_is(full: Buffer, other: Buffer, tmp_path: Path) -> None:
    exchange.export(full, tmp_path / "a.jsonl")
    whole = (tmp_path / "a.jsonl").read_text().split("\n")[:-1]
    file = tmp_path / "damaged.jsonl"
    numbers = itertools.count()

    @settings(max_examples=250)
    @given(st.data())
    def load_damaged(data: st.DataObject) -> None:
        i = data.draw(st.integers(0, len(whole) - 1))
        line = json.loads(whole[i])
        column = data.draw(st.sampled_from(exchange.columns.SCHEMA.names))
        line[column] = _damaged(data.draw, line[column], _ODD)
        file.write_text("\n".join([*whole[:i], json.dumps(line), *whole[i + 1 :]]))
        _import_damaged(other, file, column, next(numbers))

    load_damaged()
    file.write_text("\n".join(whole))
    assert exchange.load(other, file).num_groups == 3


def test_a_damaged_column_is_refused_by_name_or_stored_as_it_is(full: Buffer, other: Buffer, tmp_path: Path) -> None:
    file = tmp_path / "damaged.parquet"
    exchange.export(full, tmp_path / "a.parquet")
    whole = pyarrow.parquet.read_table(tmp_path / "a.parquet")
    numbers = itertools.count()
    times = st.sampled_from([0, 2**62, -(2**62), 253402300800000000, -62135596800000001, -62135596800000000])

    @settings(max_examples=200)
    @given(st.data())
    def load_damaged(data: st.DataObject) -> None:
        column = data.draw(st.sampled_from(exchange.columns.SCHEMA.names))
        place = whole.schema.get_field_index(column)
        values = whole.column(column).to_pylist()
        kind = whole.schema.field(column).type
        i = data.draw(st.integers(0, len(values) - 1))
        if pyarrow.types.is_timestamp(kind):
            values = whole.column(column).cast(pyarrow.int64()).to_pylist()
            values[i] = data.draw(times)
            array = pyarrow.array(values, pyarrow.int64()).cast(kind)
        else:
            values[i] = _damaged(data.draw, values[i], _ODD)
            try:
                array = pyarrow.array(values, data.draw(st.sampled_from([kind, kind, None])))
            except (pyarrow.ArrowException, OverflowError, TypeError, ValueError):
                reject()
        table = whole.set_column(place, column, array)
        if data.draw(st.integers(0, 9)) == 0:
            table = whole.remove_column(place)
        try:
            pyarrow.parquet.write_table(table, file)
        except pyarrow.ArrowException:
            reject()  # no Parquet file can hold it
        _import_damaged(other, file, column, next(numbers))

    load_damaged()
    pyarrow.parquet.write_table(whole, file)
    assert exchange.load(other, file).num_groups == 3


def test_a_negative_number_is_refused_by_name_or_stored_as_it_is(full: Buffer, other: Buffer, tmp_path: Path) -> None:
    """In the last row, so that an import which does not check it first has stored the groups before."""
    file = tmp_path / "a.jsonl"
    exchange.export(full, file)
    *others, last = (json.loads(line) for line in file.read_text().splitlines())
    numbers = [name for name, value in last.items() if type(value) in (int, float)]
    assert {"seconds", "turn_index", "explore_step", "group_size", "num_prompt_tokens"} <= set(numbers)
    for number, name in enumerate(numbers):
        file.write_text("\n".join(json.dumps(line) for line in [*others, {**last, name: -1}]))
        _import_damaged(other, file, name, number)
    for row in (rows := [*others, last]):
        row["baseline"] = row["baseline"] and {**row["baseline"], "seconds": -1}
    assert any(row["baseline"] for row in rows)
    file.write_text("\n".join(json.dumps(line) for line in rows))
    with pytest.raises(QueryError, match="baseline has a negative number of seconds"):
        exchange.load(other, file)


def test_what_no_row_shows_is_refused_before_the_first_is_stored(full: Buffer, other: Buffer, tmp_path: Path) -> None:
    """Names under which nothing can be stored, and a run that takes nothing."""
    file = tmp_path / "a.jsonl"
    exchange.export(full, file)
    archived = other.create_run(name="done", config={}, seed=1, steps=1, pipeline_version="none")
    archived.end("finished", "done")
    archive(other, "done", author="ada")
    deep = tmp_path / Path(*["d" * 200] * 11)
    deep.mkdir(parents=True)
    whole = file.read_text()
    (deep / "a.jsonl").write_text(whole)
    before = other.sql("SELECT (SELECT count(*) FROM rft.run) + (SELECT count(*) FROM rft.task) AS n").to_pylist()
    with pytest.raises(ArchivedError, match="'done' is archived: nothing can be imported into it"):
        exchange.load(other, file, run="done")
    with pytest.raises(QueryError, match="the path of the file is too long"):
        exchange.load(other, deep / "a.jsonl")
    with pytest.raises(QueryError, match=r"the name of a run is not valid .got 'a/b'"):
        exchange.load(other, file, run="a/b")
    file.write_text(whole.replace('"run": "roles"', '"run": ".."'))
    with pytest.raises(QueryError, match=r"the name of a run is not valid .*another name .--run"):
        exchange.load(other, file)
    after = other.sql("SELECT (SELECT count(*) FROM rft.run) + (SELECT count(*) FROM rft.task) AS n").to_pylist()
    assert after == before
    assert exchange.load(other, file, run="named").num_groups == 3


def rft(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run_command(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_commands(
    full: Buffer, other: Buffer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RFT_SEGMENTS", str(tmp_path / "segments"))
    file = str(tmp_path / "a.parquet")
    code, out, _ = rft(capsys, "export", file, "--buffer", full.config.uri)
    assert code == 0 and out == f"{file}: 5 experiences, 5 rollouts, 3 groups\n"
    monkeypatch.setenv("RFT_SEGMENTS", str(tmp_path / "other"))
    code, out, _ = rft(capsys, "import", file, "--json", "--buffer", other.config.uri)
    assert code == 0 and json.loads(out) == {"runs": ["roles"], "num_groups": 3, "num_experiences": 5, "num_present": 0}
    monkeypatch.delenv("RFT_SEGMENTS")  # the imported run names the folder of the arrays
    code, out, _ = rft(capsys, "import", file, "--buffer", other.config.uri)
    assert code == 0 and out == "0 experiences in 0 groups imported into roles; 3 groups were already present\n"
    code, out, _ = rft(capsys, "query", "select sum(len(token_ids)) as n from experience", "--buffer", other.config.uri)
    assert code == 0 and "25" in out
    here, there = experience_ids(other)[0], experience_ids(full)[0]
    code, out, _ = rft(capsys, "lineage", str(here), "--buffer", other.config.uri)
    assert code == 0 and f"comes from experience {there} of run 'roles' in buffer " in out
    code, out, _ = rft(capsys, "lineage", str(here), "--origin", "--json", "--buffer", other.config.uri)
    assert code == 0 and [hop["experience_id"] for hop in json.loads(out)] == [there]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["export", "x.csv"], ".parquet"),
        (["export", "a.jsonl", "--where", "rewad > 1"], 'column "rewad" does not exist'),
        (["export", "a.jsonl", "--where", "true); DROP TABLE rft.draw; SELECT 1, (2"], "multiple commands"),
        (["export", "a.jsonl", "--where", "pg_notify('x', '') IS NULL AND reward > 9"], "no experience is chosen"),
        (["export", "a.jsonl", "--run", "rolls"], "did you mean 'roles'"),
        (["export", "there.jsonl"], "already exists"),
        (["export", "no/folder/a.jsonl"], "cannot be written"),
        (["import", "missing.parquet"], "the file does not exist"),
        (["import", "there.jsonl"], "no rows"),
        (["import", "text.parquet"], "cannot be read"),
        (["import", "folder"], "not a dataset folder"),
        (["import", "text.jsonl"], "line 1"),
    ],
)
def test_bad_arguments_are_refused_and_leave_nothing(
    full: Buffer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    what: str,
) -> None:
    monkeypatch.setenv("RFT_SEGMENTS", str(tmp_path / "segments"))
    (tmp_path / "work" / "folder").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    Path("there.jsonl").touch()
    Path("text.parquet").write_text("no parquet")
    Path("text.jsonl").write_text("no json\n")
    before = sorted(Path().iterdir())
    code, out, err = rft(capsys, *arguments, "--buffer", full.config.uri)
    assert (code, out) == (2, "") and what in err, err
    assert sorted(Path().iterdir()) == before
    assert full.sql("SELECT to_regclass('rft.draw') IS NOT NULL AS there")["there"].to_pylist() == [True]


def test_groups_made_of_others_do_not_wait_for_them(buffer: Buffer, other: Buffer, tmp_path: Path) -> None:
    """Their parents are found by the transaction that stores them, so they cost no transactions of their own."""
    run = buffer.create_run(name="chain", config={}, seed=1, steps=1, pipeline_version="none")
    with buffer.writer(run) as writer:
        for key in range(40):
            group = own_group([0.5], task_key=str(key))
            if key:
                group.rollouts[0].sequences[0] = tokens(0.5, parent_id=experience_ids(buffer)[-1])
            writer.insert(group)
    exchange.export(buffer, tmp_path / "a.parquet")
    exchange.load(other, tmp_path / "a.parquet")
    ids = experience_ids(other)
    parents = other.sql("SELECT parent_id FROM rft.experience ORDER BY experience_id")["parent_id"].to_pylist()
    assert parents == [None, *ids[:-1]]
    # How many groups a transaction takes depends on how busy the machine is.
    assert other.sql("SELECT count(*) AS n FROM rft.write_receipt")["n"][0].as_py() < 40
