"""The runners of an explorer, one for each taskset that has a workflow, rewards, sampling or limits of its own, and one for the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rftcore.config.explorer import ExplorerConfig
from rftcore.engines.base import Decoding
from rftcore.environments import EnvironmentHosts, EnvironmentLimits
from rftcore.explorer.rollout_slots import RolloutSlots
from rftcore.explorer.rollouts import RolloutRunner
from rftcore.explorer.scorer import Scorer
from rftcore.programs.hosts import ProgramHosts
from rftcore.resolved import ResolvedRun
from rftcore.workflows.limits import Limits
from rftcore.workflows.task import Task
from rftdata.pipeline.budget import UsageLedger


@dataclass(frozen=True)
class TasksetRunner:
    """What runs the rollouts of a taskset, and how they are sampled."""

    runner: RolloutRunner
    decoding: Decoding


@dataclass(frozen=True)
class TasksetRunners:
    """The runners by taskset. They share the engine, the slots, the clocks, the drafts, the environments, the tools and the programs.

    Attributes:
        default: that of tasksets without settings of their own.
    """

    default: TasksetRunner
    _own: Mapping[str, TasksetRunner]

    @classmethod
    def of(cls, resolved: ResolvedRun, runner: RolloutRunner, usage: UsageLedger | None = None) -> TasksetRunners:
        """Return the runners of a run.

        Args:
            runner: that of tasksets without settings of their own.
            usage: counts what rewards spend on calls of models.
        """
        own = {
            taskset.name: _own_runner(resolved.for_taskset(taskset.name), runner, usage)
            for taskset in resolved.config.tasksets
            if taskset.of_explorer
        }
        return cls(TasksetRunner(runner, decoding_of(resolved.config.explorer)), own)

    def __getitem__(self, taskset: str) -> TasksetRunner:
        return self._own.get(taskset, self.default)

    @property
    def slots(self) -> RolloutSlots:
        """The slots of all rollouts."""
        return self.default.runner.slots

    @property
    def sandbox_tiers(self) -> list[str]:
        """What confines the code of a model, once each."""
        scorers = [one.runner.scorer for one in (self.default, *self._own.values())]
        return sorted({tier for scorer in scorers if isinstance(scorer, Scorer) for tier in scorer.sandbox_tiers})

    def beside(self, slots: RolloutSlots) -> TasksetRunners:
        """Return the same runners with other slots, whose rollouts do not wait for those of these."""

        def other(one: TasksetRunner) -> TasksetRunner:
            return replace(one, runner=replace(one.runner, slots=slots))

        return TasksetRunners(other(self.default), {name: other(own) for name, own in self._own.items()})

    def close(self) -> None:
        """End the processes of the rewards, environments, tools and programs, and the connections to other models."""
        if self.default.runner.programs is not None:
            self.default.runner.programs.close()
        if self.default.runner.tools is not None:
            self.default.runner.tools.close()
        if self.default.runner.environments is not None:
            self.default.runner.environments.close()
        self.default.runner.others.close()
        for one in (self.default, *self._own.values()):
            if isinstance(one.runner.scorer, Scorer):
                one.runner.scorer.close()


def decoding_of(explorer: ExplorerConfig) -> Decoding:
    """Return the sampling parameters of training rollouts."""
    return Decoding(
        temperature=explorer.temperature,
        top_p=explorer.top_p,
        top_k=explorer.top_k,
        max_tokens=explorer.max_tokens,
        stop=tuple(explorer.stop),
    )


def limits_of(explorer: ExplorerConfig) -> Limits:
    """Return the limits of rollouts."""
    return Limits(explorer.max_turns, explorer.max_rollout_tokens)


def environment_limits_of(explorer: ExplorerConfig) -> EnvironmentLimits:
    """Return the time limits of environments."""
    return EnvironmentLimits(explorer.step_timeout_s, explorer.reset_timeout_s)


def environments_of(resolved: ResolvedRun) -> EnvironmentHosts:
    """Return what runs the environments of a run."""
    config = resolved.config
    return EnvironmentHosts(
        config.base_dir, max_environments=config.explorer.max_environments, modules=[Task.__module__]
    )


def programs_of(resolved: ResolvedRun) -> ProgramHosts:
    """Return what runs the programs of a run."""
    config = resolved.config
    return ProgramHosts(config.base_dir, max_programs=config.explorer.max_environments)


def scorer_of(resolved: ResolvedRun, usage: UsageLedger | None = None) -> Scorer:
    """Return what calls the rewards of a run, or of a taskset's view of it."""
    explorer = resolved.config.explorer
    allowed_s, limit = explorer.reward_limit
    return Scorer(
        resolved.rewards,
        resolved.config.base_dir,
        combination=explorer.reward_combination,
        timeout_s=allowed_s,
        limit=limit,
        max_processes=explorer.reward_processes,
        usage=usage,
    )


def _own_runner(view: ResolvedRun, runner: RolloutRunner, usage: UsageLedger | None) -> TasksetRunner:
    explorer = view.config.explorer
    own = replace(
        runner,
        workflow=view.workflow,
        workflow_args=explorer.workflow_args,
        scorer=scorer_of(view, usage),
        timeout_s=explorer.rollout_timeout_s,
        close_s=explorer.close_timeout_s,
        limits=limits_of(explorer),
        environment_limits=environment_limits_of(explorer),
    )
    return TasksetRunner(own, decoding_of(explorer))
