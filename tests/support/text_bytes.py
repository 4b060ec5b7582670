"""Bytes of the database per experience: a prompt stored once per group, against every text in the experience's row.

The writer fills a buffer with groups of one kind. The same rows then go into a table of the old shape (text_bytes.sql) in the same database. Bytes are
those of all tables of the buffer with their indexes and long texts, without those of an empty buffer; arrays in segment files do not count. A token is
4 bytes of text. Groups of `chats` have one turn, whose prompt and response are also the messages of a chat. Groups of `turns` are chats of four
turns: the prompt of a turn contains the turns before it, so only the first is shared.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.workload import WORDS
from rftdata import Buffer, Group, Rollout
from rftdata import Sequence as Experience

GROUP_SIZE = 16
_TURNS = 4
_BYTES_PER_TOKEN = 4
_GROUPS_AT_ONCE = 4


def queries() -> dict[str, str]:
    """The statements beside this file."""
    blocks = re.split(r"^-- name: ", Path(__file__).with_suffix(".sql").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {name: body for name, _, body in (block.partition("\n") for block in blocks[1:])}


def make_group(words: random.Random, kind: str, key: int, num_prompt: int, num_response: int) -> Group:
    """A group of `GROUP_SIZE` rollouts of one prompt.

    Args:
        num_prompt, num_response: tokens of the first prompt and of a rollout's responses together.
    """
    question = _text(words, num_prompt)
    rollouts = []
    for index in range(GROUP_SIZE):
        chat: list[dict[str, Any]] = [{"role": "user", "content": question}]
        sequences = []
        for _ in range(_TURNS if kind == "turns" else 1):
            response = _text(words, num_response // (_TURNS if kind == "turns" else 1))
            prompt = "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in chat)
            chat.append({"role": "assistant", "content": response})
            tokens = np.zeros((len(prompt) + len(response)) // _BYTES_PER_TOKEN, np.int32)
            sequences.append(
                Experience(
                    prompt,
                    response,
                    tokens,
                    len(prompt) // _BYTES_PER_TOKEN,
                    "stop",
                    reward=float(index % 2),
                    messages=list(chat),
                    metrics={"seconds": 1.25, "num_turns": 1},
                )
            )
            chat.append({"role": "user", "content": "go on"})
        rollouts.append(Rollout(index, "ok", float(index % 2), sequences))
    return Group(rollouts, source="import", taskset=kind, task_key=str(key))


def _text(words: random.Random, num_tokens: int) -> str:
    size = num_tokens * _BYTES_PER_TOKEN
    return " ".join(words.choices(WORDS, k=size // 3))[:size]


def measure(buffer: Buffer, kind: str, num_groups: int, num_prompt: int, num_response: int) -> dict[str, Any]:
    """Bytes per experience of one kind of group; the buffer is empty before and holds these groups afterwards."""
    words = random.Random(kind)
    statements = queries()
    with buffer.database.connection() as connection:
        empty = connection.execute(statements["sizes"]).fetchall()[0]
        buffer.create_run(name=kind, config={}, seed=0, steps=1, pipeline_version="none")
        with buffer.writer(kind) as writer:
            for start in range(0, num_groups, _GROUPS_AT_ONCE):
                keys = range(start, min(start + _GROUPS_AT_ONCE, num_groups))
                writer.insert(*(make_group(words, kind, key, num_prompt, num_response) for key in keys))
        connection.execute(statements["fill_table"])
        sizes = connection.execute(statements["sizes"]).fetchall()[0]
    num = num_groups * GROUP_SIZE * (_TURNS if kind == "turns" else 1)
    grown = {name: sizes[name] - empty[name] for name in sizes}
    before = grown["all_bytes"] - grown["text_bytes"] + grown["texts_in_rows_bytes"]
    return {
        "experiences": num,
        "bytes_per_experience_texts_in_rows": round(before / num),
        "bytes_per_experience": round(grown["all_bytes"] / num),
        "ratio": round(grown["all_bytes"] / before, 4),
    }
