"""Commands that messages tell a person to run."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from rftdata.postgres.database import redacted


def buffer_option(location: str) -> str:
    """What commands given in this folder need to find the buffer; empty where they find it without."""
    default = os.environ.get("RFT_BUFFER") or "buffer"
    found = redacted(default) if "://" in default else str(Path(default).resolve())
    return "" if location == found else f" --buffer {shlex.quote(location)}"
