"""`rft show`, as a person calls it: chats, tokens, rewards and what became of them, of live, purged and archived rows."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

import rftdata
from rftcore.cli import run_command
from rftdata.experience import AbandonedTry, Group, Rollout
from rftdata.maintenance.archive import archive
from rftdata.writing.chats import chat_of
from tests.support.store_roles import tokens

Shown = tuple[int, str, str]
CHAT = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1, "b": 1}}}]},
    {"role": "tool", "name": "add", "content": "2 \x1b[2J\u202e"},
    {"role": "assistant", "content": "It is 2."},
]


@pytest.fixture
def experience(buffer: rftdata.Buffer, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """A rollout of two turns with a tool, and one that failed before its first answer."""
    monkeypatch.setenv("RFT_BUFFER", buffer.config.uri)
    monkeypatch.setenv("COLUMNS", "100")
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    first, call, observed, last = (tokenizer.encode(text).ids for text in ("1+1?", "add", "2", "two"))
    ids = [*first, *call, *observed, *last]
    start, end = len(first), len(first) + len(call)
    again = end + len(observed)
    mask = [True] * len(call) + [False] * len(observed) + [True] * len(last)
    sequence = tokens(
        1.0,
        prompt="1+1?",
        response="add 2 two",
        token_ids=ids,
        num_prompt_tokens=len(first),
        behavior_logprobs=[-0.25 if each else math.nan for each in mask],
        loss_mask=mask,
        messages=CHAT,
        reward_parts={"accuracy": 1.0},
        arrays={
            "turns": np.array([[start, end, 0], [again, len(ids), 1]], np.int32),
            "step_reward": np.array([0.5, 0.0], np.float32),
        },
    )
    config = {"model": {"path": str(tiny_model)}, "buffer": {"segments": buffer.config.segments}}
    run = buffer.create_run(name="shown", config=config, seed=1, steps=1, pipeline_version="none")
    tried = AbandonedTry("ConnectionError: gone", [chat_of(sequence)])
    rollouts = [
        Rollout(0, "ok", 1.0, [sequence], tries=[tried]),
        Rollout(1, "failed", None, [], error="ValueError: no \x07 luck"),
    ]
    with buffer.writer(run) as writer:
        writer.insert(Group(rollouts, source="human", taskset="sums", task_key="a", payload={"answer": "2"}))
    return int(buffer.sql("SELECT experience_id FROM rft.experience")["experience_id"][0].as_py())


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> Shown:
    code = run_command(["show", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_rollout_is_shown_with_its_turns_and_its_mask_and_obeys_no_control_character(
    experience: int, buffer: rftdata.Buffer, capsys: pytest.CaptureFixture[str]
) -> None:
    run_command(["label", "set", str(experience), "0", "--author", "ada", "--reason", "wrong"])
    capsys.readouterr()
    code, out, err = shown(capsys, experience)
    assert (code, err) == (0, "")
    assert "\x1b" not in out and "\u202e" not in out and "2 \\x1b[2J\\u202e" in out
    lines = out.splitlines()
    assert "┃ assistant · turn 0 · step reward 0.5" in lines and '┃   → add({"a": 1, "b": 1})' in lines
    assert "┃ assistant · turn 1 · step reward 0" in lines and "┃   It is 2." in lines
    assert "  tool add" in lines and "  user" in lines
    assert any(line.startswith("  reward 0 (sampled 1)") for line in lines)
    assert any("by ada" in line and "1 → 0: wrong" in line for line in lines)
    stretches = [line for line in lines if line[6:7] in "┃ " and line[:5].strip().isdigit()]
    assert [line[6] for line in stretches] == [" ", "┃", " ", "┃"]  # prompt, call, observation, answer
    code, out, _ = shown(capsys, experience, "--tokens")
    assert code == 0 and out.count("-0.250") == sum(line.count("-0.250") for line in out.splitlines() if "┃" in line)
    code, out, _ = shown(capsys, experience, "--json")
    [row] = json.loads(out)["experiences"]
    assert row["behavior_logprobs"].count(None) > 0 and row["labels"][0]["reason"] == "wrong"


def test_a_rollout_without_an_answer_a_group_and_wrong_ids(
    experience: int, buffer: rftdata.Buffer, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = buffer.sql("SELECT rollout_id, group_id FROM rft.rollout WHERE outcome = 'failed'").to_pylist()
    _, out, _ = shown(capsys, "--rollout", rows[0]["rollout_id"])
    assert "error: ValueError: no \\x07 luck" in out and "ended before its first answer" in out
    _, out, _ = shown(capsys, "--group", rows[0]["group_id"])
    assert "1 of 2 rollouts ok" in out and f"experiences {experience}" in out
    for arguments, what in (
        ([999], "unknown experience (got 999)"),
        (["--rollout", 999], "unknown rollout (got 999)"),
        (["--group", 999], "unknown group (got 999)"),
        ([1, "--group", 1], "one thing at a time"),
    ):
        code, out, err = shown(capsys, *arguments)
        assert (code, out) == (2, "") and what in err, err


def test_what_a_try_had_sampled_is_shown_apart_and_read_in_sql(
    experience: int, buffer: rftdata.Buffer, capsys: pytest.CaptureFixture[str]
) -> None:
    [row] = buffer.sql(
        "SELECT rollout_id, try, error, num_turns, num_tokens, messages -> -1 ->> 'content' AS last FROM rft.v_rollout_try"
    ).to_pylist()
    assert (row["try"], row["error"], row["num_turns"], row["last"]) == (1, "ConnectionError: gone", 2, "It is 2.")
    _, out, _ = shown(capsys, "--rollout", row["rollout_id"])
    assert f"an earlier try was given up after 2 turns of {row['num_tokens']} tokens: ConnectionError: gone" in out
    told, tried = out.split("try 1, given up and never trained on")
    assert "It is 2." in told and "It is 2." in tried and "┃" not in tried
    _, out, _ = shown(capsys, "--rollout", row["rollout_id"], "--json")
    assert json.loads(out)["tries"][0]["chats"][0]["turns"][0]["step_reward"] == 0.5


def test_archived_and_purged_rows_are_shown_with_what_is_left(
    experience: int, buffer: rftdata.Buffer, capsys: pytest.CaptureFixture[str]
) -> None:
    _, before, _ = shown(capsys, experience)
    buffer.sql("UPDATE rft.run SET status = 'finished', outcome = 'done', finished_at = now()")
    archive(buffer, "shown", author="ada")
    assert shown(capsys, experience) == (0, before, "")


def test_a_purged_row_is_shown_without_text(
    experience: int, buffer: rftdata.Buffer, capsys: pytest.CaptureFixture[str]
) -> None:
    run_command(["purge", "--where", f"experience_id = {experience}", "--reason", "asked"])
    capsys.readouterr()
    code, out, _ = shown(capsys, experience)
    assert code == 0 and "It is 2." not in out and "[purged]" in out
    assert any("were purged by" in line and line.endswith(": asked") for line in out.splitlines())
