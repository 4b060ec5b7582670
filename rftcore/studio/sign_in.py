"""The ways into the studio and out of it: the one-time address, an account's name and password, a provider of OpenID Connect, and the sign-out.

A browser that comes back from a provider, or from a terminal in a web page, sends no strict cookie with what it is redirected to. So both end on a page that
goes on by itself. The sign-in that has begun is in a cookie of its own, which may come from elsewhere and is worth nothing without the provider's answer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated

from fastapi import APIRouter, Form, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from rftcore.studio.oidc.errors import RefusedIdentityError, UnknownPersonError
from rftcore.studio.oidc.flows import LIFE_S
from rftcore.studio.oidc.people import proof_of
from rftcore.studio.rendering import Renderer
from rftcore.studio.sessions import IDLE_S, NoConnectionError, Session, SignInError, WrongPasswordError
from rftcore.studio.translations import translate
from rftcore.studio.visits import Visit
from rftdata.errors import BufferUnavailableError, ConfigError, RftError

PROVED = "/sign-in/proved"
_MAX_NAME = 200  # characters of an account or a password; longer ones are wrong
_MAX_CODE = 4096  # characters of what a provider puts into an address
_log = logging.getLogger(__name__)
router = APIRouter()


@router.get("/")
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
    return _begin(request, session, _goes_on(request, "/"))


@router.get("/sign-in")
def sign_in_page(request: Request) -> Response:
    """Show the form."""
    return _sign_in_page(request, 200)


@router.post("/sign-in")
def sign_in(request: Request, account: Annotated[str, Form()], password: Annotated[str, Form()]) -> Response:
    """Sign in with an account of the database."""
    state = request.app.state
    # Together, so that neither guesses at one account from many addresses nor at many accounts from one address come far.
    of_account, of_address = f"account {account[:_MAX_NAME]}", f"from {_client(request)}"
    if max([state.sign_ins.wait_s(name) for name in (of_account, of_address)]) > 0:
        return _sign_in_page(request, 429, "Too many attempts. Wait a minute, then try again.", account)
    if len(account) > _MAX_NAME or len(password) > _MAX_NAME or "\0" in account + password:
        return _sign_in_page(request, 401, "The name or the password is wrong.", account)
    try:
        session = state.sessions.sign_in(account, password, request.state.session)
    except WrongPasswordError:
        return _sign_in_page(request, 401, "The name or the password is wrong.", account)
    except SignInError as error:
        return _refused(request, error, account)
    state.sign_ins.forget(of_account)
    state.sign_ins.take_back(of_address)  # its failures at other accounts stay counted
    path = _own_path(request.query_params.get("next", "/"))
    return _begin(request, session, RedirectResponse(path, status_code=303))


@router.get("/sign-in/provider")
def ask_provider(request: Request) -> Response:
    """Send the browser to the provider. From a page of another site, which could sign a person in without their will, show the form."""
    state = request.app.state
    if state.provider is None:
        return RedirectResponse("/sign-in", status_code=303)
    if request.headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        return _sign_in_page(request, 200)
    if state.provider_visits.wait_s(_client(request)) > 0:
        return _sign_in_page(request, 429, "Too many attempts. Wait a minute, then try again.")
    former: Session | None = request.state.session
    path = _own_path(request.query_params.get("next", "/"))
    flow = state.flows.begin(path, None if former is None else former.cookie)
    try:
        address = state.provider.address(flow, state.origin + PROVED)
    except RftError as error:
        return _provider_fails(request, error)
    response = RedirectResponse(address, status_code=303)
    response.set_cookie(
        _flow_cookie(request, flow.state),
        flow.browser,
        max_age=int(LIFE_S),
        path="/",
        httponly=True,
        samesite="lax",
        secure=state.settings.is_encrypted,
    )
    return response


@router.get(PROVED)
def proved(request: Request, state: str = "", code: str = "", error: str = "", iss: str | None = None) -> Response:
    """Sign in with the answer of the provider."""
    parts = request.app.state
    if parts.provider is None:
        return RedirectResponse("/sign-in", status_code=303)
    cookie = _flow_cookie(request, state)
    flow = None if len(state) > _MAX_CODE else parts.flows.end(state, request.cookies.get(cookie, ""))
    if flow is None:
        return _sign_in_page(
            request, 401, "This sign-in was begun in another browser, took too long, or was used before. Begin again."
        )
    if error or not code or len(code) > _MAX_CODE:
        _log.warning("the identity provider has refused a sign-in: %r", error[:100])
        return _sign_in_page(request, 401, "The identity provider has not signed you in. Begin again.")
    try:
        parts.provider.check_issuer(iss)
        proof = proof_of(parts.provider.claims(flow, code, parts.origin + PROVED), parts.settings.oidc)
        session = parts.sessions.sign_in_by_provider(proof, request.state.session or parts.sessions.find(flow.former))
    except UnknownPersonError as unknown:
        return _sign_in_page(
            request,
            403,
            "The identity provider knows you, but you have no account here. Ask the owner of the studio to add you to its accounts. Your {claim} is: {person}",
            named={"claim": unknown.claim, "person": unknown.person},
        )
    except WrongPasswordError:
        return _without_password(request, proof.account, "the database refuses it")
    except ConfigError as missing:
        return _without_password(request, proof.account, str(missing))
    except SignInError as refused:
        return _refused(request, refused, "")
    except BufferUnavailableError:
        raise
    except RftError as failure:
        return _provider_fails(request, failure)
    response = _begin(request, session, _goes_on(request, flow.path))
    response.delete_cookie(cookie, path="/", secure=parts.settings.is_encrypted, httponly=True, samesite="lax")
    return response


@router.post("/sign-out")
def sign_out(request: Request, visit: Visit) -> Response:
    """End the session."""
    request.app.state.sessions.end(visit.session)
    response = Response(headers={"hx-redirect": "/sign-in"})
    response.delete_cookie(request.app.state.cookie_name, path="/", secure=request.app.state.settings.is_encrypted)
    return response


def _refused(request: Request, error: SignInError, account: str) -> Response:
    if isinstance(error, NoConnectionError):
        return _sign_in_page(
            request, 503, "The database has no free connection. Wait a minute, then try again.", account
        )
    return _sign_in_page(request, 401, str(error), account)


def _without_password(request: Request, account: str, reason: str) -> Response:
    _log.error("the studio cannot sign in as the account %s, which its settings of OIDC name: %s", account, reason)
    return _sign_in_page(
        request,
        500,
        "The identity provider knows you, but the studio has no valid password of your account {account}. Tell the owner of the studio.",
        named={"account": account},
    )


def _provider_fails(request: Request, error: RftError) -> Response:
    _log.warning("a sign-in by the identity provider has failed: %s", error)
    if isinstance(error, RefusedIdentityError):
        return _sign_in_page(
            request,
            401,
            "The answer of the identity provider is not accepted. Begin again, and if that does not help, tell the owner of the studio.",
        )
    return _sign_in_page(request, 503, "The identity provider does not answer as it should. Try again in a minute.")


def _flow_cookie(request: Request, state: str) -> str:
    """Return the name of the cookie of a sign-in that has begun, so that two tabs may sign in at once."""
    return f"{request.app.state.cookie_name}_{state[:12]}"


def _goes_on(request: Request, path: str) -> Response:
    """Return a page that goes on to a path. It is no redirect, because a browser that came from elsewhere would not send the strict cookie with one."""
    renderer: Renderer = request.app.state.renderer
    return HTMLResponse(
        renderer.render("signed_in.html", renderer.language_of(request), session=None, path="/", to=path)
    )


def _client(request: Request) -> str:
    """Return the address of the browser; behind a proxy, what the proxy has appended, perhaps as a header of its own."""
    if request.app.state.settings.behind_proxy:
        return ",".join(request.headers.getlist("x-forwarded-for")).rpartition(",")[2].strip()
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


def _sign_in_page(
    request: Request,
    status: int,
    problem: str | None = None,
    account: str = "",
    named: Mapping[str, str] = MappingProxyType({}),
) -> Response:
    renderer: Renderer = request.app.state.renderer
    language = renderer.language_of(request)
    path = _own_path(request.query_params.get("next", "/"))
    said = None if problem is None else translate(language, problem)
    oidc = request.app.state.settings.oidc
    text = renderer.render(
        "sign_in.html",
        language,
        session=None,
        path="/sign-in",
        problem=said.format(**named) if said is not None and named else said,  # another may have the name of an account
        account=account,
        next=path,
        provider=None if oidc is None else oidc.shown_name,
        is_personal=request.app.state.settings.is_personal,
    )
    return HTMLResponse(text, status_code=status)
