"""Connection strings for messages."""

from __future__ import annotations

import re


def redacted(uri: str) -> str:
    """Return a connection string without its password."""
    return re.sub(r"(password=)[^&\s]*", r"\1…", re.sub(r"(//[^:/@]*):[^@/]*@", r"\1:…@", uri))
