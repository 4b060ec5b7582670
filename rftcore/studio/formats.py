"""Numbers, times and sizes as people read them; filters of templates."""

from __future__ import annotations

import datetime
from pathlib import PurePosixPath


def number(value: float | int | None, digits: int = 4) -> str:
    """Return a number; a dash for None."""
    if value is None:
        return "–"
    return f"{value:.{digits}g}" if isinstance(value, float) else f"{value:,}"


def duration(seconds: float | None) -> str:
    """Return a time span as 1:05, 2:03:04 or 3 d 4 h."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(int(seconds), 60)
    if minutes >= 48 * 60:
        return f"{minutes // 1440} d {minutes // 60 % 24} h"
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def moment(value: datetime.datetime | None) -> str:
    """Return a point in time, in UTC."""
    return "–" if value is None else value.astimezone(datetime.UTC).strftime("%Y-%m-%d %H:%M")


def num_bytes(value: float | None) -> str:
    """Return a size in the unit that leaves three digits."""
    if value is None:
        return "–"
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def last_part(path: str) -> str:
    """Return the last part of a path or a name, as `model` of `/data/model`."""
    return PurePosixPath(path).name or path


FORMATS = {"duration": duration, "moment": moment, "num_bytes": num_bytes, "last_part": last_part}
