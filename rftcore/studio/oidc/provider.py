"""The provider: where it is, its keys, and the tokens that it signs.

A token is accepted if all of this holds (OpenID Connect Core 1.0, 3.1.3.7): a key of the provider has signed it with an asymmetric algorithm; it names
this issuer and this client; it has not expired; and its nonce is that of the sign-in. Keys come from the provider's own address alone, never from a token.
"""

from __future__ import annotations

import hmac
import json
import math
import threading
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

import httpx
import jwt

from rftcore.studio.oidc.errors import ProviderError, RefusedIdentityError
from rftcore.studio.oidc.flows import Flow
from rftcore.studio.oidc.settings import OidcSettings, may_be_asked

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
_ASK_S = 10.0
_KEEP_S = 3600.0
# A token with an unknown key makes the studio ask for the keys again, but not more often.
_ASK_AGAIN_S = 10.0
_MOST_BYTES = 2**20
_LEEWAY_S = 60


class Provider:
    """A provider; safe for threads.

    Args:
        client_secret: None for a public client.
    """

    def __init__(self, settings: OidcSettings, client_secret: str | None) -> None:
        self._settings, self._secret = settings, client_secret
        self._client = httpx.Client(timeout=_ASK_S, follow_redirects=False, headers={"Accept": "application/json"})
        self._lock = threading.Lock()
        self._metadata: dict[str, Any] = {}
        self._metadata_until = 0.0
        self._keys: list[dict[str, Any]] = []
        self._asking = threading.Lock()  # one asks for keys, and others wait for its answer
        self._keys_asked = -math.inf
        self._no_keys: tuple[float, ProviderError] | None = None

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def address(self, flow: Flow, redirect_uri: str) -> str:
        """Return the address at the provider at which a person signs in.

        Raises:
            ProviderError: see there.
        """
        asked = {
            "response_type": "code",
            "client_id": self._settings.client_id,
            "redirect_uri": redirect_uri,
            "scope": " ".join(self._settings.scopes),
            "state": flow.state,
            "nonce": flow.nonce,
            "code_challenge": flow.challenge,
            "code_challenge_method": "S256",
        }
        endpoint = self._endpoint("authorization_endpoint")
        return f"{endpoint}{'&' if '?' in endpoint else '?'}{urlencode(asked)}"

    def claims(self, flow: Flow, code: str, redirect_uri: str) -> Mapping[str, Any]:
        """Redeem a code; return the claims of the token for it, checked.

        Raises:
            ProviderError, RefusedIdentityError: see there.
        """
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": redirect_uri,
            "client_id": self._settings.client_id,
            "code_verifier": flow.verifier,
        }
        auth: tuple[str, str] | None = None
        if self._secret is not None:
            methods = self._known().get("token_endpoint_auth_methods_supported", ["client_secret_basic"])
            if "client_secret_basic" in methods:
                auth = (quote(self._settings.client_id, safe=""), quote(self._secret, safe=""))  # RFC 6749, 2.3.1
            else:
                form["client_secret"] = self._secret
        answer = self._ask("POST", self._endpoint("token_endpoint"), form, auth)
        token = answer.get("id_token")
        if not isinstance(token, str):
            raise ProviderError("the identity provider has sent no token")
        return self._checked(token, flow.nonce)

    def check_issuer(self, issuer: str | None) -> None:
        """Refuse an answer that another provider has sent (RFC 9207).

        Raises:
            RefusedIdentityError: it names another issuer, or none although this provider always does.
        """
        is_named = bool(self._known().get("authorization_response_iss_parameter_supported"))
        if issuer != self._settings.issuer and (issuer is not None or is_named):
            raise RefusedIdentityError("the answer is of another issuer")

    def _checked(self, token: str, nonce: str) -> Mapping[str, Any]:
        try:
            header = jwt.get_unverified_header(token)
            algorithm = header.get("alg")
            if algorithm not in ALGORITHMS:
                raise RefusedIdentityError("the token is not signed with an asymmetric algorithm")
            if "crit" in header:
                raise RefusedIdentityError("the token has extensions that the studio does not know")
            claims: dict[str, Any] = jwt.decode(
                token,
                self._key(header.get("kid"), algorithm),
                algorithms=[algorithm],
                audience=self._settings.client_id,
                issuer=self._settings.issuer,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "iat", "iss", "aud", "sub"], "enforce_minimum_key_length": True},
            )
        except jwt.PyJWTError as error:
            raise RefusedIdentityError(f"the token is not accepted: {error}") from error
        audience = claims["aud"]
        if claims.get("azp", self._settings.client_id) != self._settings.client_id or (
            isinstance(audience, list) and len(audience) > 1 and "azp" not in claims
        ):
            raise RefusedIdentityError("the token was issued to another client")
        found = claims.get("nonce")
        if not isinstance(found, str) or not hmac.compare_digest(found.encode(), nonce.encode()):
            raise RefusedIdentityError("the token is of another sign-in")
        return claims

    def _key(self, key_id: object, algorithm: str) -> jwt.PyJWK:
        """Return the key of the provider that a token names; without a name, the only one for the algorithm."""
        for may_ask in (True, False):
            if time.monotonic() - self._keys_asked > _KEEP_S:
                self._ask_for_keys()
            found = [key for key in self._keys_of(algorithm) if key_id is None or key.get("kid") == key_id]
            if len(found) == 1:
                return jwt.PyJWK.from_dict(found[0], algorithm=algorithm)
            if may_ask:
                self._ask_for_keys()
        raise RefusedIdentityError("no key of the identity provider has signed the token")

    def _keys_of(self, algorithm: str) -> list[dict[str, Any]]:
        kind = {"E": "EC", "R": "RSA", "P": "RSA"}[algorithm[0]] if algorithm != "EdDSA" else "OKP"
        with self._lock:
            return [
                key
                for key in self._keys
                if key.get("kty") == kind and key.get("use", "sig") == "sig" and key.get("alg", algorithm) == algorithm
            ]

    def _ask_for_keys(self) -> None:
        """Ask for the keys, but not soon after they have arrived. Sign-ins at once share one answer, and one failure.

        Raises:
            ProviderError: they do not arrive. The next sign-in asks again.
        """
        begun = time.monotonic()
        with self._asking:
            if time.monotonic() - self._keys_asked < _ASK_AGAIN_S:
                return
            if self._no_keys is not None and self._no_keys[0] > begun:
                raise ProviderError(str(self._no_keys[1])) from self._no_keys[1]
            try:
                keys = self._ask("GET", self._endpoint("jwks_uri")).get("keys")
                if not isinstance(keys, list):
                    raise ProviderError("the identity provider has sent no keys")
            except ProviderError as error:
                self._no_keys = time.monotonic(), error
                raise
            with self._lock:
                self._keys = [key for key in keys if isinstance(key, dict)]
            self._keys_asked = time.monotonic()

    def _known(self) -> dict[str, Any]:
        """Return what the provider says about itself, at most an hour old."""
        with self._lock:
            if time.monotonic() < self._metadata_until:
                return self._metadata
        found = self._ask("GET", f"{self._settings.issuer.rstrip('/')}/.well-known/openid-configuration")
        if found.get("issuer") != self._settings.issuer:
            raise ProviderError(
                "the identity provider names another issuer than the settings",
                value=found.get("issuer"),
                todo=f"set issuer to what it names, if {self._settings.issuer} is the right one",
            )
        with self._lock:
            self._metadata, self._metadata_until = found, time.monotonic() + _KEEP_S
        return found

    def _endpoint(self, name: str) -> str:
        address = self._known().get(name)
        if not isinstance(address, str) or not may_be_asked(address):
            raise ProviderError(f"the identity provider has no {name} that begins with https://")
        return address

    def _ask(
        self, method: str, address: str, form: dict[str, str] | None = None, auth: tuple[str, str] | None = None
    ) -> dict[str, Any]:
        """Return the JSON object that the provider answers.

        Raises:
            ProviderError: there is none, it is too large, or it does not arrive in time.
            RefusedIdentityError: the provider refuses what was asked.
        """
        deadline, text = time.monotonic() + _ASK_S, bytearray()
        try:
            with self._client.stream(
                method, address, data=form, auth=httpx.USE_CLIENT_DEFAULT if auth is None else auth
            ) as answer:
                for piece in answer.iter_bytes():
                    text += piece
                    if len(text) > _MOST_BYTES or time.monotonic() > deadline:
                        raise ProviderError("the identity provider's answer is too long, or too slow", value=address)
            found = json.loads(text)
        except (httpx.HTTPError, ValueError, RecursionError) as error:
            raise ProviderError(f"the identity provider does not answer: {error}", value=address) from error
        if not isinstance(found, dict):
            raise ProviderError("the identity provider's answer is no object", value=address)
        if form is not None and answer.status_code in (400, 401):
            raise RefusedIdentityError(f"the identity provider refuses the code: {str(found.get('error'))[:100]!r}")
        if answer.status_code != 200:
            raise ProviderError(f"the identity provider answers {answer.status_code}", value=address)
        return found
