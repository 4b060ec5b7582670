"""Trial rollouts of a task with a stand-in for the model, to find errors of a configuration's workflow and rewards before a run.

The stand-in answers with the task's right answer if there is one, because a reward that fails on that fails on everything. It needs no
model, so a trial takes seconds and no GPU.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rftcore.engines.base import Decoding, Engine, Generation
from rftcore.environments import EnvironmentLimits
from rftcore.explorer.rollout_slots import RolloutSlots
from rftcore.explorer.rollouts import RolloutRunner
from rftcore.explorer.scorer import Scorer
from rftcore.explorer.taskset_runners import decoding_of, environments_of, limits_of, programs_of
from rftcore.explorer.workflow_loop import TO_UNBLOCK, WorkflowLoop
from rftcore.other_models.models import OtherModels
from rftcore.tools.tool_boxes import ToolBoxes
from rftcore.workflows.task import Task
from rftdata.errors import ConfigError, RolloutsFailedError
from rftdata.experience import Rollout
from rftdata.user_code import time_limits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rftcore.resolved import ResolvedRun

LIMIT_S = 10.0
"""Longest wait. A run allows more, but here a person waits."""
_WHOLE_S = 120.0
_MAX_TURNS = 64
"""Answers of the stand-in, with which an environment may never end."""
_ANSWER = "a stand-in answer"


@dataclass(frozen=True)
class Rehearsal:
    """The result of a rollout with the stand-in.

    Attributes:
        num_prompt_tokens: of the workflow's longest prompt; None if it had none.
        rollout: with its reward, as an explorer would store it.
    """

    num_prompt_tokens: int | None
    rollout: Rollout

    @property
    def recorded(self) -> frozenset[str]:
        """Names of the arrays that every sampled turn has."""
        sequences = self.rollout.sequences
        sampled = [frozenset(sequence.arrays) for sequence in sequences if sequence.behavior_logprobs is not None]
        return frozenset.intersection(*sampled) if sampled else frozenset()


class StandIn(Engine):
    """Answers every prompt with one text.

    Args:
        tokenizer: of the run's model.
        answer: the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, answer: str) -> None:
        self.tokenizer = tokenizer
        self.policy_version_id = 0
        self.num_generated_tokens = 0
        self.num_prompt_tokens: int | None = None
        self._answer = answer

    async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        self.num_prompt_tokens = max(self.num_prompt_tokens or 0, len(prompt_token_ids))
        token_ids = [int(token) for token in self.tokenizer.encode(self._answer, add_special_tokens=False)]
        return Generation(token_ids, [0.0] * len(token_ids), self._answer, "stop", [(0, 0)] if token_ids else [])

    def load_weights(self, uri: str, policy_version_id: int, checksum: str | None = None) -> float:
        raise NotImplementedError("a stand-in has no weights")

    def close(self) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Rollouts of tasks without a run.

    Attributes:
        decoding: the sampling parameters of training.
        failures: the descriptions of failures, with the user's stack of each.
    """

    runner: RolloutRunner
    loop: WorkflowLoop
    decoding: Decoding
    failures: list[tuple[str, str]]

    async def rollouts(self, task: Task, size: int = 1) -> list[Rollout]:
        """Run a group of rollouts, and return their outcomes.

        Raises:
            ConfigError, PluginError: an error that would end a run.
        """
        return await self.loop.run(self.runner.unstored(task, size, self.decoding))


@contextmanager
def open_trial(
    resolved: ResolvedRun, engine: Engine, *, longest_s: float = math.inf, num_slots: int = 1
) -> Iterator[Trial]:
    """Open what an explorer runs the rollouts of a taskset with, and close it at the end.

    Args:
        resolved: as the taskset sees the run (`ResolvedRun.for_taskset`).
        longest_s: longest wait, if the configuration allows more; a rollout then has at most `_MAX_TURNS` turns.
        num_slots: number of concurrent rollouts.
    """
    failures: list[tuple[str, str]] = []
    explorer = resolved.config.explorer
    allowed_s, limit = explorer.reward_limit
    if allowed_s > longest_s:
        allowed_s, limit = longest_s, f"{longest_s:g} s (a run allows {limit})"
    scorer = Scorer(
        resolved.rewards,
        resolved.config.base_dir,
        combination=explorer.reward_combination,
        timeout_s=allowed_s,
        limit=limit,
        max_processes=1,
    )
    limits = limits_of(explorer)
    if longest_s < math.inf:
        limits = replace(limits, max_turns=min(limits.max_turns or _MAX_TURNS, _MAX_TURNS))
    environments = environments_of(resolved)
    boxes = ToolBoxes(resolved.config.base_dir)
    programs = programs_of(resolved)
    others = OtherModels(explorer.models)
    runner = RolloutRunner(
        engine=engine,
        workflow=resolved.workflow,
        workflow_args=explorer.workflow_args,
        scorer=scorer,
        timeout_s=min(longest_s, explorer.rollout_timeout_s),
        limits=limits,
        thoughts=explorer.thoughts,
        source="explorer",
        slots=RolloutSlots(num_slots, num_slots),
        on_failure=lambda *failure: failures.append(failure),
        environments=environments,
        tools=boxes,
        programs=programs,
        others=others,
        environment_limits=EnvironmentLimits(min(longest_s, explorer.step_timeout_s), explorer.reset_timeout_s),
    )
    loop = WorkflowLoop(min(longest_s, explorer.block_timeout_s), on_stuck=_leave)
    try:
        yield Trial(runner=runner, loop=loop, decoding=decoding_of(explorer), failures=failures)
    finally:
        loop.close()
        environments.close()
        boxes.close()
        programs.close()
        others.close()
        scorer.close()


def rehearse(resolved: ResolvedRun, task: Task, tokenizer: PreTrainedTokenizerBase) -> Rehearsal:
    """Try one task like an explorer, with the stand-in for the engine and at most `LIMIT_S` for each wait.

    Raises:
        RolloutsFailedError: the rollout failed; it contains the user's stack.
        ConfigError, PluginError: an error that would end a run.
    """
    engine = StandIn(tokenizer, stand_in_answer(task))
    with open_trial(resolved, engine, longest_s=LIMIT_S) as trial:
        # This outer limit is for code that keeps the interpreter's lock; the inner limits need other threads.
        [rollout] = time_limits.call(
            lambda: asyncio.run(trial.rollouts(task)),
            _WHOLE_S,
            f"a rollout of the task {task.task_key!r} of {task.taskset!r}",
            cap=False,
        )
    if trial.failures:
        [(text, stack)] = trial.failures
        raise RolloutsFailedError(
            f"a rollout of the task {task.task_key!r} of {task.taskset!r} fails with the answer {engine._answer[:60]!r} in place of "
            f"the model's: {text.rstrip('.')}",
            stack=stack,
        )
    return Rehearsal(engine.num_prompt_tokens, rollout)


def stand_in_answer(task: Task) -> str:
    """Return what the stand-in answers: the task's right answer if there is one."""
    return _ANSWER if task.answer is None else task.answer


