"""Who has signed in, with connections of their own.

A session belongs to one account of the database and holds that account's connections, so the database itself decides what a page can do, and
records the account with everything that is written. A password is kept in the memory of this process, inside the connections, and
nowhere else. Sessions end with the process, after 12 hours without a request, when the person signs out, and when the browser signs in again.

The run must never wait for the pages, so all sessions together use at most half of the server's connections: an account has few sessions;
the one that was unused the longest ends for another. And a session has two connections, which are open only while it is used.

Three ways lead to a session: the one-time address that a personal studio prints, the name and password of an account, and an identity that a provider of OpenID
Connect has proved (`rftcore.studio.oidc`). The last one ends after 12 hours in any case, since the provider may have removed the person.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import math
import secrets
import threading
import time
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from rftcore.studio.oidc.people import Proof
from rftdata.buffer import Buffer
from rftdata.connection import CONNECTIONS_OF_ACCOUNT, open_as
from rftdata.errors import BufferUnavailableError, RftError

IDLE_S = 12 * 3600.0
PROVED_S = 12 * 3600.0
MAX_OF_ACCOUNT = 8
# After so long without a request, a session ends if another one needs its place.
REPLACEABLE_S = 900.0
# A person waits for a page. After this, it says that the database is unavailable, and tries again.
PATIENCE_S = 2.0


class SignInError(RftError):
    """A sign-in is refused. The message does not tell whether the name or the password is wrong."""


class WrongPasswordError(SignInError):
    """The database refuses an account with its password."""


class NoConnectionError(SignInError):
    """The database has no free connection for the account, so the password was not checked."""


@dataclass
class Session:
    """A person at a browser.

    Attributes:
        cookie: secret that identifies the session; only in the cookie.
        write_token: secret that writes must carry; only in pages.
        identity: of buffer, account and author. Pages keep what they have not sent under it, and every write names it.
        author: author of what the person writes.
        account: the account of the database.
        buffer: the buffer, with connections of the account.
        may_label: whether the account may set rewards.
        is_owner: whether the person started the studio.
        ends: when it ends although it is used, on the monotonic clock.
    """

    author: str
    account: str
    buffer: Buffer
    may_label: bool
    is_owner: bool
    identity: str
    cookie: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    write_token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    last_used: float = field(default_factory=time.monotonic)
    ends: float = math.inf

    def has_ended(self, now: float) -> bool:
        """Return whether its time is over."""
        return now - self.last_used > IDLE_S or now > self.ends


def _identity(buffer_id: UUID, account: str, author: str) -> str:
    return hashlib.sha256(f"{buffer_id}\0{account}\0{author}".encode()).hexdigest()[:24]


class Sessions:
    """All sessions of a studio; safe for threads.

    Args:
        buffer: the buffer as the person who started the studio opened it.
        owner: author of what that person writes.
        is_personal: whether one-time addresses exist.
    """

    def __init__(self, buffer: Buffer, owner: str, *, is_personal: bool) -> None:
        self._buffer, self._owner, self._is_personal = buffer, owner, is_personal
        self._lock = threading.Lock()
        self._sessions: dict[str, Session] = {}
        self._one_time: set[str] = set()
        room = self._room(owner)
        self._buffer_id: UUID = room["buffer_id"]
        self._most: int = room["num_connections"] // 2 // CONNECTIONS_OF_ACCOUNT

    @property
    def studio_buffer(self) -> Buffer:
        """The buffer as the person who started the studio opened it."""
        return self._buffer

    def one_time_token(self) -> str | None:
        """Return a new token that signs in the owner once; None if the studio is not personal."""
        if not self._is_personal:
            return None
        token = secrets.token_urlsafe(32)
        with self._lock:
            self._one_time.add(token)
        return token

    def redeem(self, token: str, former: Session | None = None) -> Session | None:
        """Return a session of the owner for a one-time token, which ends with it; None if there is no such token.

        Args:
            former: the session of this browser, which ends.
        """
        with self._lock:
            found = next((each for each in self._one_time if hmac.compare_digest(each.encode(), token.encode())), None)
            if found is None:
                return None
            self._one_time.discard(found)
        return self._begin(self._owner, self._buffer, former, is_owner=True)

    def sign_in_by_provider(self, proof: Proof, former: Session | None = None) -> Session:
        """Return a session for an identity that a provider has proved.

        Args:
            former: the session of this browser, which ends.

        Raises:
            see `sign_in`.
        """
        session = self.sign_in(proof.account, proof.password, former)
        session.ends = time.monotonic() + PROVED_S
        return session

    def sign_in(self, account: str, password: str, former: Session | None = None) -> Session:
        """Return a session for the name and the password of an account of the database.

        Args:
            former: the session of this browser, which ends.

        Raises:
            NoConnectionError: the database has no free connection.
            WrongPasswordError: the database refuses them.
            SignInError: the account may not read the buffer, or too many people have signed in.
            BufferUnavailableError: the database does not answer.
        """
        try:
            buffer = open_as(self._buffer, account, password, application="rft studio", patience_s=PATIENCE_S)
        except BufferUnavailableError:
            # The database answers others, so it has refused this account.
            if self._room(account)["is_full"]:
                raise NoConnectionError("the database has no free connection") from None
            raise WrongPasswordError("the name or the password is wrong") from None
        try:
            return self._begin(account, buffer, former, is_owner=False)
        except BaseException:
            buffer.close()
            raise

    def _room(self, account: str) -> dict[str, Any]:
        return self._buffer.database.fetch("studio_room", account=account)[0]

    def _begin(self, author: str, buffer: Buffer, former: Session | None, *, is_owner: bool) -> Session:
        rights = buffer.database.fetch("studio_rights")[0]
        if not rights["may_read"]:
            raise SignInError(
                f"the account {rights['account']} may not read the buffer",
                todo=f"its owner allows it: GRANT rft_labeler TO {rights['account']}",
            )
        identity = _identity(self._buffer_id, rights["account"], author)
        session = Session(author, rights["account"], buffer, rights["may_label"], is_owner, identity)
        with self._lock:
            ended = self._make_room(session, former)
            is_full = len(self._sessions) >= self._most
            if not is_full:
                self._sessions[session.cookie] = session
        self._close(ended)
        if is_full:
            raise SignInError(
                "too many people have signed in", value=self._most, todo="let a person who has finished sign out"
            )
        return session

    def find(self, cookie: str | None) -> Session | None:
        """Return the session of a cookie; None if it has ended."""
        now = time.monotonic()
        with self._lock:
            session = self._sessions.get(cookie or "")
            if session is None or session.has_ended(now):
                return None
            session.last_used = now
            return session

    def end(self, session: Session) -> None:
        """Sign out."""
        with self._lock:
            self._sessions.pop(session.cookie, None)
        self._close([session])

    def close(self) -> None:
        """End all sessions."""
        with self._lock:
            sessions = list(self._sessions.values())
            self._sessions.clear()
        self._close(sessions)

    def _make_room(self, new: Session, former: Session | None) -> list[Session]:
        """Remove and return the sessions that end when another one begins."""
        now = time.monotonic()
        by_use = sorted(self._sessions.values(), key=lambda session: session.last_used)
        ended = [session for session in by_use if session is former or session.has_ended(now)]
        left = [session for session in by_use if session not in ended]
        own = [session for session in left if session.account == new.account]
        ended += own[: max(0, len(own) + 1 - MAX_OF_ACCOUNT)]
        if len(by_use) - len(ended) >= self._most:
            replaceable = (
                session for session in left if session not in ended and now - session.last_used > REPLACEABLE_S
            )
            ended += itertools.islice(replaceable, 1)
        for session in ended:
            del self._sessions[session.cookie]
        return ended

    def _close(self, sessions: list[Session]) -> None:
        for session in sessions:
            if not session.is_owner:
                session.buffer.close()
