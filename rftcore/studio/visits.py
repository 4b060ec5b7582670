"""A request of a person who has signed in: what routes of pages work with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, Request
from fastapi.responses import HTMLResponse, Response

from rftcore.studio.sessions import Session
from rftcore.studio.translations import translate

if TYPE_CHECKING:
    from rftcore.studio.live import LiveHints
    from rftcore.studio.readers import Readers
    from rftcore.studio.rendering import Renderer
    from rftdata.buffer import Buffer


@dataclass(frozen=True)
class VisitOf:
    """One request.

    Attributes:
        session: the session, with the account's connections.
        renderer: fills templates.
        live: tells open pages of changes.
        language: of the reader.
        path: of the request, to mark the page in the navigation.
        readers: connections for SQL that people write.
    """

    session: Session
    renderer: Renderer
    live: LiveHints
    language: str
    path: str
    readers: Readers

    @property
    def buffer(self) -> Buffer:
        """The buffer, as the account sees it."""
        return self.session.buffer

    @property
    def author(self) -> str:
        """The author of what the person writes."""
        return self.session.author

    def text(self, english: str) -> str:
        """Return a text in the reader's language."""
        return translate(self.language, english)

    def fetch(self, query: str, **parameters: Any) -> list[dict[str, Any]]:
        """Return the rows of a named query."""
        return self.buffer.database.fetch(query, **parameters)

    def render(self, template: str, /, *, status: int = 200, **values: Any) -> Response:
        """Return a template, filled."""
        text = self.renderer.render(template, self.language, session=self.session, path=self.path, **values)
        return HTMLResponse(text, status_code=status)


def visit_of(request: Request) -> VisitOf:
    """Return the visit of a request that `guards` let pass."""
    state = request.app.state
    return VisitOf(
        request.state.session,
        state.renderer,
        state.live,
        state.renderer.language_of(request),
        request.url.path,
        state.readers,
    )


Visit = Annotated[VisitOf, Depends(visit_of)]