def check_context(resolved: ResolvedRun, longest: Task, num_prompt_tokens: int) -> str | None:
    """Return a sentence if the engine's context would cut answers to the longest prompt short.

    Args:
        longest: the task with the longest prompt.
        num_prompt_tokens: of that prompt.

    Raises:
        ConfigError: the prompt does not fit into the context.
    """
    max_tokens, context_length = resolved.config.explorer.max_tokens, resolved.context_length
    if context_length is None:
        return None
    if num_prompt_tokens >= context_length:
        raise ConfigError(
            f"the prompt of the task {longest.task_key!r} of {longest.taskset!r} does not fit the engine's context",
            value=f"{num_prompt_tokens} tokens",
            allowed=f"up to {context_length - 1}",
            todo="drop long tasks (pipelines.task: text_length_filter), or raise explorer.engine_args.context_length",
        )
    room = context_length - num_prompt_tokens
    if room >= max_tokens:
        return None
    return (
        f"responses to the longest prompt, of the task {longest.task_key!r}, are cut after {room} tokens: it has {num_prompt_tokens}, the "
        f"engine's context {context_length}, and explorer.max_tokens is {max_tokens}"
    )


def _leave(sentence: str, stack: str) -> None:
    """Exit at once, because code that is stuck also prevents an orderly exit."""
    print(f"{stack}\nrft: {sentence}; {TO_UNBLOCK}.", file=sys.stderr, flush=True)
    os._exit(1)
