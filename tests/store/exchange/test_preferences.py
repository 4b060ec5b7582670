"""Preferences of several people stand side by side; rankings and edits give pairs, with the share of people who agree."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rftcore.cli import run_command
from rftcore.pipeline.edited_responses import render_edits
from rftcore.pipeline.pairs import PreferredPairs, pairs_of_labels
from rftcore.workflows.chats import written_sequence
from rftdata import Buffer, Group, Rollout, labels
from rftdata.annotations import Annotation, LabelKind, annotate, define_kinds
from rftdata.attempts.stored_selection import select
from rftdata.errors import QueryError
from tests.store.conftest import Login
from tests.support.chat_tokenizers import chat_tokenizer

ASK = [{"role": "user", "content": "1 + 1?"}]


@pytest.fixture
def stored(buffer: Buffer) -> Buffer:
    """Experiences 1 to 3 answer one prompt, in the run `source`."""
    define_kinds(buffer, [LabelKind("order", "ranking", "group"), LabelKind("better", "edit")], author="owner")
    run = buffer.create_run(name="source", config={}, seed=1, steps=1, pipeline_version="none")
    sequences = [written_sequence(chat_tokenizer("qwen2_5"), ASK, answer) for answer in "345"]
    for sequence in sequences:
        sequence.reward = 0.0
    rollouts = [Rollout(index, "ok", 0.0, [sequence]) for index, sequence in enumerate(sequences)]
    with buffer.writer(run) as writer:
        writer.insert(Group(rollouts, source="import", taskset="mine", task_key="one"))
    return buffer


def rank(buffer: Buffer, author: str, *order: list[int], source: Any = "human") -> int:
    return annotate(
        buffer, [Annotation("order", 1, {"order": list(order)})], author=author, source=source
    ).label_batch_id


def build(buffer: Buffer, **options: Any) -> PreferredPairs:
    return pairs_of_labels(buffer.find_run("source"), author="ada", **options)


def pairs(buffer: Buffer, where: str = "stands") -> list[tuple[int, int, int, float]]:
    rows = buffer.sql(
        f"SELECT chosen_id, rejected_id, num_people, agreement FROM rft.v_pair WHERE {where} ORDER BY 1, 2"
    ).to_pylist()
    return [tuple(row.values()) for row in rows]


def test_a_second_person_may_prefer_what_the_first_one_does(stored: Buffer) -> None:
    insert = "INSERT INTO rft.preference_pair (chosen_id, rejected_id, author) VALUES (%s, %s, %s)"
    for chosen, rejected, author in [(1, 2, "ada"), (1, 2, "bob"), (2, 1, "eve")]:
        stored.sql(insert, [chosen, rejected, author])
    with pytest.raises(QueryError, match="preference_pair_human"):
        stored.sql(insert, [1, 2, "ada"])
    assert pairs(stored) == [(1, 2, 3, pytest.approx(2 / 3))] * 2 + [(2, 1, 3, pytest.approx(1 / 3))]


def test_rankings_with_ties_give_pairs_on_which_most_people_agree(stored: Buffer) -> None:
    rank(stored, "ada", [1], [2], [3])
    rank(stored, "bob", [1, 2], [3])
    rank(stored, "eve", [2], [1], [3])
    rank(stored, "judge", [3], [2], [1], source="judge")  # a suggestion
    found = build(stored)
    assert (found.num_pairs, found.num_new, found.num_undecided) == (2, 2, 1)
    assert pairs(stored) == [(1, 3, 3, 1.0), (2, 3, 3, 1.0)]
    assert build(stored).num_new == 0
    rank(stored, "eve", [1], [2], [3])
    assert build(stored, dry_run=True).num_new == 1
    assert build(stored, min_agreement=0.9).num_pairs == 2
    assert build(stored).num_new == 1 and pairs(stored)[0] == (1, 2, 3, pytest.approx(5 / 6))


def test_a_pair_no_longer_stands_when_people_change_their_minds(stored: Buffer) -> None:
    batch = rank(stored, "ada", [1], [2])
    build(stored)
    rank(stored, "bob", [2], [1])
    assert pairs(stored) == [] and pairs(stored, "true") == [(1, 2, 2, 0.5)]
    rank(stored, "judge", [1], [2], source="adjudication")
    assert pairs(stored) == [(1, 2, 1, 1.0)]
    labels.undo(stored, batch, author="ada")
    assert pairs(stored) == [(1, 2, 1, 1.0)]


def test_an_edit_is_preferred_to_what_was_edited_and_a_run_can_select_the_pair(stored: Buffer) -> None:
    batch = annotate(stored, [Annotation("better", 2, {"response": "2"})], author="ada").label_batch_id
    assert build(stored).num_pairs == 0  # it is not rendered yet
    render_edits(stored, stored.find_run("source"), chat_tokenizer("qwen2_5"))
    found = build(stored)
    assert (found.num_pairs, found.num_from_edits) == (1, 1)
    assert pairs(stored) == [(4, 2, 1, 1.0)]
    source = "select pair_id from rft.v_pair where run in ('source', 'source-edits') and stands"
    assert select(stored.database, source).kind == "pair"
    labels.undo(stored, batch, author="ada")
    assert pairs(stored) == []
    with pytest.raises(QueryError, match="the edit was superseded or undone"):
        select(stored.database, "select pair_id from rft.v_pair")


def test_the_command_prints_what_to_select(
    stored: Buffer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RFT_BUFFER", stored.config.uri)
    monkeypatch.setenv("RFT_SEGMENTS", str(stored.config.segments))
    rank(stored, "ada", [1], [2, 3])
    arguments = ["pairs", "labels", "source"]
    assert run_command([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_pairs"] == 2
    assert run_command(arguments) == 0
    out = capsys.readouterr().out
    assert "2 pairs from labels of source, 0 of them from edits, 0 of them new" in out and "rft.v_preferred_pair" in out
    assert run_command([*arguments, "--min-agreement", "0.3"]) == 2
    assert "allowed: 0.5 to 1" in capsys.readouterr().err


def test_two_answers_are_selected_once_and_never_both_ways(stored: Buffer) -> None:
    insert = "INSERT INTO rft.preference_pair (chosen_id, rejected_id, author) VALUES (%s, %s, %s)"
    for chosen, rejected, author in [(1, 2, "ada"), (1, 2, "bob"), (2, 1, "eve"), (3, 1, "ada"), (1, 3, "bob")]:
        stored.sql(insert, [chosen, rejected, author])
    rank(stored, "joe", [1], [2])
    build(stored)
    chosen = "SELECT pair_id, chosen_id, rejected_id, num_people, agreement FROM rft.v_preferred_pair ORDER BY 1"
    assert [tuple(row.values()) for row in stored.sql(chosen).to_pylist()] == [(1, 1, 2, 4, 0.75)]
    assert select(stored.database, "select pair_id from rft.v_preferred_pair").item_ids == (1,)
    # One person who prefers either answer is undecided, and has one vote.
    stored.sql(insert, [2, 1, "joe"])
    stored.sql(insert, [2, 1, "ann"])
    assert pairs(stored, "pair_id = 1") == [(1, 2, 5, pytest.approx(0.5))] and stored.sql(chosen).num_rows == 0


def test_comparing_two_answers_reads_their_groups_alone(stored: Buffer) -> None:
    rank(stored, "ada", [1], [2])
    build(stored)
    with stored.database.transaction() as connection:
        connection.execute("SELECT rft.agreement(1, 2), rft.num_people(1, 2)")
        passes = connection.execute(
            "SELECT relname, seq_tup_read FROM pg_stat_xact_user_tables WHERE schemaname = 'rft' AND seq_tup_read > 0"
        ).fetchall()
    assert passes == []


def test_rewards_decide_on_what_nobody_compared_and_people_on_the_rest(stored: Buffer) -> None:
    for reward, experience in [(1.0, 1), (0.5, 2)]:
        stored.sql("UPDATE rft.experience SET reward = %s WHERE experience_id = %s", [reward, experience])
    built = "INSERT INTO rft.preference_pair (chosen_id, rejected_id, source, author) VALUES (%s, %s, 'rewards', 'x')"
    for chosen, rejected in [(1, 2), (1, 3), (2, 3)]:
        stored.sql(built, [chosen, rejected])
    for chosen, rejected in [(3, 1), (2, 3)]:
        stored.sql(
            "INSERT INTO rft.preference_pair (chosen_id, rejected_id, author) VALUES (%s, %s, 'ada')",
            [chosen, rejected],
        )
    chosen = stored.sql("SELECT chosen_id, rejected_id, source::text FROM rft.v_preferred_pair ORDER BY 1").to_pylist()
    assert [tuple(row.values()) for row in chosen] == [(1, 2, "rewards"), (2, 3, "human"), (3, 1, "human")]


def test_an_account_is_one_person_whatever_authors_it_gives(stored: Buffer, login: Login) -> None:
    ada, bob = login("rft_labeler"), login("rft_other_labeler")
    for account, authors in [(ada, ("ada", "anna", "ann")), (bob, ("bob",))]:
        for author in authors:
            pair = [1, 2] if account is ada else [2, 1]
            account.execute(
                "INSERT INTO rft.preference_pair (chosen_id, rejected_id, author) VALUES (%s, %s, %s)",
                [*pair, author],
            )
            account.execute(
                "INSERT INTO rft.annotation (kind, target_id, value, author) VALUES ('order', 1, %s, %s)",
                [json.dumps({"order": [[i] for i in pair]}), author],
            )
    assert pairs(stored, "pair_id = 1") == [(1, 2, 2, 0.5)]
    # The owner writes for several people.
    for author in ("eve", "joe"):
        rank(stored, author, [1], [2])
    assert pairs(stored, "pair_id = 1") == [(1, 2, 4, 0.75)]
    rank(stored, ada.info.user, [1], [2])  # what ada wrote, imported by the owner
    assert pairs(stored, "pair_id = 1") == [(1, 2, 4, 0.75)]


def test_blind_rankings_and_edits_are_left_out_unless_asked_for(
    stored: Buffer, login: Login, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RFT_SEGMENTS", str(stored.config.segments))
    kinds = [LabelKind("hidden", "ranking", "group", blind=True), LabelKind("secret", "edit", blind=True)]
    define_kinds(stored, kinds, author="owner")
    for person in ("bob", "eve", "joe"):
        annotate(stored, [Annotation("hidden", 1, {"order": [[2], [1], [3]]})], author=person)
    annotate(stored, [Annotation("secret", 1, {"response": "2"})], author="bob")
    rank(stored, "ada", [1], [2])
    found = build(stored)
    # An open ranking gives a pair, whose direction does not tell what the blind ones say.
    assert (found.num_pairs, found.num_new, found.num_blind) == (1, 1, 3)
    ids = "SELECT chosen_id, rejected_id FROM rft.preference_pair ORDER BY 1, 2"
    assert [tuple(row.values()) for row in stored.sql(ids).to_pylist()] == [(1, 2)]
    source, tokenizer = stored.find_run("source"), chat_tokenizer("qwen2_5")
    result = render_edits(stored, source, tokenizer)
    assert (result.run, result.num_rendered, result.num_blind) == (None, 0, 1)
    reader = login("rft_reader")
    assert reader.execute("SELECT count(*) FROM rft.experience").fetchone() == (3,)
    assert run_command(["pairs", "labels", "source", "--dry-run", "--buffer", stored.config.uri]) == 0
    assert "3 pairs compared in blind kinds" in capsys.readouterr().out
    assert render_edits(stored, source, tokenizer, include_blind=True).num_rendered == 1
    found = build(stored, include_blind=True)
    assert (found.num_pairs, found.num_from_edits, found.num_blind) == (4, 1, 0)
