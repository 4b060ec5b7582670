"""Games of textarena: one player, or several, each of whom is a role.

A player reads what has happened since its last turn, except its own actions, which its chat has already. Its answer is the action, which most
games expect in brackets, such as `[4]`; the game's own prompt says so. An invalid move is an observation, and a second one in a row loses the
game, as textarena counts.

Some games read word lists that NLTK downloads when they are imported.
"""

from __future__ import annotations

from typing import Any

import textarena

from rftcore.environments.base import ONE_ROLE, Environment, Observation, Step
from rftdata.config_errors import did_you_mean
from rftdata.errors import ConfigError

_RAW = "-raw"


class TextArena(Environment):
    """A game. With one player the role is `agent`, with several `player_0`, `player_1` and so on.

    The reward of a player comes at the end of the game: 1 for a win, -1 for a loss, 0 for a draw, in most games.

    Args:
        game: the id in textarena, such as `TicTacToe-v0`.
        num_players: of the game.
        arguments: of the game's constructor.
    """

    def __init__(self, game: str, num_players: int = 2, **arguments: Any) -> None:
        if num_players < 1:
            raise ConfigError("environment_args: num_players", value=num_players, allowed="1 or more")
        self._num_players = num_players
        self.roles = ONE_ROLE if num_players == 1 else tuple(f"player_{player}" for player in range(num_players))
        known = textarena.envs.registration.ENV_REGISTRY
        if game not in known:
            names = [name for name in known if not name.endswith(_RAW)]
            raise ConfigError(
                f"environment_args: textarena {textarena.__version__} has no game of this id",
                value=game,
                todo=did_you_mean(
                    game, names, "`python -c 'import textarena as t; t.pprint_registry_detailed()'` lists them"
                ),
            )
        # Wrappers repeat the whole history in each observation; a chat has it already.
        self._game = textarena.make(
            game if game.endswith(_RAW) or game + _RAW not in known else game + _RAW, **arguments
        )

    def reset(self, task: Any, seed: int) -> Observation:
        self._game.reset(num_players=self._num_players, seed=seed)
        return self._next()

    def step(self, action: Any, role: str = "agent") -> Step:
        player = self.roles.index(role)
        if player != self._game.state.current_player_id:
            raise ValueError(f"it is the turn of {self.roles[self._game.state.current_player_id]}, not of {role}")
        done, info = self._game.step(action=str(action))
        if not done:
            return Step(self._next(), info=_texts(info))
        rewards, facts = self._game.close()
        by_role = {self.roles[one]: float(reward) for one, reward in (rewards or {}).items()}
        return Step(self._next(), terminated=True, rewards=by_role, info=_texts({**info, **facts.get(player, {})}))

    def _next(self) -> Observation:
        """Return what the player on turn reads."""
        player, messages = self._game.get_observation()
        if isinstance(messages, str):
            text = messages
        else:
            text = "\n\n".join(self._text(sender, message) for sender, message, _ in messages if sender != player)
        return Observation(text, self.roles[player], self._state(player))

    def _text(self, sender: int, message: str) -> str:
        if sender == textarena.GAME_ID:
            return message.strip()
        return f"{self._game.state.role_mapping.get(sender, f'Player {sender}')}: {message.strip()}"

    def _state(self, player: int) -> str | None:
        state = repr(self._game.state.game_state)
        return None if " at 0x" in state else f"{player} {state}"


def _texts(info: dict[str, Any]) -> dict[str, Any]:
    return {
        str(key): value if isinstance(value, int | float | str) or value is None else str(value)
        for key, value in info.items()
    }
