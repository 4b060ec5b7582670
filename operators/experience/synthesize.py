"""Create new tasks or experiences from existing ones. The rows themselves pass unchanged.

    - synthesize: {kind: rephrase, endpoint: policy, fraction: 0.1}
    - synthesize: {kind: harder, endpoint: {url: …, model: …}, min_reward: 0.9, max_per_batch: 8}
    - synthesize: {kind: easier, endpoint: {url: …, model: …}, max_reward: 0.05}
    - synthesize: {kind: self_correct, endpoint: policy, max_reward: 0, reward: "./rewards.py:right"}
    - synthesize: {kind: "./variants.py:swap_numbers", args: {count: 2}}

`rephrase`, `harder` and `easier` create one new task from a task, whatever the number of its rollouts in the batch, and select by
the mean reward of the group. A harder or easier task has a new answer. With `verify` the model must find this answer again without
having seen it, or the task is discarded. `self_correct` shows the model its own wrong answer and creates an experience from the
corrected one, on the row's own task: the answer to the original chat, with the reward of the function `reward(row, response)`. Without
that function the reward comes from later stages or people. Your own function gets a row as a dict and `args`, and returns a list of
mappings: one with `prompt` (and `answer`, `metadata`, `features`) is a new task, one with `response` (and `reward`) an experience on
the row's own task.

A created experience has its own group (a function's: one group for all answers to a row), and no policy sampled it. So it is for
algorithms that learn from single answers of any origin: `algorithm: {name: sft, min_group_size: 1}`. Algorithms that compare the
rollouts of a group, or weight tokens by the policy that sampled them (`grpo`), are refused with `self_correct`. With them, experiences
from a function are not stored, and `operator_run` has the reason. Create new tasks for these algorithms.

A new task's key is a digest of its source and the recipe, so the same input gives the same key, and existing tasks are not created
twice. Its metadata record its origin under `synthesis`: kind, generation and parent, which is the experience (in `pipelines.task`
the task). An experience has the metric `generation`. Synthesised rows are used up to `max_generations`: 1 uses only original rows.
`fraction` selects by digest, too, not at random.

A call that fails creates nothing and leaves its reason in the column `synthesis_error`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import Field, model_validator

from operators.base import CreatedAnswer, CreatedGroup, CreatedTask, StageOutcome, check_plain, source_digest
from operators.llm.client import Answer, AskingConfig, AskingOperator, chat, finite
from operators.llm.endpoint import AnyEndpoint
from operators.llm.synthesis import (
    TEMPLATES,
    Parent,
    correction,
    generation_of,
    mean_rewards,
    retelling,
    same_answer,
    solving,
)
from operators.llm.templates import Template, chat_before
from rftdata.errors import ConfigError, OperatorError
from rftdata.plugins import Registry

# A user's own functions; the built-in rewards are in rftcore, which this package does not import.
_FUNCTIONS = Registry[object]("synthesis function", {})
_REWARDS = Registry[object]("reward", {})


class Synthesize(AskingOperator, revision=1):
    """Creates tasks or experiences, and drops nothing."""

    class Config(AskingConfig):
        """`kind`: rephrase, harder, easier, self_correct or ./file.py:function; `args`: arguments of a function; `template`: the request, with
        {question} and {answer}, by default that of the kind (below); `verify`: the model must find the new answer again without having seen
        it; `reward`: ./file.py:function for corrected answers; `taskset`: set of new tasks, the parent's by default; `min_reward`: smallest
        reward of rows that are used; `max_reward`: largest reward of rows that are used; `fraction`: share of the matching rows that is used;
        `max_per_batch`: largest number of rows used per batch; `max_generations`: synthesised rows are used up to this generation, 1 uses
        only original rows."""

        kind: str
        endpoint: AnyEndpoint | None = None  # type: ignore[assignment]  # a function calls no endpoint
        args: dict[str, Any] = Field(default_factory=dict)
        template: str | None = None
        verify: bool = True
        reward: str | None = None
        taskset: str | None = None
        min_reward: float | None = None
        max_reward: float | None = None
        fraction: float = Field(default=1.0, gt=0, le=1)
        max_per_batch: int | None = Field(default=None, ge=1)
        max_generations: int = Field(default=1, ge=1)

        @model_validator(mode="after")
        def _fits_the_kind(self) -> Synthesize.Config:
            if self.kind in TEMPLATES:
                if self.endpoint is None:
                    raise ValueError(f"kind {self.kind} asks a model: give endpoint")
                if self.args:
                    raise ValueError("args are for a function of your own")
            elif ":" not in self.kind:
                raise ValueError(f"kind {self.kind!r} is none of {', '.join(TEMPLATES)}, nor ./file.py:function")
            elif self.endpoint is not None:
                raise ValueError("your own function uses no endpoint")
            if self.reward is not None and self.kind != "self_correct":
                raise ValueError("reward is for kind self_correct")
            if self.taskset is not None and self.kind == "self_correct":
                raise ValueError("kind self_correct creates no tasks, so it has no use for a taskset")
            return self

    reads = frozenset(
        {
            "group_id",
            "task_id",
            "taskset",
            "answer",
            "prompt",
            "messages",
            "response",
            "reward",
            "source",
            "metadata",
            "metrics",
        }
    )
    writes = frozenset({"synthesis_error"})

    def __init__(self, config: Synthesize.Config) -> None:
        super().__init__(config)
        self.counted_as = config.kind
        text = config.template or TEMPLATES.get(config.kind, "")
        self._template = Template(text, ["question", "answer"])
        if config.endpoint is not None:
            nothing = self._template.fill({"question": "", "answer": ""})
            config.budget.check_allows(chat(None, nothing), config.max_tokens)
        self._function: Callable[..., Any] | None = None
        self._reward: Callable[..., Any] | None = None
        self.answers = 1 if config.kind == "self_correct" else None
        self._max_reward = 0.0 if config.kind == "self_correct" and config.max_reward is None else config.max_reward

    def validate_schema(self, schema: pa.Schema) -> pa.Schema:
        self._load()
        if "response" not in schema.names:
            # A batch of tasks: every task is its own group.
            lacking = {"metrics"} if self.config.kind == "self_correct" else {"metrics", "response"}
            self.reads = (self.reads or frozenset()) - lacking
            self.rowwise = True
        schema = super().validate_schema(schema)
        added = "synthesis_error" not in schema.names
        return schema.append(pa.field("synthesis_error", pa.string())) if added else schema

    def _load(self) -> None:
        """Load the functions that the arguments name, from files beside the configuration."""
        if self.config.kind not in TEMPLATES:
            self._function = _loaded(_FUNCTIONS, self.config.kind, self.base_dir)
            check_plain(self.config.args)
            _check_arguments(self._function, self.config.args)
        if self.config.reward is not None:
            self._reward = _loaded(_REWARDS, self.config.reward, self.base_dir)

    def apply(self, table: pa.Table) -> StageOutcome:
        errors: list[str | None] = [None] * table.num_rows
        parents = self._parents(table.to_pylist())
        make = {"self_correct": self._corrected}.get(self.config.kind, self._retold)
        created = (
            [new for parent in parents for new in self._by_function(parent)]
            if self._function
            else make(parents, errors)
        )
        outcome = StageOutcome.keep_all(table.num_rows, {"synthesis_error": pa.array(errors, pa.string())})
        return StageOutcome(outcome.reasons, outcome.columns, created=created)

    def spec(self) -> dict[str, Any]:
        plugins_used = {"code": self._function, "reward_code": self._reward}
        digests = {name: source_digest(function) for name, function in plugins_used.items() if function is not None}
        return {**super().spec(), **digests}

    def _parents(self, rows: Sequence[Mapping[str, Any]]) -> list[Parent]:
        """Return the rows to use: eligible, selected by `fraction`, at most `max_per_batch`; the first of equal ones."""
        rewards = (
            mean_rewards(rows)
            if self.config.kind in ("rephrase", "harder", "easier")
            else [row["reward"] for row in rows]
        )
        parents: dict[str, Parent] = {}
        for place, (row, reward) in enumerate(zip(rows, rewards)):
            metadata = json.loads(row["metadata"] or "null") or {}
            generation = generation_of(row, metadata)
            if generation < self.config.max_generations and self._takes(reward):
                parent = Parent(place, row, chat_before(row), metadata, generation, "")
                key = self._key(parent)
                if key not in parents and int(key, 16) < self.config.fraction * 2**64:
                    parents[key] = Parent(place, row, parent.chat, metadata, generation, key)
        # In the order of their keys, so that the limit does not favour the first rows of the batch.
        return [parents[key] for key in sorted(parents)][: self.config.max_per_batch]

    def _takes(self, reward: float | None) -> bool:
        low, high = self.config.min_reward, self._max_reward
        if reward is None:
            return low is None and high is None
        return (low is None or reward >= low) and (high is None or reward <= high)

    def _key(self, parent: Parent) -> str:
        """Return 16 hexadecimal digits."""
        recipe = {
            k: v
            for k, v in self.spec().items()
            if k in ("kind", "template", "args", "endpoint", "code", "seed", "temperature")
        }
        of_task = [parent.row["taskset"], parent.question, parent.row["answer"]]
        of_row = [] if self.config.kind in ("rephrase", "harder", "easier") else [parent.row.get("response")]
        text = json.dumps([recipe, of_task, of_row], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _by_function(self, parent: Parent) -> list[CreatedTask | CreatedGroup]:
        assert self._function is not None
        row = {**parent.row, "metadata": dict(parent.metadata), "messages": [dict(turn) for turn in parent.chat]}
        try:
            made = self._function(row, **self.config.args)
        except Exception as error:
            what = f"{self.config.kind} raised for experience {parent.row['experience_id']}"
            raise OperatorError(f"{what}: {type(error).__name__}: {error}", todo="fix the function") from error
        tasks: list[CreatedTask | CreatedGroup] = []
        answers: list[CreatedAnswer] = []
        for number, new in enumerate(made or []):
            if not isinstance(new, Mapping) or not ("prompt" in new or "response" in new):
                raise OperatorError(
                    f"{self.config.kind} returned something other than tasks and answers for experience {parent.row['experience_id']}",
                    value=new,
                    allowed="mappings with prompt (a task) or response (an answer)",
                )
            if "prompt" in new:
                tasks.append(parent.task(self.config.kind, self.config.taskset, new, number))
            else:
                chat = new.get("messages") or list(parent.chat)
                answers.append(CreatedAnswer(chat, new["response"], new.get("reward"), parent.metrics))
        return [*tasks, self._group(parent, answers)] if answers else tasks

    def _retold(self, parents: Sequence[Parent], errors: list[str | None]) -> list[CreatedTask | CreatedGroup]:
        """Create tasks of the kinds rephrase, harder and easier."""
        new_answer = self.config.kind != "rephrase"
        asked = [retelling(self._request(parent), new_answer) for parent in parents]
        drafts = list(zip(parents, self.ask(asked), strict=True))
        for parent, draft in drafts:
            errors[parent.place] = draft.error
        drafts = [(parent, draft) for parent, draft in drafts if draft.error is None]
        if new_answer and self.config.verify:
            drafts = self._verified(drafts, errors)
        return [
            parent.task(self.config.kind, self.config.taskset, _payload(parent, draft.value))
            for parent, draft in drafts
        ]

    def _request(self, parent: Parent) -> str:
        return self._template.fill({"question": parent.question, "answer": parent.row["answer"] or ""})

    def _verified(self, drafts: list[tuple[Parent, Answer]], errors: list[str | None]) -> list[tuple[Parent, Answer]]:
        """Return the drafts whose answer the model finds again from the question alone."""
        questions = [solving(draft.value["prompt"]) for _, draft in drafts]
        agreed = []
        for (parent, draft), solved in zip(drafts, self.ask(questions), strict=True):
            if solved.error is not None:
                errors[parent.place] = solved.error
            elif not same_answer(solved.value, draft.value["answer"]):
                errors[parent.place] = f"its answer {draft.value['answer']!r} was not found again: {solved.value!r}"[
                    :500
                ]
            else:
                agreed.append((parent, draft))
        return agreed

    def _corrected(self, parents: Sequence[Parent], errors: list[str | None]) -> list[CreatedTask | CreatedGroup]:
        created: list[CreatedTask | CreatedGroup] = []
        asked = [correction(parent, self._request(parent)) for parent in parents]
        for parent, answer in zip(parents, self.ask(asked), strict=True):
            errors[parent.place] = answer.error
            if answer.error is None:
                reward = None if self._reward is None else self._rewarded(parent, answer.value)
                made = CreatedAnswer(list(parent.chat), answer.value, reward, parent.metrics)
                created.append(self._group(parent, [made]))
        return created

    def _rewarded(self, parent: Parent, response: str) -> float:
        assert self._reward is not None
        try:
            reward = finite(self._reward({**parent.row, "metadata": dict(parent.metadata)}, response))
        except Exception as error:
            what = f"{self.config.reward} raised for a correction of experience {parent.row['experience_id']}"
            raise OperatorError(f"{what}: {type(error).__name__}: {error}", todo="fix the function") from error
        if reward is None:
            raise OperatorError(f"{self.config.reward} returned no finite number", todo="fix the function")
        return reward

    def _group(self, parent: Parent, answers: Sequence[CreatedAnswer]) -> CreatedGroup:
        name = self.config.kind.rpartition(":")[2]
        return CreatedGroup(None, parent.row["experience_id"], answers, f"{name}-{parent.key}")


def _payload(parent: Parent, made: Mapping[str, str]) -> dict[str, Any]:
    if "answer" in made:
        return {**made}
    # The same task in other words, so the verifier's information stays valid.
    return {**made, "answer": parent.row["answer"], "metadata": parent.metadata}


def _loaded(registry: Registry[object], name: str, base_dir: Path) -> Callable[..., Any]:
    function = registry.load(name, base_dir)
    if not callable(function):
        raise ConfigError(f"the {registry.kind} is not a function", value=name)
    return function


def _check_arguments(function: Callable[..., Any], args: Mapping[str, Any]) -> None:
    try:
        inspect.signature(function).bind({}, **args)
    except TypeError as error:
        raise ConfigError(
            f"the function cannot be called with a row and these args: {error}",
            value=dict(args),
            todo="its first parameter is the row; the others come from args",
        ) from error
