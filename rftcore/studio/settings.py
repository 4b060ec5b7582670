"""Where the studio listens, and who may reach it."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from rftcore.studio.oidc.settings import OidcSettings
from rftdata.errors import ConfigError

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True, kw_only=True)
class StudioSettings:
    """Settings of a studio.

    Attributes:
        host: address to listen on.
        port: 0 for any free port.
        hosts: names by which browsers may address it, besides those of the loopback address.
        behind_proxy: a reverse proxy in front of it ends TLS.
        tls_certificate, tls_key: files in PEM format; None if the studio itself speaks plain HTTP.
        oidc: a provider by which people may sign in, too.
        author: the author of what is written by the person who started the studio; other people are authors by the name of their account.
        configs: folder of configurations which that person may edit and run; None for none.

    Raises:
        ConfigError: other machines could reach the studio without TLS, or the settings contradict each other.
    """

    host: str = "127.0.0.1"
    port: int = 0
    hosts: tuple[str, ...] = ()
    behind_proxy: bool = False
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    oidc: OidcSettings | None = None
    author: str = "studio"
    configs: Path | None = None

    def __post_init__(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigError(
                "only one of the two files of TLS is named", allowed="both --tls-certificate and --tls-key, or neither"
            )
        if not self.is_local_address and not self.is_encrypted:
            raise ConfigError(
                "other machines could reach the studio without encryption, and passwords would cross the network as text",
                value=self.host,
                allowed="127.0.0.1, or any address with TLS",
                todo="omit --host, or add --tls-certificate and --tls-key, or put a proxy with TLS in front and add --behind-proxy",
            )
        if self.is_encrypted and not self.hosts:
            raise ConfigError(
                "the studio does not know by which name browsers address it, and would refuse all of them",
                todo="name it: --public-name studio.example.org",
            )

        if self.configs is not None and not self.is_personal:
            raise ConfigError(
                "a studio for several people starts no runs: they would run under the account of its process",
                value=f"--configs {self.configs}",
                todo="omit --configs, or open a studio of your own beside this one: rft studio --configs FOLDER",
            )

    @property
    def is_local_address(self) -> bool:
        """Whether only this machine can reach the address."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False

    @property
    def is_encrypted(self) -> bool:
        """Whether browsers reach it by HTTPS."""
        return self.behind_proxy or self.tls_certificate is not None

    @property
    def is_personal(self) -> bool:
        """Whether the address that the studio prints signs in the person who started it. A studio for several people never does that."""
        return not self.is_encrypted

    @property
    def allowed_hosts(self) -> frozenset[str]:
        """Names that the header Host of a request may have, without the port."""
        own = LOOPBACK_NAMES if self.is_local_address else ()
        return frozenset(name.lower() for name in (*own, *self.hosts))

    def origin(self, port: int) -> str:
        """Return the address by which browsers reach it, without a path.

        Args:
            port: on which it listens.
        """
        if self.behind_proxy:
            return f"https://{self.hosts[0]}"
        if self.is_encrypted:
            return f"https://{self.hosts[0]}{'' if port == 443 else f':{port}'}"
        host = "127.0.0.1" if self.host == "localhost" else self.host.strip("[]")
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"
