"""Teacher behind an OpenAI-compatible server that returns log-probabilities of prompts: vLLM's `prompt_logprobs`.

A response is sent as tokens, with its prompt, as the prompt of a completion of one token. The server's log-probabilities are the model's
own (temperature 1).
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from operators.llm.endpoint import EndpointConfig
from operators.llm.server import Failure, Server
from rftcore.teachers.base import Teacher
from rftdata.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Digits, spaces, punctuation and several scripts: tokenizers that agree here, token by token, are the same for our purposes.
_PROBE = "The answer to 372 > 237 is: x_1 = 12.5%, naïve Ünïcode 東京 (été)\n\n\tdef f(x): return x**2"
_MAX_SHOWN = 300  # characters of an answer in an error


class EndpointTeacher(Teacher):
    """See the module header.

    Args:
        config: the server.

    Raises:
        PluginError, ConfigError: see `Server`.
    """

    def __init__(self, config: EndpointConfig) -> None:
        self._config = config
        self._server = Server(config)

    async def open(self, tokenizer: PreTrainedTokenizerBase) -> None:
        ours = list(tokenizer.encode(_PROBE, add_special_tokens=False))
        answer = await self._ask({"prompt": _PROBE, "add_special_tokens": False})
        if isinstance(answer, Failure):
            raise ConfigError(
                f"the teacher at {self._config.url} does not answer: {answer.error}",
                todo="correct explorer.teacher.endpoint",
            )
        # The first token of a text has no log-probability, so a server does not name it.
        theirs = [None if row is None else _tokens(row) for row in self._rows(answer)]
        # A server that adds a beginning-of-text token in spite of the request is as good.
        if len(theirs) < len(ours) or any(
            row is not None and token not in row for token, row in zip(reversed(ours), reversed(theirs), strict=False)
        ):
            raise ConfigError(
                f"the teacher at {self._config.url} has another tokenizer than the policy, so it cannot score the policy's tokens",
                value=self._config.model,
                todo="serve a model of the policy's family",
            )

    async def logprobs(self, token_ids: Sequence[list[int]], starts: Sequence[int]) -> list[list[float] | str]:
        return await asyncio.gather(*(self._score(ids, start) for ids, start in zip(token_ids, starts, strict=True)))

    async def close(self) -> None:
        await self._server.close()

    async def _score(self, token_ids: list[int], start: int) -> list[float] | str:
        answer = await self._ask({"prompt": token_ids})
        if isinstance(answer, Failure):
            return f"{answer.error} ({answer.tries} tries)" if answer.tries > 1 else answer.error
        rows = self._rows(answer)
        try:
            logprobs = [float(rows[t][str(token_ids[t])]["logprob"]) for t in range(start, len(token_ids))]
        except (LookupError, TypeError, ValueError) as error:
            return f"the server's log-probabilities are not those of the tokens ({type(error).__name__}: {error})"
        if not all(map(math.isfinite, logprobs)):
            return "a log-probability is not finite"
        return logprobs

    async def _ask(self, prompt: dict[str, Any]) -> str | Failure:
        body = {
            "model": self._config.model,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 0,
            **self._config.extra,
            **prompt,
        }
        return await self._server.persist(lambda: self._server.post("/completions", body))

    def _rows(self, answer: str) -> list[Any]:
        """Return what an answer contains for each token of the prompt.

        Raises:
            ConfigError: it contains no log-probabilities.
        """
        try:
            rows = json.loads(answer)["choices"][0]["prompt_logprobs"]
        except (ValueError, LookupError, TypeError):
            rows = None
        if not isinstance(rows, list):
            raise ConfigError(
                f"the server at {self._config.url} returns no log-probabilities of the prompt: {' '.join(answer.split())[:_MAX_SHOWN]}",
                allowed="a server that answers POST /completions with prompt_logprobs, as vLLM does",
                todo="serve the teacher with vLLM, or name its folder: explorer.teacher: {path: …}",
            )
        return rows


def _tokens(row: Any) -> set[int]:
    return {int(token) for token in row}
