"""A buffer with a long history and labels of several people: runs with verdicts, draws, steps, checkpoints and evaluations, and one annotation for each
eight experiences."""

from __future__ import annotations

import dataclasses

from benchmarks.buffer.history_runs import add_run
from benchmarks.harness.report import say
from benchmarks.harness.statements import statements
from benchmarks.harness.workload import GROUP_SIZE, Sample, make_samples
from rftdata.annotations import LabelKind, define_kinds
from rftdata.buffer import Buffer

NUM_RUNS = 4
GROUPS_PER_TASK = 4
KINDS = (
    LabelKind("score", "number", spec={"min": 0, "max": 1}, blind=True, reopens=True),
    LabelKind("helpful", "bool"),
    LabelKind("critique", "text"),
    LabelKind("fix", "edit"),
    LabelKind("best", "ranking", target="group"),
)
_PEOPLE = {"score": (3, 40), "helpful": (2, 80), "critique": (1, 160), "fix": (1, 160)}  # and one experience in so many
_RANKED = 160


def fill(buffer: Buffer, num: int) -> None:
    """Store `num` experiences and their labels."""
    define_kinds(buffer, KINDS, author="owner")
    texts = statements(__file__)
    buffer.sql(texts["versions"])
    for number in range(NUM_RUNS):
        add_run(buffer, number, num // NUM_RUNS, samples=short_samples(num // NUM_RUNS, number))
        say(f"run {number} of {num} experiences is stored")
    for name in ("other_verdicts", "stage_runs", "steps", "task_vectors", "task_statistics"):
        buffer.sql(texts[name])
    batch = buffer.sql("SELECT rft.begin_label_batches(1) AS batch")["batch"][0].as_py()
    types = {kind.kind: kind.type for kind in KINDS}
    for kind, (people, every) in _PEOPLE.items():
        values = {"kind": kind, "type": types[kind], "people": people, "every": every, "batch": batch}
        buffer.sql(texts["annotations"], values)
    buffer.sql(texts["rankings"], {"every": _RANKED // 8, "batch": batch})
    buffer.sql(texts["analyze"])


def short_samples(num: int, seed: int) -> list[Sample]:
    """Return samples with few tokens, a task for each `GROUPS_PER_TASK` groups."""
    made = [shortened(each) for each in make_samples(min(num, 4096), seed=seed)]
    return [
        dataclasses.replace(made[i % len(made)], key=i, group=i // (GROUP_SIZE * GROUPS_PER_TASK)) for i in range(num)
    ]


def shortened(sample: Sample, num_tokens: int = 48) -> Sample:
    """Return a sample that ends soon."""
    first = sample.num_prompt_tokens - 16
    end = first + num_tokens
    return dataclasses.replace(
        sample,
        prompt=sample.prompt[:100],
        response=sample.response[:200],
        num_prompt_tokens=16,
        token_ids=sample.token_ids[first:end],
        logprobs=sample.logprobs[first:end],
        mask=sample.mask[first:end],
    )
