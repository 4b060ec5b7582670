"""Why a sign-in by a provider fails."""

from __future__ import annotations

from rftdata.errors import RftError


class ProviderError(RftError):
    """The provider does not answer, or not as OpenID Connect requires."""


class RefusedIdentityError(RftError):
    """The provider refused the sign-in, or its token is not accepted. The message has no part of the token."""


class UnknownPersonError(RftError):
    """The provider knows a person, and the studio has no account for them.

    Attributes:
        person: the value of the claim.
    """

    def __init__(self, claim: str, person: str) -> None:
        super().__init__("the person has no account here", value=person)
        self.claim, self.person = claim, person
