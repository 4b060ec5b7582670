"""A session of the gateway for tests, over an engine that answers what a test gives it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI

from rftcore.engines.base import Decoding
from rftcore.gateway import Gateway, GatewaySession, SessionSettings
from rftcore.workflows.limits import NO_LIMITS, Limits
from rftcore.workflows.task import Model
from tests.support.chat_tokenizers import chat_tokenizer
from tests.unit.workflows.test_session import Spy


@dataclass(frozen=True)
class Endpoint:
    spy: Spy
    model: Model
    gateway: Gateway
    session: GatewaySession
    url: str
    client: AsyncOpenAI


@asynccontextmanager
async def endpoint(
    *answers: str,
    template: str | None = "qwen2_5",
    limits: Limits = NO_LIMITS,
    spy: Spy | None = None,
    **settings: Any,
) -> AsyncIterator[Endpoint]:
    spy = spy or Spy(chat_tokenizer(template))
    spy.will_answer(*answers)
    model = Model(spy, Decoding(), limits=limits)
    gateway, session = Gateway(), GatewaySession(model, SessionSettings(**settings))
    url = gateway.open(session)
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield Endpoint(spy, model, gateway, session, url, client)
    await gateway.close()
