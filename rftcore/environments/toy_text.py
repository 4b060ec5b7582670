"""Gymnasium's toy-text games as text: FrozenLake, Taxi, CliffWalking and Blackjack.

An action is a word within the answer. An answer with none of the words, or several, changes nothing: the observation repeats the words, and the
step counts. So every episode ends after `max_steps` answers.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import Any, ClassVar

import gymnasium
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

from rftcore.environments.base import Environment, Observation, Step
from rftdata.errors import ConfigError

_TAXI_STOPS = ("R", "G", "Y", "B", "the taxi")


class ToyText(Environment):
    """Base of the games.

    Args:
        max_steps: answers after which an episode is truncated.
        arguments: of `gymnasium.make`.
    """

    deterministic = True
    game: ClassVar[str]
    words: ClassVar[tuple[str, ...]]
    """The actions, in the order of their numbers."""

    def __init__(self, max_steps: int = 100, **arguments: Any) -> None:
        if max_steps < 1:
            raise ConfigError(f"environment_args: max_steps of {self.game}", value=max_steps, allowed="1 or more")
        self.max_steps, self._arguments = max_steps, arguments
        self._num_steps = 0
        self._game: Any = None
        self._pattern = re.compile(rf"\b({'|'.join(self.words)})\b", re.IGNORECASE)

    def reset(self, task: Any, seed: int) -> Observation:
        """Begin an episode. The task's metadata may contain `environment_args`, which replace those of the configuration."""
        own = getattr(task, "metadata", {}).get("environment_args") or {}
        self._game = gymnasium.make(
            self.game, max_episode_steps=-1, **self._made_with({**self._arguments, **own}, seed)
        )
        self._seen, _ = self._game.reset(seed=seed)
        board = self.board()
        return Observation(f"{self.rules()}\n\n{board}", state=board)

    def step(self, action: Any, role: str = "agent") -> Step:
        self._num_steps += 1
        found = {word.lower() for word in self._pattern.findall(str(action))}
        ended, reward = False, 0.0
        if len(found) == 1:
            self._seen, reward, ended, _, _ = self._game.step(self.words.index(found.pop()))
            text = self.board()
        else:
            text = f"Answer with one of the words {', '.join(self.words)}.\n\n{self.board()}"
        truncated = not ended and self._num_steps >= self.max_steps
        return Step(Observation(text, state=self.board()), float(reward), bool(ended), truncated)

    def close(self) -> None:
        if self._game is not None:
            self._game.close()

    def _made_with(self, arguments: dict[str, Any], seed: int) -> dict[str, Any]:
        """Return the arguments of `gymnasium.make`."""
        return arguments

    @abstractmethod
    def rules(self) -> str:
        """Return what the player must know, with the words."""

    @abstractmethod
    def board(self) -> str:
        """Return the state as text."""


class FrozenLake(ToyText):
    """Walk over a frozen lake to the goal, without falling into a hole. Reward 1 at the goal.

    Args:
        size: of a random lake, another for each group; None: gymnasium's own lake of 4 by 4.
        p: probability of ice in each place of a random lake.
        slippery: whether the walker slides to the side in two of three moves.
        desc: the lake as lines of S (start), F (ice), H (hole) and G (goal).
    """

    game = "FrozenLake-v1"
    words = ("left", "down", "right", "up")

    def __init__(
        self,
        size: int | None = None,
        p: float = 0.8,
        slippery: bool = False,
        desc: list[str] | None = None,
        max_steps: int = 100,
    ) -> None:
        super().__init__(max_steps, size=size, p=p, slippery=slippery, desc=desc)

    def _made_with(self, arguments: dict[str, Any], seed: int) -> dict[str, Any]:
        size, desc = arguments["size"], arguments["desc"]
        if size is not None and size < 2:
            raise ConfigError("environment_args: size of a frozen lake", value=size, allowed="2 or more")
        if desc is None and size is not None:
            desc = generate_random_map(size, arguments["p"], seed)
        return {"desc": desc, "is_slippery": arguments["slippery"]}

    def rules(self) -> str:
        slides = " The ice is slippery: you may slide to the side." if self._game.spec.kwargs["is_slippery"] else ""
        return (
            "Walk over the frozen lake to the goal G. F is ice, H is a hole, in which the game ends, S is the start, and @ is you."
            f"{slides} Answer with one word: left, down, right or up."
        )

    def board(self) -> str:
        lake = [[cell.decode() for cell in row] for row in self._game.unwrapped.desc]
        row, column = divmod(int(self._seen), len(lake[0]))
        lake[row][column] = "@"
        return "\n".join("".join(cells) for cells in lake)


class CliffWalking(ToyText):
    """Walk along a cliff to the goal. Reward -1 per move, and -100 for a fall, which leads back to the start."""

    game = "CliffWalking-v1"
    words = ("up", "right", "down", "left")

    def rules(self) -> str:
        return (
            "Walk to the goal G in as few moves as possible. C is the cliff: a step into it costs 100 and leads back to the start. @ is you, and . is free."
            " Answer with one word: up, right, down or left."
        )

    def board(self) -> str:
        rows, columns = self._game.unwrapped.shape
        place = divmod(int(self._seen), columns)

        def sign(row: int, column: int) -> str:
            if (row, column) == place:
                return "@"
            if row < rows - 1 or column == 0:
                return "."
            return "G" if column == columns - 1 else "C"

        return "\n".join("".join(sign(row, column) for column in range(columns)) for row in range(rows))


class Taxi(ToyText):
    """Fetch a passenger and take them to their destination. Reward 20 for that, -1 per move, -10 for a wrong pickup or dropoff."""

    game = "Taxi-v4"
    words = ("south", "north", "east", "west", "pickup", "dropoff")

    def rules(self) -> str:
        return (
            "You drive a taxi, @ on the map. Fetch the passenger and take them to the destination; R, G, Y and B are stops, and | is a wall."
            " Each move costs 1, a wrong pickup or dropoff 10. Answer with one word: south, north, east, west, pickup or dropoff."
        )

    def board(self) -> str:
        taxi = self._game.unwrapped
        row, column, passenger, destination = taxi.decode(int(self._seen))
        lines = [[sign.decode() for sign in line] for line in taxi.desc]
        lines[1 + row][1 + 2 * column] = "@"
        drawn = "\n".join("".join(line) for line in lines)
        return f"{drawn}\nThe passenger is at {_TAXI_STOPS[passenger]}, the destination is {_TAXI_STOPS[destination]}."


class Blackjack(ToyText):
    """Draw cards up to 21, closer to it than the dealer. Reward 1 for a win, -1 for a loss."""

    game = "Blackjack-v1"
    words = ("stick", "hit")

    def rules(self) -> str:
        return "Blackjack: come closer to 21 than the dealer, but not above it. Answer with one word: hit for another card, stick to stop."

    def board(self) -> str:
        total, shown, usable = self._seen
        ace = ", with an ace that counts 11" if usable else ""
        return f"Your cards count {total}{ace}. The dealer shows {shown}."
