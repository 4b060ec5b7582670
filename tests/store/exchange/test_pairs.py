"""`rft pairs`: built once, whatever is run twice; corrections change what is built; exported with their texts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from psycopg.types.json import Jsonb
from torch import tensor

from operators.experience.pair_builder import PairBuilder
from rftcore.algorithms import build_algorithm
from rftcore.cli import run_command
from rftcore.pipeline import pairs
from rftcore.trainer.batches.drawn import ARRAYS, train_batch
from rftcore.trainer.batches.forms import paired
from rftdata import Buffer, Group, Rollout
from rftdata.attempts.label_cut import at_label_cut
from rftdata.attempts.stored_selection import select
from rftdata.errors import ConflictError, QueryError
from rftdata.exchange.pairs import export_pairs
from rftdata.postgres.database import execute
from tests.support.store_roles import own_group, tokens


@pytest.fixture
def stored(buffer: Buffer) -> Buffer:
    """Three groups: rewards 0, 1 (experiences 1, 2); 1, 1 (3, 4); 0.5, 0.75 (5, 6)."""
    run = buffer.create_run(name="source", config={}, seed=1, steps=1, pipeline_version="none", mode="train")
    with buffer.writer(run) as writer:
        for i, rewards in enumerate([(0.0, 1.0), (1.0, 1.0), (0.5, 0.75)]):
            writer.insert(own_group(rewards, task_key=str(i)))
    return buffer


def build(buffer: Buffer, dry_run: bool = False, page_groups: int = 512, **args: Any) -> pairs.BuiltPairs:
    builder = PairBuilder.from_args(args)
    assert isinstance(builder, PairBuilder)
    return pairs.build_pairs(buffer.find_run("source"), builder, author="ada", dry_run=dry_run, page_groups=page_groups)


def stored_pairs(buffer: Buffer, where: str = "true") -> list[tuple[int, int]]:
    rows = buffer.sql(f"SELECT chosen_id, rejected_id FROM rft.v_pair WHERE {where} ORDER BY pair_id").to_pylist()
    return [(row["chosen_id"], row["rejected_id"]) for row in rows]


def test_pairs_that_are_formed_of_a_drawn_group_follow_its_labels(stored: Buffer) -> None:
    algorithm = build_algorithm("online_dpo")
    assert algorithm.config.pairs is not None
    groups = select(stored.database, "select group_id from rft.v_group", pin_labels=False)
    run = stored.create_run(
        name="online", config={}, seed=1, steps=1, pipeline_version="none", mode="train", selected=groups
    )
    stored.sql("UPDATE rft.experience SET reward = 2 WHERE experience_id = 1")
    with stored.attempt(run) as attempt:
        drawn = attempt.draw(1, 3, ARRAYS, timeout_s=5)
        assert drawn is not None
        batch = replace(
            train_batch(drawn, algorithm), state_BA=tensor(drawn.rows["experience_id"].to_pylist())[:, None]
        )
    formed, metrics = paired(batch, algorithm.config.pairs)
    assert formed.state_BA is not None and sorted(formed.state_BA.view(-1, 2).tolist()) == [[1, 2], [6, 5]]
    assert metrics == {"pairs_formed": 2.0, "groups_without_pair": 1.0}


def test_building_twice_adds_nothing(stored: Buffer) -> None:
    first, again = build(stored), build(stored)
    assert (first.num_groups, first.num_groups_with_pairs, first.num_pairs, first.num_new) == (3, 1, 1, 1)
    assert (again.num_pairs, again.num_new) == (1, 0)
    assert stored_pairs(stored) == [(2, 1)]
    # A smaller margin adds what it allows, and leaves alone what is there.
    assert build(stored, margin=0.25).num_new == 1
    assert stored_pairs(stored) == [(2, 1), (6, 5)]


def test_stored_pairs_record_the_author_the_settings_and_the_label_cut(stored: Buffer) -> None:
    stored.sql("UPDATE rft.experience SET reward = 0.9 WHERE experience_id = 2")
    assert build(stored, margin=0.6).label_cut == 1
    row = stored.sql("SELECT source::text, author, builder, label_cut, margin FROM rft.preference_pair").to_pylist()[0]
    assert row == {
        "source": "rewards",
        "author": "ada",
        "label_cut": 1,
        "margin": None,
        "builder": {
            "margin": 0.6,
            "max_pairs": 4,
            "ties": "length",
            "max_length_ratio": None,
            "include_dropped": False,
        },
    }


def test_corrections_change_what_is_built_and_which_pairs_stand(stored: Buffer) -> None:
    build(stored)
    stored.sql(
        "UPDATE rft.experience SET reward = CASE experience_id WHEN 1 THEN 1 ELSE 0 END WHERE experience_id IN (1, 2, 4)"
    )
    assert (build(stored).num_pairs, stored_pairs(stored)) == (2, [(2, 1), (1, 2), (3, 4)])
    assert stored_pairs(stored, "stands") == [(1, 2), (3, 4)]
    selected = select(stored.database, "select pair_id from rft.v_pair where stands")
    assert (selected.kind, len(selected.item_ids)) == ("pair", 2)


def test_a_dry_run_counts_and_stores_nothing(stored: Buffer) -> None:
    build(stored)
    counted = build(stored, dry_run=True, margin=0.2)
    assert (counted.num_pairs, counted.num_new, counted.stored) == (2, 1, False)
    assert stored_pairs(stored) == [(2, 1)]


def test_lengths_of_chosen_and_rejected_are_reported(buffer: Buffer) -> None:
    run = buffer.create_run(name="source", config={}, seed=1, steps=1, pipeline_version="none", mode="train")
    long = tokens(1.0, token_ids=[5, 6, 7, 8, 9, 9, 9], behavior_logprobs=[-1.0] * 4)
    group = Group(
        [Rollout(0, "ok", 1.0, [long]), Rollout(1, "ok", 0.0, [tokens(0.0)])],
        source="import",
        taskset="m",
        task_key="1",
        payload={},
    )
    with buffer.writer(run) as writer:
        writer.insert(group)
    built = build(buffer)
    assert (built.chosen_longer, built.rejected_longer, built.chosen_tokens, built.rejected_tokens) == (
        1.0,
        0.0,
        4.0,
        2.0,
    )
    assert build(buffer, max_length_ratio=1.5).num_pairs == 0


def test_more_groups_than_a_page_holds_are_all_looked_at(stored: Buffer) -> None:
    assert build(stored, page_groups=2, margin=0.25).num_groups == 3
    assert stored_pairs(stored) == [(2, 1), (6, 5)]


def test_two_that_build_at_once_store_no_pair_twice(stored: Buffer) -> None:
    late = {"source": "rewards", "author": "bob", "builder": Jsonb({}), "chosen_ids": [2], "rejected_ids": [1]}

    def build_beside_another() -> None:
        with at_label_cut(stored.database, read_only=False) as (connection, cut):
            build(stored)
            execute(connection, "insert_pairs", label_cut=cut, **late)

    with pytest.raises(ConflictError, match="run it again"):
        build_beside_another()
    assert stored_pairs(stored) == [(2, 1)]


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_pairs_that_stand_are_exported_with_their_texts(stored: Buffer, tmp_path: Path, ending: str) -> None:
    build(stored, margin=0.25)
    stored.sql("UPDATE rft.experience SET reward = 0 WHERE experience_id = 6")
    file = tmp_path / f"pairs{ending}"
    assert export_pairs(stored.find_run("source"), file).num_pairs == 1
    rows = (
        pq.read_table(file).to_pylist()
        if ending == ".parquet"
        else [json.loads(line) for line in file.read_text().splitlines()]
    )
    assert [(row["prompt"], row["chosen"], row["rejected"], row["margin"], row["chosen_id"]) for row in rows] == [
        ("1 + 1 =", "2", "2", 1.0, 2)
    ]
    assert list(tmp_path.glob(".*")) == []


def test_an_export_that_cannot_be_is_refused_and_leaves_no_file(stored: Buffer, tmp_path: Path) -> None:
    with pytest.raises(QueryError, match=r"pairs.txt.*\.jsonl or \.parquet"):
        export_pairs(stored.find_run("source"), tmp_path / "pairs.txt")
    with pytest.raises(QueryError, match="rft pairs build source"):
        export_pairs(stored.find_run("source"), tmp_path / "pairs.jsonl")
    assert [path for path in tmp_path.iterdir() if path.name.startswith("pairs")] == []


@pytest.fixture
def location(stored: Buffer, monkeypatch: pytest.MonkeyPatch) -> str:
    assert stored.config.segments is not None
    monkeypatch.setenv("RFT_SEGMENTS", stored.config.segments)
    return stored.config.uri


def test_the_command_builds_and_exports(
    stored: Buffer, location: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["pairs", "build", "source", "--margin", "0.25", "--buffer", location]) == 0
    assert "2 pairs in 2 of 3 groups of source, 2 of them new" in capsys.readouterr().out
    assert run_command(["pairs", "build", "--margin", "0.25", "--dry-run", "--json", "--buffer", location]) == 0
    assert json.loads(capsys.readouterr().out)["num_new"] == 0
    assert run_command(["pairs", "export", str(tmp_path / "x.jsonl"), "source", "--buffer", location]) == 0
    assert len((tmp_path / "x.jsonl").read_text().splitlines()) == 2


def test_the_command_refuses_settings_that_mean_nothing(location: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["pairs", "build", "--ties", "coin", "--buffer", location]) == 2
    assert "ties" in capsys.readouterr().err
    assert run_command(["pairs", "build", "missing", "--buffer", location]) == 2
