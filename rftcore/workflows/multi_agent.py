"""Workflow in which several roles act in one environment: players of a game, parties of a dialogue.

Each role has a chat of its own with its own system message. It reads the observations before its moves and its own answers, and nothing of the other
roles but what the environment tells. The policy plays all roles, except those of `opponents`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rftcore.environments import check_environment, folder_of_rollout, open_environment
from rftcore.environments.base import ONE_ROLE, Observation, Step
from rftcore.environments.handle import EnvironmentHandle
from rftcore.workflows.chat_encoding import Message
from rftcore.workflows.environment import action_of
from rftcore.workflows.environment import check_args as check_environment_args
from rftcore.workflows.limits import LimitReachedError
from rftcore.workflows.task import Model, Score, Scorer, Task, Turn
from rftdata.errors import ConfigError, RftError
from rftdata.plugins import Registry

Opponent = Callable[[Observation, list[Message], Task], str | Awaitable[str]]
"""Returns the action of a role: of its observation, its chat so far (the observation is the last message), and the task."""

OPPONENTS = Registry[Opponent]("opponent", {})


async def multi_agent(
    task: Task,
    model: Model,
    score: Scorer,
    *,
    environment: str,
    environment_args: Mapping[str, Any] | None = None,
    system: str | Mapping[str, str] | None = None,
    opponents: Mapping[str, str | Mapping[str, str]] | None = None,
    train_roles: Sequence[str] | None = None,
    action: str = "text",
    pattern: str | None = None,
) -> Score:
    """Play one episode. A role's reward is the sum of its rewards in the environment and of the reward functions on its last turn.

    The rollout's reward is that of the first trained role, in the environment's order. Its parts are the rewards of the environment by role, and those of the
    functions as ROLE.NAME. Each turn of the policy records the environment's state before it, if there is one, and the rewards that its role got until
    its next turn. An episode that a limit ends, or a role whose chat has no room in the context, keeps the rewards so far.

    Args:
        environment, environment_args, action, pattern: as for the workflow `environment`.
        system: system message; {role} stands for the role's name. A mapping has one for each role; roles without one have none.
        opponents: what plays roles in place of the policy: the path of a function `f(observation, chat, task) -> str`, plain (it runs in a thread) or
            async; or {model: NAME}, a model of `explorer.models`.
        train_roles: roles that are trained; by default all that the policy plays. The answers of the others are stored with the loss mask 0.
    """
    async with open_environment(environment, environment_args or {}) as opened:
        played = _Roles.of(opened, opponents or {}, train_roles)
        game = _Game(task, model, opened, played, system, lambda answer: action_of(answer, action, pattern))
        try:
            await game.play()
        except LimitReachedError:
            if not model.turns:
                raise
    return await game.score(score)


def check_args(
    base_dir: Path,
    *,
    environment: str,
    environment_args: Mapping[str, Any] | None = None,
    system: str | Mapping[str, str] | None = None,
    opponents: Mapping[str, str | Mapping[str, str]] | None = None,
    train_roles: Sequence[str] | None = None,
    action: str = "text",
    pattern: str | None = None,
) -> None:
    """Refuse settings with which every rollout would fail.

    Raises:
        ConfigError, PluginError: the reason.
    """
    check_environment_args(
        base_dir, environment=environment, environment_args=environment_args, action=action, pattern=pattern
    )
    for role, chosen in (opponents or {}).items():
        _checked_opponent(role, chosen, base_dir)
    roles = tuple(check_environment(environment, environment_args or {}, base_dir).roles)
    if roles == ONE_ROLE:  # an environment may set its roles in its constructor
        return
    _check_roles(roles, opponents or {}, train_roles)
    if isinstance(system, Mapping):
        _refuse_unknown("system", system, roles)


multi_agent.check_args = check_args  # type: ignore[attr-defined]  # functions declare no attributes


@dataclass(frozen=True)
class _Roles:
    """Who plays the roles of an environment.

    Attributes:
        opponents: by role, functions or names of models.
        trained: roles whose answers are trained, in the environment's order.
    """

    opponents: Mapping[str, Opponent | str]
    trained: tuple[str, ...]

    @classmethod
    def of(
        cls,
        opened: EnvironmentHandle,
        opponents: Mapping[str, str | Mapping[str, str]],
        train_roles: Sequence[str] | None,
    ) -> _Roles:
        _check_roles(opened.roles, opponents, train_roles)
        trained = tuple(
            role for role in opened.roles if role not in opponents and (train_roles is None or role in train_roles)
        )
        base_dir = folder_of_rollout()
        return cls({role: _checked_opponent(role, each, base_dir) for role, each in opponents.items()}, trained)


@dataclass
class _Side:
    """One role during an episode.

    Attributes:
        chat: its messages.
        turn, state: its latest turn of the policy, and the state before it; None before the first.
        since_turn: its rewards since that turn.
        total: all its rewards.
        is_open: whether rewards may still be added to the turn.
    """

    chat: list[Message]
    turn: Turn | None = None
    state: str | None = None
    since_turn: float = 0.0
    total: float = 0.0
    is_open: bool = False

    def begin_turn(self, turn: Turn, state: str | None) -> None:
        self.turn, self.state, self.since_turn, self.is_open = turn, state, 0.0, True

    def add(self, reward: float) -> None:
        self.since_turn += reward
        self.total += reward

    def end_turn(self) -> None:
        """Record the latest turn with the rewards until now."""
        if self.turn is not None and self.is_open:
            self.turn.record(state=self.state, step_reward=self.since_turn)
        self.is_open = False


@dataclass
class _Game:
    """An episode."""

    task: Task
    model: Model
    opened: EnvironmentHandle
    roles: _Roles
    system: str | Mapping[str, str] | None
    action_of: Callable[[str], str]
    sides: dict[str, _Side] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sides = {role: _Side(self._beginning(role)) for role in self.opened.roles}

    async def play(self) -> None:
        """Play to the end."""
        seen = await self.opened.reset(self.task, self.task.seed)
        role, state = seen.role, seen.state
        while True:
            step = await self.opened.step(await self._action(role, seen, state), role)
            for each, reward in step.rewards_by_role(role).items():
                self.sides[each].add(reward)
            if step.ended:
                return
            role, seen, state = _next(step)

    async def _action(self, role: str, seen: Observation, state: str | None) -> str:
        side = self.sides[role]
        side.chat.append({"role": "user", "content": seen.text})
        opponent = self.roles.opponents.get(role)
        if opponent is not None:
            if isinstance(opponent, str):
                answer = await self.model.other(opponent).chat(side.chat)
                action = self.action_of(answer)
            else:
                answer = action = await _asked(opponent, seen, side.chat, self.task)
            side.chat.append({"role": "assistant", "content": answer})
            return action
        turn = await self.model.chat(side.chat, role=role, train=role in self.roles.trained)
        side.end_turn()  # after the answer: a limit may end the rollout here
        side.begin_turn(turn, state)
        side.chat.append(turn.message)
        return self.action_of(turn.response)

    async def score(self, score: Scorer) -> Score:
        """Return the rewards of the roles that the policy plays, and record those of their last turns."""
        if not self.model.turns:
            raise RftError(f"the environment {self.opened.name!r} ended before the first answer of the policy")
        by_role, parts = dict[str, float](), dict[str, float]()
        for role, side in self.sides.items():
            parts[role] = side.total
            if role in self.roles.opponents:
                continue
            if side.turn is not None and role in self.roles.trained:
                judged = await score(side.turn, self.task)
                side.add(judged.reward)
                parts |= {f"{role}.{name}": value for name, value in judged.parts.items()}
            side.end_turn()
            by_role[role] = side.total
        first = self.roles.trained[0]
        return Score(by_role[first], parts, by_role)

    def _beginning(self, role: str) -> list[Message]:
        text = self.system.get(role) if isinstance(self.system, Mapping) else self.system
        return [] if text is None else [{"role": "system", "content": text.replace("{role}", role)}]


def _next(step: Step) -> tuple[str, Observation, str | None]:
    seen = step.observation
    return step.next_role or seen.role, seen, step.state or seen.state


async def _asked(opponent: Opponent, seen: Observation, chat: list[Message], task: Task) -> str:
    """Return the action of an opponent.

    Raises:
        RftError: it is not a text.
    """
    if inspect.iscoroutinefunction(opponent):
        action = await opponent(seen, list(chat), task)
    else:
        action = await asyncio.to_thread(opponent, seen, list(chat), task)
    if not isinstance(action, str):
        raise RftError(
            "an opponent returned no action", value=type(action).__name__, allowed="a text", todo="correct the function"
        )
    return action


def _checked_opponent(role: str, chosen: object, base_dir: Path) -> Opponent | str:
    """Return a function, or the name of a model.

    Raises:
        ConfigError: it is neither.
        PluginError: the function does not load.
    """
    if isinstance(chosen, str):
        return OPPONENTS.load(chosen, base_dir)
    if isinstance(chosen, Mapping) and list(chosen) == ["model"]:
        return str(chosen["model"])
    raise ConfigError(
        f"workflow_args.opponents: {role} has no opponent",
        value=chosen,
        allowed="the path of a function, or {model: NAME} with a name of explorer.models",
    )


def _check_roles(roles: Sequence[str], opponents: Mapping[str, Any], train_roles: Sequence[str] | None) -> None:
    """Refuse names that are no roles, and settings in which no role is trained.

    Raises:
        ConfigError: the reason.
    """
    _refuse_unknown("opponents", opponents, roles)
    _refuse_unknown("train_roles", train_roles or (), roles)
    free = [role for role in roles if role not in opponents]
    trained = free if train_roles is None else [role for role in train_roles if role in free]
    if not trained:
        raise ConfigError(
            "workflow_args: the policy plays no role that is trained",
            value={"opponents": sorted(opponents), "train_roles": None if train_roles is None else list(train_roles)},
            allowed=f"at least one of {', '.join(roles)} without an opponent, and in train_roles if that is given",
        )


def _refuse_unknown(key: str, names: Sequence[str] | Mapping[str, Any], roles: Sequence[str]) -> None:
    unknown = [name for name in names if name not in roles]
    if unknown:
        raise ConfigError(
            f"workflow_args.{key} names a role that the environment does not have",
            value=unknown[0],
            allowed=", ".join(roles),
            todo="correct the name",
        )
