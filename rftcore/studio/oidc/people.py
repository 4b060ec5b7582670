"""Which account of the database a person works with, by the claims of a token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rftcore.studio.oidc.errors import UnknownPersonError
from rftcore.studio.oidc.settings import OidcSettings


@dataclass(frozen=True)
class Proof:
    """A proved identity: the account that belongs to it, and that account's password."""

    account: str
    password: str


def proof_of(claims: Mapping[str, Any], settings: OidcSettings) -> Proof:
    """Return the account of a person.

    Raises:
        UnknownPersonError: the person has none, the token does not have the claim, or the provider has not verified the address.
        ConfigError: the password of the account cannot be read.
    """
    person = claims.get(settings.claim)
    if not isinstance(person, str):
        raise UnknownPersonError(settings.claim, "")
    # Anybody may have entered an address that was not verified.
    if settings.claim == "email" and claims.get("email_verified") is not True:
        raise UnknownPersonError("email_verified", person)
    account = settings.accounts.get(person)
    if account is None:
        raise UnknownPersonError(settings.claim, person)
    return Proof(account, settings.password_of(account))
