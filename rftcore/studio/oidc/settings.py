"""The file that `rft studio --oidc` names: the provider, and which person works with which account.

No secret is in this file. The client's secret is in a file of its own or in the variable RFT_OIDC_CLIENT_SECRET, and the accounts' passwords are in a file that
only the user of the studio can read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import yaml
from pydantic import Field, field_validator

from rftdata.config import Section
from rftdata.config_errors import parse_section
from rftdata.errors import ConfigError
from rftdata.yaml_text import read_yaml

CLIENT_SECRET = "RFT_OIDC_CLIENT_SECRET"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class OidcSettings(Section):
    """A provider, and the accounts of people.

    Attributes:
        issuer: address of the provider, exactly as its tokens name it.
        client_id: name of the studio at the provider.
        client_secret_file: file with the client's secret; without it the variable RFT_OIDC_CLIENT_SECRET. A public client has neither.
        claim: the claim of the token that says who a person is.
        accounts: account of the database for each value of the claim.
        passwords_file: file with a line `ACCOUNT:PASSWORD` for each of these accounts.
        scopes: what the provider is asked for.
        name: of the provider, on the button.
    """

    issuer: str
    client_id: str = Field(min_length=1)
    client_secret_file: Path | None = None
    claim: str = Field("sub", min_length=1)
    accounts: dict[str, str] = Field(min_length=1)
    passwords_file: Path
    scopes: tuple[str, ...] = ("openid", "email", "profile")
    name: str | None = None

    @field_validator("issuer")
    @classmethod
    def _is_encrypted(cls, issuer: str) -> str:
        if not may_be_asked(issuer):
            raise ValueError("an issuer is an address that begins with https:// (http:// on this machine alone)")
        return issuer

    @field_validator("scopes")
    @classmethod
    def _asks_for_a_token(cls, scopes: tuple[str, ...]) -> tuple[str, ...]:
        if "openid" not in scopes:
            raise ValueError("openid is one of the scopes; without it a provider sends no identity")
        return scopes

    @property
    def shown_name(self) -> str:
        """Name of the provider for people."""
        return self.name or urlsplit(self.issuer).netloc

    def client_secret(self) -> str | None:
        """Return the secret of the studio at the provider; None for a public client.

        Raises:
            ConfigError: the file cannot be read, or others can read it.
        """
        if self.client_secret_file is not None:
            return _private_text(self.client_secret_file).strip()
        return os.environ.get(CLIENT_SECRET) or None

    def password_of(self, account: str) -> str:
        """Return the password of an account. The file is read each time, so a new password needs no new start.

        Raises:
            ConfigError: the file cannot be read, others can read it, or it does not have the account.
        """
        password = self._passwords().get(account)
        if not password:
            raise ConfigError(
                f"{self.passwords_file} has no password of the account {account}", todo=f"add a line {account}:PASSWORD"
            )
        return password

    def check(self) -> None:
        """Refuse settings with which no person, or not every person, could sign in.

        Raises:
            ConfigError: a file cannot be read, others can read it, or an account has no password in it.
        """
        self.client_secret()
        for account in self.accounts.values():
            self.password_of(account)

    def _passwords(self) -> Mapping[str, str]:
        lines = _private_text(self.passwords_file).splitlines()
        pairs = (line.partition(":") for line in lines if line.strip() and not line.startswith("#"))
        return {account.strip(): password for account, _, password in pairs}


def may_be_asked(address: str) -> bool:
    """Return whether an address is encrypted, or does not leave this machine."""
    try:
        parts = urlsplit(address)
        name = parts.hostname
    except ValueError:
        return False
    return name is not None and (parts.scheme == "https" or (parts.scheme == "http" and name in _LOOPBACK))


def read_settings(file: Path) -> OidcSettings:
    """Return the settings of a file, checked. Paths in it are relative to its folder.

    Raises:
        ConfigError: the file or one that it names cannot be read, or a value is wrong.
    """
    try:
        values = read_yaml(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{file} cannot be read: {' '.join(str(error).split())}", todo="correct the path or the file"
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file} has no settings", todo="`rft docs set-up-a-labelling-team` has an example")
    settings = parse_section(OidcSettings, values, str(file))
    folder = file.resolve().parent
    secret = settings.client_secret_file
    settings = settings.model_copy(
        update={
            "passwords_file": folder / settings.passwords_file,
            "client_secret_file": None if secret is None else folder / secret,
        }
    )
    settings.check()
    return settings


def _private_text(file: Path) -> str:
    """Return the text of a file that only its user can read.

    Raises:
        ConfigError: it cannot be read, or others can read it.
    """
    try:
        with file.open(encoding="utf-8") as opened:
            if stat.S_IMODE(os.fstat(opened.fileno()).st_mode) & 0o077:
                raise ConfigError(f"other users can read {file}, which has secrets", todo=f"run `chmod 600 {file}`")
            return opened.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", todo="correct the path or the file") from error
