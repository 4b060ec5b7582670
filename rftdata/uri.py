"""Connection strings as messages may show them."""

from __future__ import annotations

import re


def redacted(uri: str) -> str:
    """The connection string without its password."""
    return re.sub(r"(password=)[^&\s]*", r"\1…", re.sub(r"(//[^:/@]*):[^@/]*@", r"\1:…@", uri))
