"""A page of the studio, as it stands in the navigation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Page:
    """A page.

    Attributes:
        title: in English; translations have it.
        path: where it is.
        order: its place in the navigation; None if it is reached from other pages only.
        for_owner: whether only the person who started the studio is let in.
    """

    title: str
    path: str
    order: int | None = None
    for_owner: bool = False
