"""Rollouts, and the boundary at which failures become data.

An exception in a workflow or a reward, and a rollout that takes too long, are outcomes that are stored with their error. They
never stop the explorer. Errors of the run itself (its configuration, model or engine) do, because every other rollout would
end in the same way.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeGuard

from rftcore.engines.base import Decoding, Engine
from rftcore.environments import EnvironmentHosts, EnvironmentLimits, environments_of_rollout
from rftcore.explorer.drafts import Drafts, RolloutDraft
from rftcore.explorer.group_rewards import add_group_rewards
from rftcore.explorer.plain_workflow import run_plain
from rftcore.explorer.rollout_errors import ends_rollout_alone, outcome_of
from rftcore.explorer.rollout_slots import RolloutSlots
from rftcore.explorer.score_value import checked_score
from rftcore.explorer.scorer import Scorer as RewardScorer
from rftcore.failures import InfrastructureError, describe, holds, user_stack
from rftcore.other_models.models import NO_MODELS, OtherModels
from rftcore.programs.hosts import ProgramHosts, programs_of_rollout
from rftcore.rollout_clock import RolloutClock, RolloutClocks
from rftcore.tools.tool_boxes import ToolBoxes, tools_of_rollout
from rftcore.workflows.inputs import PER_TURN
from rftcore.workflows.limits import NO_LIMITS, LimitReachedError, Limits
from rftcore.workflows.prompts import Prompts, Thoughts
from rftcore.workflows.task import AsyncWorkflow, Model, Sampler, Score, Scorer, Task, Turn, Workflow
from rftdata.errors import RftError
from rftdata.experience import AbandonedTry, Baseline, Group, Rollout, Sequence, successes_and_trials
from rftdata.planning.claims import ClaimedGroup
from rftdata.selectors import Screening
from rftdata.writing.chats import chat_of
from rftdata.writing.rollout_check import check_rollout

logger = logging.getLogger(__name__)

_PAUSES_S = (1.0, 5.0)
"""Mean pauses before a rollout whose infrastructure failed is tried for the second and the third time."""


class _TryAgainError(Exception):
    """The infrastructure failed in a rollout.

    Args:
        tried: what is kept of the try.
    """

    def __init__(self, tried: AbandonedTry) -> None:
        super().__init__(tried.error)
        self.tried = tried


@dataclass(frozen=True, kw_only=True)
class RolloutRunner:
    """Runs the rollouts of a run.

    Attributes:
        timeout_s: a rollout that takes longer ends; waiting for a slot, or in the engine, does not count (`RolloutClock`). It is kept if it
            waits for the model's next answer then, and else recorded as timed out.
        close_s: further seconds in which the workflow of a rollout that is kept returns its score.
        limits: on turns and tokens.
        thoughts: of earlier answers, whether they stay in the chat (`explorer.thoughts`).
        seed: of the run, from which the tasks of its groups have theirs.
        slots: admit rollouts to the engine.
        on_failure: receives the description of a failure and the user's stack.
        clocks: those of its rollouts, to be suspended while the engine sleeps.
        drafts: if given, rollouts of claimed groups sample through them, so that others can continue them.
        has_baseline: whether each group also gets a greedy rollout, whose reward is a baseline for the others.
        environments: of its rollouts; None: each environment that a workflow opens has a host for itself.
        tools, programs: of its rollouts; None: they are opened for each rollout.
        others: models that workflows ask besides the policy.
    """

    engine: Engine
    workflow: Workflow
    workflow_args: dict[str, Any]
    scorer: Scorer
    timeout_s: float
    close_s: float = 60.0
    limits: Limits = NO_LIMITS
    thoughts: Thoughts = "template"
    seed: int = 0
    source: str
    slots: RolloutSlots
    on_failure: Callable[[str, str], None] = lambda *_: None
    has_baseline: bool = False
    drafts: Drafts | None = None
    clocks: RolloutClocks = field(default_factory=RolloutClocks)
    environments: EnvironmentHosts | None = None
    tools: ToolBoxes | None = None
    programs: ProgramHosts | None = None
    others: OtherModels = NO_MODELS
    environment_limits: EnvironmentLimits = EnvironmentLimits()  # noqa: RUF009 - it is frozen

    async def group(self, claimed: ClaimedGroup, decoding: Decoding, screening: Screening | None = None) -> Group:
        """Run all rollouts of a claimed group concurrently. With a screening rule, run the remaining ones only if the first are neither
        all bad nor all good enough.

        A screened-out group is still complete: the rollouts that were not run are recorded as cancelled, with the reason.
        """
        task = Task.from_row(vars(claimed), self.seed, claimed.explore_step)
        size, prompts = claimed.group_size, Prompts(self.thoughts)
        turns: dict[int, list[Turn]] | None = {} if self._scores_groups else None
        group = Group([], claimed.group_id, claimed.claim_token, source=self.source)
        if screening and screening.rollouts < size:
            group.rollouts += await self._rollouts(task, range(screening.rollouts), decoding, claimed, prompts, turns)
            refusal = screening.refusal(*successes_and_trials(group))
            if refusal is not None:
                first = len(group.rollouts)
                group.rollouts += [Rollout(index, "cancelled", error=refusal) for index in range(first, size)]
                return await self._with_group_rewards(group, task, turns)
        rest, group.baseline = await asyncio.gather(
            self._rollouts(task, range(len(group.rollouts), size), decoding, claimed, prompts, turns),
            self._baseline(task, size, decoding, claimed, prompts),
        )
        group.rollouts += rest
        return await self._with_group_rewards(group, task, turns)

    async def unstored(self, task: Task, size: int, decoding: Decoding) -> list[Rollout]:
        """Run the rollouts of a group that is not stored, with the rewards over it.

        Raises:
            ConfigError, ModelError, EngineStoppedError: the run cannot continue.
        """
        turns: dict[int, list[Turn]] | None = {} if self._scores_groups else None
        each = (self.rollout(task, index, decoding, turns=turns) for index in range(size))
        group = Group(list(await asyncio.gather(*each)), 0, 0, source=self.source)
        return (await self._with_group_rewards(group, task, turns)).rollouts

    @property
    def _scores_groups(self) -> bool:
        return isinstance(self.scorer, RewardScorer) and self.scorer.scores_groups

    async def _with_group_rewards(self, group: Group, task: Task, turns: Mapping[int, list[Turn]] | None) -> Group:
        """Add the rewards over the whole group, if there are any."""
        if isinstance(self.scorer, RewardScorer) and turns is not None:
            await add_group_rewards(self.scorer, group, task, turns, self.on_failure)
        return group

    async def _baseline(
        self, task: Task, index: int, decoding: Decoding, claimed: ClaimedGroup, prompts: Prompts
    ) -> Baseline | None:
        if not self.has_baseline:
            return None
        return Baseline.of(await self.rollout(task, index, decoding.greedy(), claimed, prompts))

    async def _rollouts(
        self,
        task: Task,
        indices: range,
        decoding: Decoding,
        claimed: ClaimedGroup,
        prompts: Prompts,
        turns: dict[int, list[Turn]] | None,
    ) -> list[Rollout]:
        each = (self.rollout(task, index, decoding, claimed, prompts, turns) for index in indices)
        return list(await asyncio.gather(*each))

    async def rollout(
        self,
        task: Task,
        index: int,
        decoding: Decoding,
        claimed: ClaimedGroup | None = None,
        prompts: Prompts | None = None,
        turns: dict[int, list[Turn]] | None = None,
    ) -> Rollout:
        """Run one rollout and return its outcome, without rewards over whole groups. After a failure of the infrastructure it is begun again,
        two times at most.

        Args:
            claimed: its group; None for an answer of an evaluation.
            prompts: renders the chats of its group.
            turns: receives the answers of the rollout, by its index.

        Raises:
            ConfigError, ModelError, EngineStoppedError: the run cannot continue.
        """
        sampler, tries, rollout = self._sampler(index, claimed), list[AbandonedTry](), None
        with self._environments() as changing:
            while rollout is None:
                try:
                    async with self.slots.rollout() as slot:
                        known = prompts or Prompts(self.thoughts)
                        model = Model(slot.sampler(sampler), decoding, known, self.limits, self.others)
                        task, is_last = replace(task, rollout_index=index), len(tries) == len(_PAUSES_S)
                        rollout = await self._try(task, index, model, last=is_last)
                except _TryAgainError as again:
                    logger.warning("a rollout of task %r of %r is tried again: %s", task.task_key, task.taskset, again)
                    pause_s = _PAUSES_S[len(tries)] * random.uniform(0.5, 1.5)
                    tries.append(again.tried)
                    await asyncio.sleep(pause_s)
        if turns is not None:
            turns[index] = model.turns
        lost = sampler.begun_again(changing) if isinstance(sampler, RolloutDraft) else None
        return replace(rollout, tries=[*([] if lost is None else [lost]), *tries])

    @contextmanager
    def _environments(self) -> Iterator[Collection[str]]:
        """Let environments be opened within the block; yield the names of those that were opened and are not deterministic."""
        if self.environments is None:
            yield ()
            return
        with environments_of_rollout(self.environments, self.environment_limits) as opened:
            yield opened.changing

    def _sampler(self, index: int, claimed: ClaimedGroup | None) -> Sampler:
        if claimed is None or self.drafts is None:
            return self.engine
        return self.drafts.rollout(claimed.group_id, index)

    async def _try(self, task: Task, index: int, model: Model, *, last: bool) -> Rollout:
        """Run a rollout once.

        Args:
            last: whether a failure of the infrastructure is its outcome. Otherwise _TryAgainError is raised.
        """
        started = time.monotonic()
        limit = f"took longer than explorer.rollout_timeout_s = {self.timeout_s:g} s"
        stop = partial(model.stop, "rollout_timeout", f"the rollout {limit}")
        clock = RolloutClock(self.timeout_s, self.clocks, stop=stop, close_s=self.close_s)
        try:
            async with clock:
                score = checked_score(await self._score(task, model), task, model)
                refuse_partly_recorded([turn.sequence for turn in model.turns])
            kept = Rollout(index, reward=score.reward, stop_reason=model.stop_reason)
            return _recorded(kept, model, score, started)
        except BaseException as raised:  # the boundary: errors of a user's code are data
            if not ends_rollout_alone(raised):
                raise
            if not last and holds(raised, InfrastructureError):
                raise _TryAgainError(_abandoned(describe(raised), model)) from raised
            outcome, error = outcome_of(raised, limit if clock.expired else None)
            self.on_failure(error, user_stack(raised))
        failed = Rollout(index, outcome, error=error)
        try:
            return _recorded(failed, model, None, started)
        except Exception:  # noqa: BLE001 - its turns cannot be stored; its first error is kept
            return replace(failed, seconds=time.monotonic() - started)

    async def _score(self, task: Task, model: Model) -> Any:
        """Return what the workflow returns. If a limit ends it, the rewards score the last turn, with what the workflow recorded of each.

        Raises:
            LimitReachedError: there is no reward, and the workflow recorded none.
        """
        try:
            return await self._run_workflow(task, model)
        except BaseException as raised:
            if not holds(raised, LimitReachedError):
                raise
            await model.finish_open()
            if not model.turns:
                raise
            steps = dict[str | None, list[float]]()
            for recorded in (turn.sequence for turn in model.turns if "step_reward" in turn.sequence.arrays):
                steps.setdefault(recorded.role, []).append(math.fsum(recorded.arrays["step_reward"]))
            last, score = model.turns[-1], await self.scorer(model.turns[-1], task)
            if not steps and not score.parts:
                raise
            by_role = {role: math.fsum(rewards) for role, rewards in steps.items() if role is not None}
            reward = score.reward + math.fsum(steps.get(last.sequence.role, ()))
            return replace(score, reward=reward, by_role=by_role | _of_last(last, reward))

    async def _run_workflow(self, task: Task, model: Model) -> Any:
        with (
            nullcontext() if self.tools is None else tools_of_rollout(self.tools),
            nullcontext() if self.programs is None else programs_of_rollout(self.programs),
        ):
            if not _is_async(self.workflow):
                return await run_plain(self.workflow, task, model, self.scorer, self.workflow_args)
            return await self.workflow(task, model, self.scorer, **self.workflow_args)


def _of_last(last: Turn, reward: float) -> dict[str, float]:
    """Return the reward of the role of the last turn, which is the one that is scored; nothing without roles."""
    return {} if last.sequence.role is None else {last.sequence.role: reward}


def _recorded(rollout: Rollout, model: Model, score: Score | None, started: float) -> Rollout:
    """Return a rollout with its turns. Every sequence gets the rollout's reward, or that of its role.

    Raises:
        RftError: it cannot be stored.
        Exception: a workflow changed a turn so that the turns cannot be joined.
    """
    sequences = model.sequences()
    for sequence in sequences:
        if score is not None:
            sequence.reward, sequence.reward_parts = score.of_role(sequence.role), score.parts
    rollout = replace(rollout, sequences=sequences, seconds=time.monotonic() - started)
    check_rollout(rollout)
    return rollout


def _abandoned(error: str, model: Model) -> AbandonedTry:
    """Return what is kept of a try that is given up: its error alone, if its turns cannot be stored."""
    try:
        tried = AbandonedTry(error, [chat_of(sequence) for sequence in model.sequences()])
        check_rollout(Rollout(0, "failed", tries=[tried]))
    except Exception:  # noqa: BLE001 - a workflow may have changed its turns; the rollout begins again in any case
        return AbandonedTry(error)
    return tried


def refuse_partly_recorded(sequences: list[Sequence]) -> None:
    """Refuse turns if only some have an input that algorithms compare between turns.

    Raises:
        RftError: which input, and the first turn without it.
    """
    sampled = [(turn, s) for turn, s in enumerate(sequences) if s.behavior_logprobs is not None]
    for name in PER_TURN:
        missing = [turn for turn, sequence in sampled if name not in sequence.arrays]
        if missing and len(missing) < len(sampled):
            raise RftError(
                f"the workflow recorded {name} for {len(sampled) - len(missing)} of {len(sampled)} sampled turns, and not for turn {missing[0]}",
                todo="call turn.record(…) for each turn of the rollout, or for none",
            )


def _is_async(workflow: Workflow) -> TypeGuard[AsyncWorkflow]:
    call = getattr(workflow, "__call__", None)  # noqa: B004 - an object with an async __call__ is also an async function
    return inspect.iscoroutinefunction(workflow) or inspect.iscoroutinefunction(call)
