"""Numbers as people type them."""

from __future__ import annotations

from rftdata.errors import QueryError


def whole_from(text: str) -> int | None:
    """Return a whole number that a page sends back; None for an empty text.

    Raises:
        QueryError: it is none.
    """
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise QueryError("a field of the form is damaged", value=text[:100], todo="load the page again")
    return int(text)


def number_from(text: str) -> float:
    """Return a number; a comma may separate its decimals.

    Raises:
        QueryError: it is none.
    """
    try:
        return float(text.strip().replace(",", "."))
    except ValueError as error:
        raise QueryError("this is not a number", value=text[:100], allowed="a number such as 0.5") from error
