"""`Environment`: what a policy acts on, one object per rollout; `Observation` and `Step`, which it returns.

A workflow calls `reset` once, then `step` with each action until the episode ends, then `close`. An environment decides itself what an
invalid action means: usually an observation that explains it, with or without a negative reward. An exception is an error of the environment,
with which the rollout fails.

If all three methods are coroutine functions, the environment runs in the event loop of the workflows and must not block. Every other
environment has a process of its own (`rftcore.environments.host`): it may compute, block, and use global state such as `random`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ONE_ROLE = ("agent",)


@dataclass(frozen=True)
class Observation:
    """What the role that acts next reads.

    Attributes:
        text: the content of the message; 1,000,000 characters at most.
        role: the role that acts next, one of `Environment.roles`.
        state: the state of the environment as text, for algorithms that compare equal states; None if it has none. The policy does not
            read it.
    """

    text: str
    role: str = "agent"
    state: str | None = None


@dataclass(frozen=True)
class Step:
    """The result of an action.

    Attributes:
        observation: of the state after the action; at the end of an episode, the last one.
        reward: of the role that acted, for this action alone. A finite number.
        terminated: whether the episode has ended by the rules of the environment.
        truncated: whether the environment ended it for another reason, such as its own limit of steps.
        info: further facts as JSON values, for workflows and people.
        next_role: the role that acts next; None: `observation.role`.
        state: the state after the action; None: `observation.state`.
        rewards: rewards of several roles, such as those of a game's end. They are added to `reward`.
    """

    observation: Observation
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    next_role: str | None = None
    state: str | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        """Whether the episode has ended, for either reason."""
        return self.terminated or self.truncated

    def rewards_by_role(self, acted: str = "agent") -> dict[str, float]:
        """Return the rewards of the step by role.

        Args:
            acted: the role whose action it was; it gets `reward`.
        """
        found = {role: float(reward) for role, reward in self.rewards.items()}
        if self.reward or not found:
            found[acted] = found.get(acted, 0.0) + self.reward
        return found


class Environment:
    """Base of environments. The constructor takes `environment_args`; each method may be plain or `async`.

    Attributes:
        roles: names of those who act, such as the players of a game; of the class, or set by the constructor.
        deterministic: whether equal seeds, tasks and actions give equal observations and rewards. An interrupted rollout of such an
            environment continues where it stopped.
        tools: tools that the policy may call in place of writing an action, as JSON schemas or `rftcore.tools.Tool`; read after `reset`.
    """

    roles: tuple[str, ...] = ONE_ROLE
    deterministic: bool = False
    tools: Sequence[Any] = ()

    def reset(self, task: Any, seed: int) -> Observation | Awaitable[Observation]:
        """Begin the episode of a task; return the first observation. Called once.

        Args:
            task: the `rftcore.workflows.task.Task`.
            seed: equal for all rollouts of a group, so that they begin alike. In a process of its own, `random` and NumPy's global
                generator are seeded with it before the call.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define reset(task, seed)")

    def step(self, action: Any, role: str = "agent") -> Step | Awaitable[Step]:
        """Act; return what follows. Not called after the end of the episode.

        Args:
            action: text, or a `rftcore.tools.ToolCall` if the policy called one of the tools.
            role: the role that acts.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define step(action, role)")

    def close(self) -> Any:
        """Release resources. Called once, also after an error; nothing is expected of it by default."""
