"""A real model: a Llama of 0.75 million parameters that sorts digits, one token per character, as in examples/sort_from_scratch.

Levels are lengths, from 3 digits to 12. The warm-up imitates demonstrations, mostly of short lists; the longer the lists, the more of them have one
wrong digit. So the shortest lists are nearly solved at the start, and the longest hopeless. GRPO follows with real rollouts: the project's learner,
algorithm and packing, and a sampler of this module, which generates with the learner's model.

The held-out score needs no sampling: only one text is the right answer, and one forward pass gives its probability. The score is the probability
that a sampled answer is right, averaged over tasks whose digits do not occur in training.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache

from benchmarks.selection import training
from benchmarks.selection.training import Group
from rftcore.algorithms import build_algorithm
from rftcore.algorithms.algorithm import Algorithm
from rftcore.config.trainer import OptimizerConfig, TrainerConfig
from rftcore.trainer.batches.padding import PackedColumns, pad_batch
from rftcore.trainer.batches.train_batch import TrainBatch
from rftcore.trainer.learner import Learner
from rftcore.trainer.learner_arguments import LearnerArguments

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sort_from_scratch"
LENGTHS = (3, 4, 5, 6, 8, 12)
MAX_TOKENS = 14
ANCHOR_ROLLOUTS = 8
_SAMPLED_AT_ONCE = 512


@dataclass(frozen=True)
class Course:
    """Sizes of the experiment.

    Attributes:
        tasks_per_level, held_out_per_level: numbers of tasks; each has another multiset of digits.
        warm_up_steps: steps of 64 demonstrations each; the weak anchor is the model after half of them.
        warm_up_shares: share of each length in the warm-up.
        noise: share of the demonstrations of each length with a wrong digit.
        strong_steps: further steps from the start to the strong anchor, without noise and with all lengths alike.
        learning_rate: learning rate of GRPO.
    """

    tasks_per_level: int = 96
    held_out_per_level: int = 96
    warm_up_steps: int = 250
    warm_up_shares: tuple[float, ...] = (0.45, 0.3, 0.15, 0.08, 0.02, 0.0)
    noise: tuple[float, ...] = (0.0, 0.1, 0.3, 0.5, 0.5, 0.0)
    strong_steps: int = 60
    learning_rate: float = 2.0e-4


QUICK = Course(tasks_per_level=8, held_out_per_level=8, warm_up_steps=4, strong_steps=2)
"""Sizes that take seconds, for tests of benchmarks."""


@dataclass(frozen=True)
class Task:
    question: str
    answer: str
    level: int


def example(module: str) -> Any:
    """Load a file of the example, since examples are not a package."""
    spec = importlib.util.spec_from_file_location(f"sort_from_scratch_{module}", EXAMPLE / f"{module}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def make_tasks(course: Course, seed: int) -> tuple[list[Task], list[Task]]:
    """Make training and held-out tasks in random order; no multiset of digits occurs twice."""
    train: list[Task] = []
    held_out: list[Task] = []
    for level, length in enumerate(LENGTHS):
        found: dict[str, Task] = {}
        wanted = course.tasks_per_level + course.held_out_per_level
        for row in example("tasks").numbers(
            100 * wanted, seed=1000 * seed + length, min_digits=length, max_digits=length
        ):
            found.setdefault(row["split_key"], Task(row["question"], row["answer"], level))
            if len(found) == wanted:
                break
        tasks = list(found.values())
        train += tasks[: course.tasks_per_level]
        held_out += tasks[course.tasks_per_level :]
    np.random.default_rng((seed, 4)).shuffle(train)
    return train, held_out


class Tokens:
    """Token ids of texts, by the vocabulary of the example's tokenizer, which has sixteen tokens."""

    def __init__(self, folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.pad, self.bos, self.eos = tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id
        self._ids = tokenizer.get_vocab()

    def prompt(self, question: str) -> list[int]:
        return [self.bos, *(self._ids[character] for character in question)]

    def response(self, answer: str) -> list[int]:
        return [*(self._ids[character] for character in answer), self.eos]


@torch.no_grad()
def sample(model: Any, prompts: Sequence[list[int]], tokens: Tokens) -> tuple[list[list[int]], list[list[float]]]:
    """Sample a response to each prompt at temperature 1; return responses and the log-probabilities of their tokens.

    Prompts are padded on the left. All responses grow together; a response that has ended leaves the batch.
    """
    width = max(map(len, prompts))
    current = torch.tensor([[tokens.pad] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    rows, cache = torch.arange(len(prompts)), DynamicCache()
    responses: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    for _ in range(MAX_TOKENS):
        output = model(
            input_ids=current, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        scores = output.logits[:, -1].float().log_softmax(-1)
        token = torch.multinomial(scores.exp(), 1)
        values = scores.gather(1, token)[:, 0].tolist()
        for row, drawn, value in zip(rows.tolist(), token[:, 0].tolist(), values, strict=True):
            responses[row].append(drawn)
            logprobs[row].append(value)
        going_on = (token[:, 0] != tokens.eos).nonzero()[:, 0]
        if not len(going_on):
            break
        current, positions, rows = token[going_on], positions[going_on, -1:] + 1, rows[going_on]
        if len(going_on) < len(token):
            cache.batch_select_indices(going_on)
        mask = torch.cat([mask[going_on], torch.ones_like(current)], 1)
    return responses, logprobs


@torch.no_grad()
def chances(model: Any, tasks: Sequence[Task], tokens: Tokens) -> Tensor:
    """Return the probability of each task's right answer, [tasks]."""
    prompts = [tokens.prompt(task.question) for task in tasks]
    whole = [prompt + tokens.response(task.answer) for prompt, task in zip(prompts, tasks, strict=True)]
    width = max(map(len, whole))
    ids_BT = torch.tensor([row + [tokens.pad] * (width - len(row)) for row in whole])
    place = torch.arange(1, width)[None, :]
    starts, ends = (torch.tensor([len(row) for row in rows])[:, None] for rows in (prompts, whole))
    # Padding is on the right and attention is causal, so padding has no effect.
    logprobs = model(input_ids=ids_BT, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    answered = logprobs.gather(2, ids_BT[:, 1:, None])[:, :, 0]
    found: Tensor = (answered * ((place >= starts) & (place < ends))).sum(1).exp()
    return found


def train_batch(
    rows: Sequence[tuple[list[int], list[int], list[float] | None]], rewards: Any, groups: Any
) -> TrainBatch:
    """Return prompts, responses and their log-probabilities as a batch of the trainer."""
    lengths = [len(prompt) + len(response) for prompt, response, _ in rows]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    masks = [[False] * len(prompt) + [True] * len(response) for prompt, response, _ in rows]
    behavior = [[0.0] * len(prompt) + (logprobs or [np.nan] * len(response)) for prompt, response, logprobs in rows]
    return pad_batch(
        PackedColumns(
            token_ids=(np.concatenate([prompt + response for prompt, response, _ in rows]), offsets),
            loss_mask=(np.concatenate(masks), offsets),
            behavior_logprobs=(np.concatenate(behavior).astype(np.float32), offsets),
            rewards=rewards,
            group_ids=groups,
            rollout_index=np.arange(len(rows)),
        )
    )


class SortingLearner(training.Learner):
    """GRPO from the start that `prepare` wrote to a folder."""

    def __init__(self, folder: Path, course: Course, seed: int) -> None:
        prepared = json.loads((folder / "prepared.json").read_text(encoding="utf-8"))
        self._tasks, self._held_out = make_tasks(course, seed)
        self._tokens = Tokens(folder / "start")
        self._learner = open_learner(
            folder / "start", build_algorithm("grpo"), course.learning_rate, seed, warmup_steps=10
        )
        self._step = 0
        self.task_ids = list(range(1, len(self._tasks) + 1))
        self.levels = [task.level for task in self._tasks]
        self.features = prepared["features"]
        self.anchor_rollouts = prepared["anchor_rollouts"]

    def sample(self, task_ids: Sequence[int], sizes: Sequence[int]) -> list[Group]:
        tasks = [self._tasks[task_id - 1] for task_id in task_ids]
        rows = [task for task, size in zip(tasks, sizes, strict=True) for _ in range(size)]
        with self._learner.policy.unpacked() as model:
            rollouts = list(rollouts_of(model, rows, self._tokens))
        self.num_sampled += len(rollouts)
        groups, start = [], 0
        for task_id, task, size in zip(task_ids, tasks, sizes, strict=True):
            own = rollouts[start : start + size]
            right = self._tokens.response(task.answer)
            rewards = np.array([float(response == right) for _, response, _ in own])
            groups.append(Group(task_id, rewards, own))
            start += size
        return groups

    def update(self, groups: Sequence[Group]) -> None:
        self._step += 1
        rows = [rollout for group in groups for rollout in group.rollouts]
        rewards = np.concatenate([group.rewards for group in groups])
        numbers = np.repeat(np.arange(len(groups)), [len(group.rewards) for group in groups])
        self._learner.update(train_batch(rows, rewards, numbers), self._step)

    def score(self) -> tuple[float, list[float]]:
        with self._learner.policy.unpacked() as model:
            return scores(model, self._held_out, self._tokens)


def scores(model: Any, tasks: Sequence[Task], tokens: Tokens) -> tuple[float, list[float]]:
    """Return the mean probability of success over levels, and that of each level."""
    found = chances(model, tasks, tokens).numpy()
    levels = np.array([task.level for task in tasks])
    by_level = [float(found[levels == level].mean()) for level in range(len(LENGTHS))]
    return float(np.mean(by_level)), by_level


def rollouts_of(
    model: Any, tasks: Sequence[Task], tokens: Tokens
) -> Iterator[tuple[list[int], list[int], list[float]]]:
    """Yield prompt, response and log-probabilities of one rollout for each entry."""
    prompts = [tokens.prompt(task.question) for task in tasks]
    for start in range(0, len(prompts), _SAMPLED_AT_ONCE):
        some = prompts[start : start + _SAMPLED_AT_ONCE]
        yield from zip(some, *sample(model, some, tokens), strict=True)


def open_learner(folder: Path, algorithm: Algorithm, learning_rate: float, seed: int, **config: Any) -> Learner:
    settings = TrainerConfig(learning_rate=learning_rate, autocast="none", num_threads=1, **config)
    return Learner(LearnerArguments(model_path=str(folder), config=settings, seed=seed), algorithm, device="cpu")


def prepare(folder: Path, course: Course, seed: int) -> dict[str, Any]:
    """Make the start of a seed and the pass rates of both anchors, once for all selectors."""
    file = folder / "prepared.json"
    if file.exists():
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found
    tasks, held_out = make_tasks(course, seed)
    example("make_model").make_model(folder / "random", seed=seed)
    tokens = Tokens(folder / "random")
    features: dict[str, list[float]] = {"grade": [float(LENGTHS[task.level]) for task in tasks]}
    report: dict[str, Any] = {}

    def measure(name: str, learner: Learner) -> None:
        with learner.policy.unpacked() as model:
            report[name] = dict(zip(("score", "by_level"), scores(model, held_out, tokens), strict=True))
            if name != "start":
                features[name] = _pass_rates(model, tasks, tokens)

    known = {task.answer for task in held_out}
    learner = _open_for_imitation(folder / "random", course.warm_up_steps, seed)
    generator = np.random.default_rng((seed, 5))
    for step in range(1, course.warm_up_steps + 1):
        _imitate(learner, _demonstrations(generator, course.warm_up_shares, course.noise, known), tokens, step)
        if step == course.warm_up_steps // 2:
            measure("weak", learner)
    learner.save_pretrained(folder / "start")
    measure("start", learner)
    learner = _open_for_imitation(folder / "start", course.strong_steps, seed)
    shares = (1 / len(LENGTHS),) * len(LENGTHS)
    for step in range(1, course.strong_steps + 1):
        _imitate(learner, _demonstrations(generator, shares, (0.0,) * len(LENGTHS), known), tokens, step)
    measure("strong", learner)
    prepared = {"features": features, "anchor_rollouts": 2 * ANCHOR_ROLLOUTS * len(tasks), "models": report}
    file.write_text(json.dumps(prepared), encoding="utf-8")
    return prepared


def _open_for_imitation(folder: Path, steps: int, seed: int) -> Learner:
    config = TrainerConfig(
        learning_rate=2.0e-3,
        warmup_steps=20,
        lr_schedule="cosine",
        min_lr_ratio=0.05,
        optimizer=OptimizerConfig(weight_decay=0.01),
        autocast="none",
        num_threads=1,
    )
    arguments = LearnerArguments(model_path=str(folder), config=config, seed=seed, total_steps=steps)
    return Learner(arguments, build_algorithm("sft"), device="cpu")


def _imitate(learner: Learner, demonstrations: Sequence[tuple[str, str]], tokens: Tokens, step: int) -> None:
    rows = [(tokens.prompt(question), tokens.response(answer), None) for question, answer in demonstrations]
    learner.update(train_batch(rows, np.zeros(len(rows)), np.arange(len(rows))), step)


def _demonstrations(
    generator: np.random.Generator, shares: Sequence[float], noise: Sequence[float], held_out: set[str]
) -> list[tuple[str, str]]:
    """Return 64 questions with answers, a share of them with a wrong digit; none has the digits of a held-out task."""
    found: list[tuple[str, str]] = []
    while len(found) < 64:
        level = generator.choice(len(LENGTHS), p=shares)
        digits = [str(digit) for digit in generator.integers(10, size=LENGTHS[level])]
        answer = sorted(digits)
        if "".join(answer) in held_out:
            continue
        if generator.random() < noise[level]:
            answer[generator.integers(len(answer))] = str(generator.integers(10))
        found.append(("".join(digits) + ">", "".join(answer)))
    return found


def _pass_rates(model: Any, tasks: Sequence[Task], tokens: Tokens) -> list[float]:
    """Return the share of right answers of each task, measured with rollouts."""
    rows = [task for task in tasks for _ in range(ANCHOR_ROLLOUTS)]
    right = [
        float(response == tokens.response(task.answer))
        for task, (_, response, _) in zip(rows, rollouts_of(model, rows, tokens), strict=True)
    ]
    rates: list[float] = np.array(right).reshape(-1, ANCHOR_ROLLOUTS).mean(axis=1).tolist()
    return rates
