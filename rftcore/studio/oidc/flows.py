"""Sign-ins that have begun: what the answer of the provider must fit to. Each is used once, within minutes, by the browser that began it."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import threading
import time
from dataclasses import dataclass, field

LIFE_S = 600.0
_MOST = 2000


def _secret() -> str:
    return secrets.token_urlsafe(32)


@dataclass(frozen=True)
class Flow:
    """A sign-in that has begun.

    Attributes:
        path: where the person wants to go.
        former: cookie of the session of this browser, which ends with the sign-in; the strict cookie does not come with the provider's answer.
        state: returned by the provider in the address.
        browser: secret in a cookie of the browser, so that no other browser can end this sign-in.
        nonce: returned by the provider in the token, so that no token of another sign-in fits.
        verifier: sent when the code is redeemed, so that nobody else can redeem it (PKCE).
    """

    path: str
    former: str | None = field(default=None, repr=False)
    state: str = field(default_factory=_secret)
    browser: str = field(default_factory=_secret)
    nonce: str = field(default_factory=_secret)
    verifier: str = field(default_factory=_secret)
    begun: float = field(default_factory=time.monotonic)

    @property
    def challenge(self) -> str:
        """The digest of the verifier that the provider is given first (RFC 7636, S256)."""
        digest = hashlib.sha256(self.verifier.encode()).digest()
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


class Flows:
    """All sign-ins that have begun; safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flows: dict[str, Flow] = {}  # the oldest first

    def begin(self, path: str, former: str | None = None) -> Flow:
        """Return a new one. Of more than two thousand, the oldest ends."""
        flow = Flow(path, former)
        with self._lock:
            self._flows[flow.state] = flow
            while len(self._flows) > _MOST:
                del self._flows[next(iter(self._flows))]
        return flow

    def end(self, state: str, browser: str) -> Flow | None:
        """Return the one of a state, which ends; None if it has ended or another browser has begun it."""
        with self._lock:
            flow = self._flows.get(state)
            if flow is None or not hmac.compare_digest(flow.browser.encode(), browser.encode()):
                return None
            del self._flows[state]
        return flow if time.monotonic() - flow.begun <= LIFE_S else None
