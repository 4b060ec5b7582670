"""A client of a studio, as its pages are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rftcore.studio.server import StudioServer

if TYPE_CHECKING:
    import httpx


@contextmanager
def signed_in(server: StudioServer, account: str | None = None, password: str = "") -> Iterator[httpx.Client]:
    """Yield a client that sends what a page sends; signed in by a one-time address, or with an account."""
    import httpx

    origin = f"http://127.0.0.1:{server.port}"
    headers = {"Sec-Fetch-Site": "same-origin"}
    with httpx.Client(base_url=origin, headers=headers, trust_env=False, timeout=300) as client:
        if account is None:
            client.get(server.address())
        else:
            client.post("/sign-in", data={"account": account, "password": password})
        found = re.search(r'data-token="([^"]+)" data-identity="([^"]+)"', client.get("/review").text)
        assert found is not None
        client.headers["X-Studio-Token"], client.headers["X-Studio-Identity"] = found[1], found[2]
        yield client
