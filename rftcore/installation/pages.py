"""The documentation's pages, which the wheel contains; messages and help refer to them as `rft docs PAGE`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rftdata.config_errors import nearest
from rftdata.errors import ConfigError


@dataclass(frozen=True)
class Page:
    """One page.

    Attributes:
        name: path below the documentation folder, without `.md`.
        title: first heading.
        path: the file.
    """

    name: str
    title: str
    path: Path


@cache
def docs_folder() -> Path:
    """Return the folder of the pages: inside the package in a wheel, else at the top of the checkout."""
    here = Path(__file__).resolve().parents[1]
    inside = here / "docs"
    return inside if inside.is_dir() else here.parent / "docs"


def config_schema() -> str:
    """Return the JSON Schema of configuration files, which is made with the pages."""
    return (docs_folder() / "reference" / "configuration.schema.json").read_text(encoding="utf-8")


@cache
def pages() -> tuple[Page, ...]:
    """Return all pages, by name."""
    folder = docs_folder()
    return tuple(
        Page(path.relative_to(folder).with_suffix("").as_posix(), _title(path), path)
        for path in sorted(folder.rglob("*.md"))
    )


def find_page(name: str) -> Page:
    """Return the page for a name: its path (with or without `docs/` and `.md`), its last part, or a unique beginning of that.

    Raises:
        ConfigError: no page matches, or several do.
    """
    wanted = name.strip("/").removeprefix("docs/").removesuffix(".md")
    rules: tuple[Callable[[Page], bool], ...] = (
        lambda page: page.name == wanted,
        lambda page: page.path.stem == wanted,
        lambda page: page.name.startswith(f"{wanted}-") or page.path.stem.startswith(f"{wanted}-"),
        lambda page: page.path.stem.startswith(wanted),
    )
    for fits in rules:
        fitting = [page for page in pages() if fits(page)]
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            raise ConfigError("several pages match", value=name, allowed=", ".join(page.name for page in fitting))
    names = [page.name for page in pages()]
    near = nearest(wanted, [*names, *(page.path.stem for page in pages())], cutoff=0.5)
    raise ConfigError(
        "unknown page" + (f"; the nearest is {near}" if near else ""),
        value=name,
        todo="`rft docs` lists the pages",
    )


def _title(path: Path) -> str:
    with path.open(encoding="utf-8") as lines:
        return next((line.lstrip("# ").strip() for line in lines if line.startswith("# ")), path.stem)
