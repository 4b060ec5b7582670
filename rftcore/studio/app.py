"""The application: guards, sign-in, static files, event streams, and the pages."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, FastAPI, Form, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles
from starlette.types import ASGIApp, Scope

from rftcore.studio.failures import add_failure_handlers
from rftcore.studio.guards import Guards
from rftcore.studio.live import LiveHints
from rftcore.studio.pages import all_pages
from rftcore.studio.rate_limits import RateLimit
from rftcore.studio.readers import Readers
from rftcore.studio.rendering import STATIC, Renderer
from rftcore.studio.sessions import IDLE_S, NoConnectionError, Session, Sessions, SignInError
from rftcore.studio.settings import StudioSettings
from rftcore.studio.translations import COOKIE, LANGUAGES, translate
from rftcore.studio.visits import Visit

_MAX_NAME = 200  # characters of an account or a password; longer ones are wrong


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

    readers = Readers(sessions.studio_buffer)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    pages = all_pages()
    app.state.renderer = Renderer([page for page, _ in pages])
    app.state.sessions, app.state.settings, app.state.live = sessions, settings, live
    app.state.cookie_name = cookie_name
    app.state.readers = readers
    app.state.sign_ins = RateLimit(5, 60.0)
    app.include_router(_router)
    for _, router in pages:
        app.include_router(router)
    app.mount("/static", _Static(directory=STATIC))
    add_failure_handlers(app)
    return Studio(Guards(app, settings, sessions, cookie_name), settings, sessions, live, cookie_name)


class _Static(StaticFiles):
    """Files of the studio. Addresses with a digest may be kept; others are asked for again."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        kept = b"v=" in scope["query_string"]
        response.headers["cache-control"] = "public, max-age=31536000, immutable" if kept else "no-cache"
        return response


_router = APIRouter()


@_router.get("/")
def home(request: Request, token: str | None = None) -> Response:
    """Go to the first page; with the token of a one-time address, sign in and remove it from the address."""
    if token is None:
        return RedirectResponse("/review", status_code=303)
    session = request.app.state.sessions.redeem(token, request.state.session)
    if session is None:
        return _sign_in_page(
            request,
            401,
            "This address was used before, or the studio was started again. Its terminal prints a new one when you press Enter there.",
        )
    # Not a redirect: a browser that came from another site, such as a terminal in a web page, would not send the strict cookie with it.
    renderer: Renderer = request.app.state.renderer
    text = renderer.render("signed_in.html", renderer.language_of(request), session=None, path="/")
    return _begin(request, session, HTMLResponse(text))


@_router.get("/sign-in")
def sign_in_page(request: Request) -> Response:
    """Show the form."""
    return _sign_in_page(request, 200)


@_router.post("/sign-in")
def sign_in(request: Request, account: Annotated[str, Form()], password: Annotated[str, Form()]) -> Response:
    """Sign in with an account of the database."""
    state = request.app.state
    # Together, so that neither guesses at one account from many addresses nor at many accounts from one address come far.
    names = [f"account {account[:_MAX_NAME]}", f"from {_client(request)}"]
    if max([state.sign_ins.wait_s(name) for name in names]) > 0:
        return _sign_in_page(request, 429, "Too many attempts. Wait a minute, then try again.", account)
    if len(account) > _MAX_NAME or len(password) > _MAX_NAME or "\0" in account + password:
        return _sign_in_page(request, 401, "The name or the password is wrong.", account)
    try:
        session = state.sessions.sign_in(account, password, request.state.session)
    except NoConnectionError:
        return _sign_in_page(
            request, 503, "The database has no free connection. Wait a minute, then try again.", account
        )
    except SignInError as error:
        sentence = "The name or the password is wrong." if error.todo is None else str(error)
        return _sign_in_page(request, 401, sentence, account)
    for name in names:
        state.sign_ins.forget(name)
    path = _own_path(request.query_params.get("next", "/"))
    return _begin(request, session, RedirectResponse(path, status_code=303))


@_router.post("/sign-out")
def sign_out(request: Request, visit: Visit) -> Response:
    """End the session."""
    request.app.state.sessions.end(visit.session)
    response = Response(headers={"hx-redirect": "/sign-in"})
    response.delete_cookie(request.app.state.cookie_name, path="/", secure=request.app.state.settings.is_encrypted)
    return response


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


def _client(request: Request) -> str:
    """Return the address of the browser; behind a proxy, what the proxy has appended."""
    if request.app.state.settings.behind_proxy:
        return request.headers.get("x-forwarded-for", "").rpartition(",")[2].strip()
    return request.client.host if request.client else ""


def _own_path(path: str) -> str:
    """Return a path of this studio; `/` instead of an address elsewhere."""
    is_own = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if is_own else "/"


def _begin(request: Request, session: Session, response: Response) -> Response:
    """Return the answer to a sign-in, with the cookie."""
    response.set_cookie(
        request.app.state.cookie_name,
        session.cookie,
        max_age=int(IDLE_S),
        path="/",
        httponly=True,
        samesite="strict",
        secure=request.app.state.settings.is_encrypted,
    )
    return response


def _sign_in_page(request: Request, status: int, problem: str | None = None, account: str = "") -> Response:
    renderer: Renderer = request.app.state.renderer
    language = renderer.language_of(request)
    text = renderer.render(
        "sign_in.html",
        language,
        session=None,
        path="/sign-in",
        problem=None if problem is None else translate(language, problem),
        account=account,
        next=_own_path(request.query_params.get("next", "/")),
        is_personal=request.app.state.settings.is_personal,
    )
    return HTMLResponse(text, status_code=status)
