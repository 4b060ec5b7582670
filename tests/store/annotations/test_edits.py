"""Edited responses become children of the experiences that were edited: token for token, once, and only while the edit stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rftcore.algorithms import build_algorithm
from rftcore.checks.selections import refuse_untrainable
from rftcore.pipeline.edited_responses import RenderedEdits, render_edits
from rftcore.pipeline.edited_responses import rendered as sequence_of
from rftcore.workflows.chats import chat_sequence, written_sequence
from rftdata import Buffer, Group, Rollout, exchange, labels
from rftdata.annotations import Annotation, LabelKind, annotate, define_kinds
from rftdata.annotations.edits import edits_to_render
from rftdata.attempts import stored_selection
from rftdata.errors import ArchivedError, ConfigError, ConflictError, QueryError, RftError
from rftdata.experience import TURNS
from rftdata.maintenance.archive import archive
from rftdata.maintenance.purge import purge
from rftdata.postgres.locks import Lock, holding
from rftdata.run import Run
from tests.support.chat_tokenizers import chat_tokenizer

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
LONGER = [
    *CHAT,
    {"role": "assistant", "content": "the answer is 3"},
    {"role": "user", "content": "no"},
    {"role": "assistant", "content": "4 user"},
]
TEMPLATES = ["qwen2_5", "qwen3", "llama3_1", "gemma3", None]


@pytest.fixture
def run(buffer: Buffer) -> Run:
    define_kinds(buffer, [LabelKind("better", "edit")], author="owner")
    return buffer.create_run(name="chats", config={}, seed=1, steps=1, pipeline_version="none")


def write(buffer: Buffer, run: Run, *sequences: Any) -> None:
    rollouts = [Rollout(index, "ok", 0.0, [sequence]) for index, sequence in enumerate(sequences)]
    for sequence in sequences:
        sequence.reward = 0.0
    with buffer.writer(run) as writer:
        writer.insert(Group(rollouts, source="import", taskset="mine", task_key="one"))


def edit(buffer: Buffer, experience_id: int, response: str, author: str = "ada") -> int:
    return annotate(buffer, [Annotation("better", experience_id, {"response": response})], author=author).label_batch_id


def children(buffer: Buffer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = buffer.sql(
        "SELECT experience_id, parent_id, source::text AS source, response, prompt, run, messages FROM rft.v_experience"
        " WHERE parent_id IS NOT NULL ORDER BY 1"
    ).to_pylist()
    return found


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_child_has_the_tokens_that_the_template_gives_the_edited_answer(
    buffer: Buffer, run: Run, template: str | None
) -> None:
    tokenizer = chat_tokenizer(template)
    write(buffer, run, written_sequence(tokenizer, CHAT, "the answer is 3"))
    edit(buffer, 1, "2, of course")
    result = render_edits(buffer, run, tokenizer)
    assert result == RenderedEdits("chats-edits", 1)
    (child,) = children(buffer)
    expected = written_sequence(tokenizer, CHAT, "2, of course")
    assert (child["source"], child["parent_id"], child["response"]) == ("human", 1, "2, of course")
    assert child["prompt"] == expected.prompt and child["run"] == "chats-edits"
    ids = [child["experience_id"]]
    (tokens,), (logprobs,), (mask,) = (buffer.arrays(ids, n) for n in ("token_ids", "behavior_logprobs", "loss_mask"))
    assert tokens is not None and tokens.tolist() == list(expected.token_ids)
    assert logprobs is not None and np.isnan(logprobs[expected.num_prompt_tokens :]).all()
    assert mask is not None and mask.astype(bool).tolist() == [
        i >= expected.num_prompt_tokens for i in range(len(tokens))
    ]


def test_an_edit_of_the_last_of_several_turns_keeps_the_others(buffer: Buffer, run: Run) -> None:
    tokenizer = chat_tokenizer("qwen2_5")
    parent = chat_sequence(tokenizer, LONGER)
    write(buffer, run, parent)
    edit(buffer, 1, "2")
    render_edits(buffer, run, tokenizer)
    (child,) = children(buffer)
    expected = chat_sequence(tokenizer, [*LONGER[:-1], {"role": "assistant", "content": "2"}])
    (tokens,), (mask,), (turns,) = (
        buffer.arrays([child["experience_id"]], n) for n in ("token_ids", "loss_mask", TURNS)
    )
    assert tokens is not None and mask is not None and turns is not None
    assert tokens.tolist() == list(expected.token_ids) and child["response"] == expected.response
    assert mask[expected.num_prompt_tokens :].astype(bool).tolist() == list(expected.loss_mask or [])
    assert turns.tolist() == expected.arrays[TURNS].tolist()


@pytest.fixture
def edited(buffer: Buffer, run: Run) -> Run:
    """Experience 1, with an edit that is not rendered yet."""
    write(buffer, run, written_sequence(chat_tokenizer("qwen2_5"), CHAT, "3"))
    edit(buffer, 1, "2")
    return run


def rendered(buffer: Buffer, run: Run) -> int:
    return render_edits(buffer, run, chat_tokenizer("qwen2_5")).num_rendered


def selected(buffer: Buffer) -> list[int]:
    sql = "select experience_id from rft.experience where parent_id = 1"
    return list(stored_selection.select(buffer.database, sql).item_ids)


def test_an_edit_is_rendered_once_and_people_have_a_child_each(buffer: Buffer, edited: Run) -> None:
    assert rendered(buffer, edited) == 1 and rendered(buffer, edited) == 0
    edit(buffer, 1, "two", author="bob")
    assert rendered(buffer, edited) == 1
    assert [child["response"] for child in children(buffer)] == ["2", "two"]
    with holding(buffer.database, Lock("edits", edited.run_id)), pytest.raises(ConflictError, match="another process"):
        rendered(buffer, edited)


def test_a_child_is_left_out_while_its_edit_does_not_stand(buffer: Buffer, edited: Run) -> None:
    rendered(buffer, edited)
    assert selected(buffer) == [2]
    batch = edit(buffer, 1, "2.0")
    with pytest.raises(QueryError, match=r"dropped all 1 rows.*edit \(the edit was superseded or undone\)"):
        selected(buffer)
    rendered(buffer, edited)
    assert selected(buffer) == [3]
    labels.undo(buffer, batch, author="ada")  # the first edit stands again, and has its child already
    assert rendered(buffer, edited) == 0 and selected(buffer) == [2]
    assert [child["response"] for child in children(buffer)] == ["2", "2.0"]


def test_a_write_that_is_repeated_after_a_kill_or_a_lost_answer_stores_nothing(buffer: Buffer, edited: Run) -> None:
    (waiting,) = edits_to_render(edited)
    assert rendered(buffer, edited) == 1
    again = Group([Rollout(0, "ok", None, [sequence_of(buffer, chat_tokenizer("qwen2_5"), waiting)])], source="human")
    again.taskset, again.task_key = waiting.taskset, waiting.task_key
    with buffer.writer(buffer.find_run("chats-edits")) as writer:
        assert writer.insert(again, receipt=waiting.receipt) == []
        with pytest.raises(RftError, match="edited_response"):  # not even without the receipt
            writer.insert(again)
    assert len(children(buffer)) == 1


def test_an_edit_of_a_purged_experience_is_not_rendered_and_the_purge_names_its_child(
    buffer: Buffer, edited: Run
) -> None:
    rendered(buffer, edited)
    edit(buffer, 1, "two", author="bob")
    purged = purge(buffer, where="experience_id = 1", reason="test", author="ada")
    assert purged.made_experiences == (2,)
    assert rendered(buffer, edited) == 0


def test_an_edit_by_a_judge_is_only_a_suggestion(buffer: Buffer, run: Run) -> None:
    write(buffer, run, written_sequence(chat_tokenizer("qwen2_5"), CHAT, "3"))
    annotate(buffer, [Annotation("better", 1, {"response": "2"}, model="m")], author="judge", source="judge")
    assert render_edits(buffer, run, chat_tokenizer("qwen2_5")) == RenderedEdits()


def test_the_run_of_renderings_takes_nothing_else_and_samples_nothing(buffer: Buffer, edited: Run) -> None:
    with pytest.raises(QueryError, match="experiences of its own"):
        render_edits(buffer, edited, chat_tokenizer("qwen2_5"), into="chats")


def test_ratios_refuse_a_child_and_sft_does_not(buffer: Buffer, edited: Run) -> None:
    rendered(buffer, edited)
    buffer.sql("UPDATE rft.experience SET reward = 1 WHERE experience_id = 2")
    chosen = stored_selection.select(
        buffer.database, "select experience_id from rft.v_experience where run = 'chats-edits'"
    )
    refuse_untrainable(build_algorithm("sft"), buffer, chosen)
    with pytest.raises(ConfigError, match=r"no log-probabilities of the policy.*train on it with sft"):
        refuse_untrainable(build_algorithm("ppo"), buffer, chosen)


def test_edits_of_an_archived_run_wait_for_its_arrays(buffer: Buffer, edited: Run) -> None:
    buffer.sql("UPDATE rft.run SET status = 'finished'")
    archive(buffer, "chats", author="ada")
    with pytest.raises(ArchivedError, match="edits are rendered behind its arrays"):
        rendered(buffer, buffer.find_run("chats"))


@pytest.mark.parametrize("files", [("chats", "chats-edits"), ("chats-edits", "chats"), (None,)])
def test_a_moved_child_stays_linked_with_its_edit(
    buffer: Buffer, other: Buffer, edited: Run, tmp_path: Path, files: tuple[str | None, ...]
) -> None:
    undone = edit(buffer, 1, "two", author="bob")
    assert rendered(buffer, edited) == 2
    labels.undo(buffer, undone, author="bob")
    restored = edit(buffer, 1, "ii", author="ada")
    labels.undo(buffer, restored, author="ada")  # the first edit stands again
    for name in files:
        exchange.export(buffer, tmp_path / f"{name}.parquet", runs=[name] if name else [])
        exchange.load(other, tmp_path / f"{name}.parquet")
    out = other.sql(
        "SELECT e.response FROM rft.v_left_out l JOIN rft.experience e USING (experience_id) WHERE l.stage = 'edit'"
    ).to_pylist()
    assert [row["response"] for row in out] == ["two"]
    (found,) = other.sql(
        "SELECT v.response, e.response AS child FROM rft.v_edit v JOIN rft.experience e USING (experience_id)"
    ).to_pylist()
    assert found == {"response": "2", "child": "2"}
    run = other.find_run("chats")
    assert rendered(other, run) == 0
    # An undo there takes the child out there.
    batch = other.sql("SELECT label_batch_id FROM rft.annotation ORDER BY 1").to_pylist()[-1]["label_batch_id"]
    labels.undo(other, batch, author="owner")
    assert other.sql("SELECT count(*) AS n FROM rft.v_left_out WHERE stage = 'edit'").to_pylist() == [{"n": 2}]
