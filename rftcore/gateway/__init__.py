"""The gateway: an OpenAI-compatible endpoint in the explorer's event loop, through which programs in other processes call the model of a rollout.

A rollout opens a session, whose base URL contains a key that cannot be guessed. A request of the session is a call of the rollout's `model.chat`, so
the chats of any program are recorded token for token, under the limits of the rollout. Nothing that a request states is ignored in silence: what the
endpoint cannot do is refused with the name of the field.
"""

from __future__ import annotations

from rftcore.gateway.server import Gateway
from rftcore.gateway.session import GatewaySession, SessionSettings

__all__ = ["Gateway", "GatewaySession", "SessionSettings"]
