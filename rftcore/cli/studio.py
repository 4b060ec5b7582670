"""`rft studio`: pages on a buffer, for people who read, label and run."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rftcore.cli.session import BufferOption, author, opened
from rftdata.errors import EnvironmentMismatchError

_PACKAGES = ("fastapi", "jinja2", "multipart", "uvicorn")
_PACKAGES_OF_OIDC = ("cryptography", "httpx", "jwt")


def _check_packages(names: Sequence[str]) -> None:
    """Refuse a Python without the packages of the extra.

    Raises:
        EnvironmentMismatchError: it names them and the command that installs them.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise EnvironmentMismatchError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed in {sys.prefix}",
            todo="run `pip install 'rftdata[studio]'` (or the same with the path of the wheel)",
        )


def studio(
    uri: BufferOption = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 for any free one.")] = 0,
    public_names: Annotated[
        list[str] | None,
        typer.Option("--public-name", help="Name by which browsers address it; may be repeated."),
    ] = None,
    behind_proxy: Annotated[
        bool,
        typer.Option(
            "--behind-proxy",
            help="A reverse proxy in front of it ends TLS; people sign in with accounts of the database.",
        ),
    ] = False,
    tls_certificate: Annotated[
        Path | None, typer.Option("--tls-certificate", help="Certificate (PEM), to serve HTTPS itself.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="Key of the certificate (PEM).")] = None,
    oidc: Annotated[
        Path | None,
        typer.Option("--oidc", help="YAML file of a provider of OpenID Connect by which people may sign in, too."),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option("--author", envvar="RFT_AUTHOR", help="Author of your labels; your login name by default."),
    ] = None,
    configs: Annotated[
        Path | None,
        typer.Option(
            "--configs",
            metavar="FOLDER",
            help="Edit the configurations of this folder, and start runs with them, at /config.",
        ),
    ] = None,
    end_with_input: Annotated[bool, typer.Option("--end-with-input", hidden=True)] = False,
) -> None:
    """Open the studio: review and label experiences, and look at runs, in a browser.

    The address that it prints signs you in once. Other people sign in with their accounts of the database (`rft docs roles`), or by --oidc. Press Enter for
    another address, Ctrl-C to stop.
    """
    _check_packages(_PACKAGES if oidc is None else _PACKAGES + _PACKAGES_OF_OIDC)
    from rftcore.studio.oidc.settings import read_settings
    from rftcore.studio.settings import StudioSettings

    settings = StudioSettings(
        host=host,
        port=port,
        hosts=tuple(public_names or ()),
        behind_proxy=behind_proxy,
        tls_certificate=tls_certificate,
        tls_key=tls_key,
        oidc=None if oidc is None else read_settings(oidc),
        author=by or author(),
        configs=configs,
    )
    from rftcore.studio.server import StudioServer, print_addresses

    with opened(uri, "rft studio", schema="migrate") as buffer:
        server = StudioServer(buffer, settings)
        print_addresses(server, lambda line: print(line, flush=True))
        if end_with_input:
            server.stop_with_input()
        server.serve()
