"""A small run whose texts and arrays the studio shows: sums with tools and thinking, questions that wait, and texts that attack the page."""

from __future__ import annotations

import json
from collections.abc import Sequence as Many
from typing import Any

import numpy as np

from rftdata import Buffer, Group, Rollout, Run, Sequence
from rftdata.annotations import LabelKind

# Texts of models, tools and tasks are hostile by assumption.
HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\">",
    '<div hx-get="/sign-out" hx-trigger="load">x</div>',
    "</textarea></script><script>document.title='owned'</script>",
    "javascript:document.title='owned'",
    "\u202egnp.exe and \x1b[31mred\x07 \u2066x\u2069",
    "{{ 7*7 }} ${7*7} {% raw %}",
    '" onmouseover="document.title=\'owned\'" x="',
)


def sequence(
    prompt: str, response: str, reward: float | None, messages: list[dict[str, Any]] | None = None
) -> Sequence:
    """Return a sampled sequence with a log-probability for each of its tokens, which are characters."""
    ids = [ord(character) % 200 for character in prompt + response]
    logprobs = -np.abs(np.sin(np.arange(len(response)) * 1.7)).astype(np.float32) * 4
    return Sequence(
        prompt,
        response,
        np.array(ids, dtype=np.int32),
        len(prompt),
        "stop",
        reward=reward,
        behavior_logprobs=logprobs,
        messages=messages,
        reward_parts={"exact": float(reward or 0.0), "format": 1.0},
        metrics={"length": float(len(response))},
    )


def group(key: str, prompt: str, answers: Many[tuple[str, float]], **payload: Any) -> Group:
    """Return a group that answers one prompt."""
    rollouts = []
    for index, (text, reward) in enumerate(answers):
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
        rollouts.append(Rollout(index, "ok", reward, [sequence(prompt, text, reward, messages)]))
    return Group(rollouts, source="human", taskset="sums", task_key=key, payload={"prompt": prompt, **payload})


def with_tools() -> Group:
    """Return a group whose model thinks and calls a tool."""
    messages = [
        {"role": "system", "content": "You can use a calculator."},
        {"role": "user", "content": "What is 12 × 34?"},
        {
            "role": "assistant",
            "content": "<think>I should multiply: 12 × 34.</think>I will calculate it.",
            "tool_calls": [{"function": {"name": "calculate", "arguments": json.dumps({"expression": "12*34"})}}],
        },
        {"role": "tool", "name": "calculate", "content": "408"},
        {"role": "assistant", "content": "The result is **408**."},
    ]
    texts = sequence("What is 12 × 34?", "I will calculate it. The result is 408.", 1.0, messages)
    return Group(
        [Rollout(0, "ok", 1.0, [texts])], source="human", taskset="sums", task_key="product", payload={"answer": "408"}
    )


def hostile() -> Group:
    """Return a group whose texts attack the page."""
    messages = [
        {"role": "user", "content": HOSTILE[0]},
        {"role": HOSTILE[1], "content": HOSTILE[3]},
        {
            "role": "assistant",
            "content": "\n".join(HOSTILE),
            "tool_calls": [{"name": HOSTILE[0], "arguments": HOSTILE[2]}],
        },
        {"role": "tool", "name": HOSTILE[4], "content": HOSTILE[1]},
        {"role": "assistant", "content": "<think>" + HOSTILE[0] + "</think>" + HOSTILE[2]},
    ]
    attacks = sequence(HOSTILE[4].replace("\x1b", "").replace("\x07", ""), "\n".join(HOSTILE), 0.0, messages)
    other = sequence("x", HOSTILE[2], 1.0, messages)
    return Group(
        [Rollout(0, "ok", 0.0, [attacks]), Rollout(1, "ok", 1.0, [other])],
        source="human",
        taskset="<b>set</b>",
        task_key="<i>\u202ekey</i>",
        payload={"answer": HOSTILE[0]},
    )


def store(buffer: Buffer, name: str = "sums", *, num_sums: int = 6, with_attacks: bool = False) -> Run:
    """Store a run with groups that wait for a verdict."""
    run = buffer.create_run(name=name, config={"model": {"path": "tiny"}}, seed=1, steps=4, pipeline_version="v1")
    groups = [
        group(
            str(n),
            f"What is {n} + {n + 3}?",
            [
                (f"The sum of {n} and {n + 3} is {2 * n + 3}.", 1.0),
                (f"I think it is {2 * n + 2}.", 0.0),
                (f"It is {2 * n + 3}!", 0.5),
            ],
            answer=str(2 * n + 3),
        )
        for n in range(num_sums)
    ]
    groups.append(with_tools())
    if with_attacks:
        groups.append(hostile())
    with buffer.writer(run) as writer:
        writer.insert(*groups)
    return run


def ask(
    buffer: Buffer, run: Run, question: str = "Is the answer right?", name: str = "human_review", where: str = "true"
) -> None:
    """Ask a person about experiences, each with a deadline of its own."""
    buffer.sql(
        "INSERT INTO rft.review (experience_id, group_id, run_id, name, question, otherwise, deadline)"
        " SELECT experience_id, group_id, run_id, %s, %s, 'pass', rft.clock() + experience_id * interval '1 s' + interval '1 d'"
        f" FROM rft.experience WHERE run_id = %s AND {where}",
        [name, question, run.run_id],
    )


KINDS = (
    LabelKind("helpful", "bool", instruction="Would this answer help a pupil?"),
    LabelKind("tone", "choice", spec={"choices": ["friendly", "neutral", "rude"]}),
    LabelKind("quality", "number", spec={"min": 0, "max": 5, "step": 1}),
    LabelKind("faults", "tags", spec={"tags": ["wrong sum", "too long"], "open": True}),
    LabelKind(
        "rubric", "rubric", spec={"criteria": {"correctness": {"min": 0, "max": 3}, "clarity": {"min": 0, "max": 3}}}
    ),
    LabelKind("critique", "text"),
    LabelKind("better", "edit", instruction="Write the answer as you would have given it."),
    LabelKind("best", "ranking", "group", instruction="Which answer is the best one?"),
    LabelKind("steps", "turns", "rollout", spec={"min": -1, "max": 1, "step": 1}),
    LabelKind("errors", "spans", spec={"labels": ["wrong", "unclear"]}),
    LabelKind("solvable", "bool", "task"),
    LabelKind("asked", "bool", instruction="People are asked about some experiences."),
)
