"""Bytes and trainer tokens of rollouts of many turns: a row for each branch of the chat, beside a row for each turn, as it was before.

An engine of this benchmark samples random words for chats that only grow, through the model that workflows use. The same turns are then written
twice into one buffer, as `Model.sequences` returns them and with each turn as a row of its own. `database_bytes`: all tables with their
indexes and long texts. `stored_tokens`: tokens in the segments. `trainer_tokens`: tokens that one pass of the trainer computes, where prompts that
several rows share are computed once. The ratio is that of the rows per turn to the rows per branch. All numbers are counted; no time is measured.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import rftdata
from benchmarks.harness.arguments import argument_parser, integer, integers, scratch_folder
from benchmarks.harness.report import say, write
from benchmarks.harness.workload import WORDS
from rftcore.algorithms import build_algorithm
from rftcore.engines.base import Decoding, Generation
from rftcore.trainer.batches.drawn import ARRAYS, train_batch
from rftcore.trainer.batches.micro_batches import Cutting, split_batch
from rftcore.workflows.task import Model
from rftdata import Buffer, Group, Rollout
from rftdata import Sequence as Experience
from tests.support.models import make_character_tokenizer

GROUP_SIZE = 8
_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<eos>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
_LAYOUTS = ("row per turn", "row per branch")


@dataclass
class RandomWords:
    """An engine that answers with random words, then its end token."""

    tokenizer: Any
    words: random.Random
    num_tokens: int

    async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        text = self.text(self.num_tokens - 1)
        token_ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        return Generation(token_ids, [-self.words.random() for _ in token_ids], text, "stop", [(0, 1)])

    def text(self, num_tokens: int) -> str:
        """Return words of so many tokens; a space is a token."""
        return " ".join(self.words.choices(WORDS, k=(num_tokens + 1) // 2))


async def rollout(engine: RandomWords, question: str, num_turns: int) -> Model:
    """Let the engine answer a question, and then what an environment observes."""
    model = Model(engine, Decoding())
    chat = [{"role": "user", "content": question}]
    for _ in range(num_turns):
        turn = await model.chat(chat)
        chat = [
            *chat,
            {"role": "assistant", "content": turn.response},
            {"role": "user", "content": engine.text(engine.num_tokens)},
        ]
    return model


def groups(num_groups: int, num_turns: int, num_tokens: int) -> dict[str, list[Group]]:
    """Make groups of rollouts in both layouts."""
    tokenizer = make_character_tokenizer(tuple(WORDS))
    tokenizer.chat_template = _TEMPLATE
    engine = RandomWords(tokenizer, random.Random(num_turns), num_tokens)
    made: dict[str, list[Group]] = {layout: [] for layout in _LAYOUTS}
    for key in range(num_groups):
        question = engine.text(4 * num_tokens)
        models = [asyncio.run(rollout(engine, question, num_turns)) for _ in range(GROUP_SIZE)]
        for layout in _LAYOUTS:
            rollouts = [_rollout(index, model, layout) for index, model in enumerate(models)]
            made[layout].append(Group(rollouts, source="import", taskset=layout, task_key=str(key)))
    return made


def _rollout(index: int, model: Model, layout: str) -> Rollout:
    reward = float(index % 2)
    sequences: list[Experience] = (
        model.sequences() if layout == "row per branch" else [turn.sequence for turn in model.turns]
    )
    return Rollout(index, "ok", reward, [replace(sequence, reward=reward) for sequence in sequences])


def figures(buffer: Buffer, name: str, made: list[Group]) -> dict[str, Any]:
    """Write groups as a run of their own, and draw them as one batch."""
    run = buffer.create_run(name=name, config={}, seed=1, steps=1, pipeline_version="none")
    before = _sizes(buffer)
    with buffer.writer(run) as writer:
        for group in made:
            writer.insert(group)
    after = _sizes(buffer)
    sequences = [s for group in made for rollout in group.rollouts for s in rollout.sequences]
    with buffer.attempt(run) as attempt:
        drawn = attempt.draw(1, len(made), ARRAYS)
        assert drawn is not None
        batch = train_batch(drawn, build_algorithm("grpo"))
    (micro_batches,) = split_batch(batch, Cutting(max_tokens=2**16))
    return {
        "rows": len(sequences),
        "database_bytes": after["database"] - before["database"],
        "segment_bytes": after["segments"] - before["segments"],
        "stored_tokens": sum(len(s.token_ids) for s in sequences),
        "trainer_tokens": sum(micro_batch.num_tokens for micro_batch in micro_batches),
        "trained_tokens": batch.num_loss_tokens,
    }


def publish_policy(buffer: Buffer) -> None:
    """Publish the policy version that the rollouts name, the first one of a buffer."""
    run = buffer.create_run(name="policy", config={}, seed=1, steps=1, pipeline_version="none")
    with buffer.attempt(run) as attempt:
        version = attempt.publish(0, method="memory", uri="/weights/0", num_bytes=1, checksum="0")
    assert version == 1


def _sizes(buffer: Buffer) -> dict[str, int]:
    (row,) = buffer.sql(
        "SELECT (SELECT sum(pg_total_relation_size(oid)) FROM pg_class WHERE relnamespace = 'rft'::regnamespace AND relkind = 'r')::bigint AS database,"
        " coalesce((SELECT sum(length_bytes) FROM rft.segment), 0)::bigint AS segments"
    ).to_pylist()
    return dict(row)


def measure(folder: Path, turns: Sequence[int], num_groups: int, num_tokens: int) -> dict[str, Any]:
    """Measure each number of turns in both layouts."""
    result: dict[str, Any] = {}
    with rftdata.open(f"{folder}/buffer") as buffer:
        publish_policy(buffer)
        # The first rows of a table and of its indexes take whole pages.
        for layout, first in groups(num_groups, 1, num_tokens).items():
            figures(buffer, f"first pages, {layout}", first)
        for num_turns in turns:
            made = groups(num_groups, num_turns, num_tokens)
            found = {layout: figures(buffer, f"{num_turns} turns, {layout}", made[layout]) for layout in _LAYOUTS}
            per_turn, per_branch = (found[layout] for layout in _LAYOUTS)
            assert per_turn["trained_tokens"] == per_branch["trained_tokens"]
            ratio = {name: round(per_turn[name] / per_branch[name], 2) for name in per_turn}
            result[f"{num_turns} turns"] = found | {"ratio": ratio}
            say(f"{num_turns} turns: {ratio}")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser("turns", __doc__)
    parser.add_argument("--turns", type=integers(), default=(1, 8, 32), help="turns of a rollout, separated by commas")
    parser.add_argument("--groups", type=integer(), default=16, help=f"groups of {GROUP_SIZE} rollouts")
    parser.add_argument("--tokens", type=integer(4), default=64, help="tokens of an answer and of an observation")
    options = parser.parse_args(arguments)
    with scratch_folder(options) as folder:
        write(options, measure(folder, options.turns, options.groups, options.tokens))
    return 0
