"""The application: guards, sign-in, static files, event streams, and the pages."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, FastAPI, Form, Request
from fastapi.responses import Response, StreamingResponse
from fastapi.staticfiles import StaticFiles
from starlette.types import ASGIApp, Scope

from rftcore.studio.config_files import ConfigFolder
from rftcore.studio.failures import add_failure_handlers
from rftcore.studio.guards import Guards
from rftcore.studio.live import LiveHints
from rftcore.studio.oidc.flows import Flows
from rftcore.studio.oidc.settings import OidcSettings
from rftcore.studio.pages import all_pages
from rftcore.studio.rate_limits import RateLimit
from rftcore.studio.readers import Readers
from rftcore.studio.rendering import STATIC, Renderer
from rftcore.studio.run_processes import RunProcesses
from rftcore.studio.sessions import Sessions
from rftcore.studio.settings import StudioSettings
from rftcore.studio.sign_in import router as sign_in_router
from rftcore.studio.translations import COOKIE, LANGUAGES

if TYPE_CHECKING:
    from rftcore.studio.oidc.provider import Provider


@dataclass(frozen=True)
class Studio:
    """The parts of a running studio.

    Attributes:
        app: what the server serves.
        cookie_name: of the session.
    """

    app: ASGIApp
    settings: StudioSettings
    sessions: Sessions
    live: LiveHints
    cookie_name: str


def build_studio(settings: StudioSettings, sessions: Sessions, live: LiveHints, port: int) -> Studio:
    """Put the application together.

    Args:
        port: where it is served. Cookies of one machine are shared by all its ports, so their name has it.
    """
    cookie_name = "__Host-rft_studio" if settings.is_encrypted else f"rft_studio_{port}"

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        live.start()
        try:
            yield
        finally:
            readers.close()
            if provider is not None:
                provider.close()

    provider = _provider(settings.oidc)
    readers = Readers(sessions.studio_buffer)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    pages = all_pages()
    app.state.renderer = Renderer([page for page, _ in pages])
    app.state.sessions, app.state.settings, app.state.live = sessions, settings, live
    app.state.cookie_name = cookie_name
    app.state.readers = readers
    app.state.sign_ins = RateLimit(5, 60.0)
    app.state.origin = settings.origin(port)
    app.state.provider, app.state.flows, app.state.provider_visits = provider, Flows(), RateLimit(20, 60.0)
    app.state.run_processes = None
    if settings.configs is not None:
        buffer = sessions.studio_buffer
        app.state.run_processes = RunProcesses(ConfigFolder(settings.configs), buffer.config, buffer.location)
    app.include_router(_router)
    app.include_router(sign_in_router)
    for _, router in pages:
        app.include_router(router)
    app.mount("/static", _Static(directory=STATIC))
    add_failure_handlers(app)
    return Studio(Guards(app, settings, sessions, cookie_name), settings, sessions, live, cookie_name)


def _provider(settings: OidcSettings | None) -> Provider | None:
    if settings is None:
        return None
    from rftcore.studio.oidc.provider import Provider  # needs httpx and pyjwt, which few studios do

    return Provider(settings, settings.client_secret())


class _Static(StaticFiles):
    """Files of the studio. Addresses with a digest may be kept; others are asked for again."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        kept = b"v=" in scope["query_string"]
        response.headers["cache-control"] = "public, max-age=31536000, immutable" if kept else "no-cache"
        return response


_router = APIRouter()


@_router.post("/language")
def choose_language(language: Annotated[str, Form()]) -> Response:
    """Remember the reader's language."""
    response = Response(headers={"hx-refresh": "true"})
    if language in LANGUAGES:
        response.set_cookie(COOKIE, language, max_age=365 * 86400, samesite="strict", httponly=True)
    return response


@_router.get("/events")
async def events(request: Request) -> Response:
    """Stream hints that something may have changed."""
    return StreamingResponse(request.app.state.live.stream(), media_type="text/event-stream")
