"""Images and traces of reports, in files that are written whole or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rftdata.errors import QueryError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(path: Path, *, width: float, height: float) -> Figure:
    """Return an empty figure for an image.

    Args:
        path: the image, whose suffix is its format (png, svg, pdf…).
        width, height: inches.

    Raises:
        QueryError: the format is unknown.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Without pyplot: no global state, no display, safe in any thread.
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    kinds = FigureCanvasAgg(figure).get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise QueryError("unknown image format", value=str(path), allowed=", ".join(f".{kind}" for kind in kinds))
    return figure


def write_whole(path: Path, what: str, write: Callable[[Path], object]) -> None:
    """Write a file under another name, and then rename it; its folder is created.

    Args:
        what: an image or a trace, for errors.
        write: writes it to a path.

    Raises:
        QueryError: the file cannot be written; an existing file is then unchanged.
    """
    draft = path.with_name(f".unfinished-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(draft)
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise QueryError(
            f"the {what} {path} cannot be written: {error.strerror or error}",
            todo="choose another path, or free some space",
        ) from error
