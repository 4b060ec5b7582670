"""Numbers as people type them."""

from __future__ import annotations

from rftdata.errors import QueryError


def number_from(text: str) -> float:
    """Return a number; a comma may separate its decimals.

    Raises:
        QueryError: it is none.
    """
    try:
        return float(text.strip().replace(",", "."))
    except ValueError as error:
        raise QueryError("this is not a number", value=text[:100], allowed="a number such as 0.5") from error
