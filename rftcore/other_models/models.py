"""Models that a workflow asks besides the policy: a user simulator, a judge, an opponent. They are not trained, and their answers are not recorded as turns.

An explorer opens a model with the first question to it, and all its rollouts share the connections. Temporary failures are retried by the client; a model
that does not answer is a failure of the infrastructure, with which the rollout is tried again. A used-up budget ends the run, because no further rollout
could ask.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from operators.llm.endpoint import Chat, Meter, Sampling
from rftcore.failures import InfrastructureError
from rftcore.other_models.config import OtherModelConfig
from rftcore.rollout_clock import clock_suspended
from rftdata.errors import ConfigError
from rftdata.pipeline.budget import MemoryUsage, UsageLedger

if TYPE_CHECKING:
    from operators.llm.openai import OpenAIEndpoint


class OtherModel:
    """One model.

    Args:
        name: in the configuration.
        usage: counts what it spends, under `explorer.models.NAME`.
    """

    def __init__(self, name: str, config: OtherModelConfig, usage: UsageLedger) -> None:
        self._name, self._config, self._usage = name, config, usage
        self._lock = threading.Lock()
        self._endpoint: OpenAIEndpoint | None = None

    async def chat(self, messages: list[dict[str, Any]]) -> str:
        """Return the answer to a chat. The time that it takes does not count as time of the rollout.

        Raises:
            InfrastructureError: the model does not answer, even after retries.
            ConfigError, PluginError: it cannot be opened, or its budget is used up.
        """
        chat = Chat(copy.deepcopy(messages))
        with clock_suspended():
            endpoint = await asyncio.to_thread(self._opened)
            reply = await endpoint.reply(chat)
        if reply.over_budget:
            raise ConfigError(
                f"the workflow cannot ask the model {self._name!r} any more: {reply.error}",
                todo=f"raise explorer.models.{self._name}.budget, and resume the run",
            )
        if reply.error is not None:
            raise InfrastructureError(f"the model {self._name!r} of explorer.models does not answer: {reply.error}")
        return reply.text

    def _opened(self) -> OpenAIEndpoint:
        from operators.llm.openai import OpenAIEndpoint

        with self._lock:
            if self._endpoint is None:
                config = self._config
                meter = Meter(f"explorer.models.{self._name}", config.budget, self._usage, config.max_tokens)
                sampling = Sampling(config.max_tokens, config.temperature, config.seed)
                self._endpoint = OpenAIEndpoint(config.endpoint, sampling, meter)
            return self._endpoint

    def close(self) -> None:
        """Close the connections. The next question opens them again."""
        with self._lock:
            if self._endpoint is not None:
                self._endpoint.close()
                self._endpoint = None


class OtherModels:
    """The models of `explorer.models`, by name.

    Args:
        usage: counts what they spend; in this process without it.
    """

    def __init__(self, configs: Mapping[str, OtherModelConfig], usage: UsageLedger | None = None) -> None:
        ledger = usage or MemoryUsage()
        self._models = {name: OtherModel(name, config, ledger) for name, config in configs.items()}

    def __getitem__(self, name: str) -> OtherModel:
        """Return a model.

        Raises:
            ConfigError: there is none of this name.
        """
        if name not in self._models:
            raise ConfigError(
                "the workflow asks a model that explorer.models does not have",
                value=name,
                allowed=", ".join(self._models) or "none: explorer.models is empty",
                todo=f"add it: explorer.models: {{{name}: {{endpoint: {{url: …, model: …}}}}}}",
            )
        return self._models[name]

    def close(self) -> None:
        """Close all connections."""
        for model in self._models.values():
            model.close()


NO_MODELS = OtherModels({})
