"""Options of benchmarks.

Each parser shows the module's header as its help. Values are checked by the types below, whose errors name the value and what is allowed.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path


def argument_parser(name: str, header: str | None) -> argparse.ArgumentParser:
    """Return the parser of `rft bench NAME`, which has the option `--folder`."""
    made = argparse.ArgumentParser(
        prog=f"rft bench {name}", description=header, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--folder", type=Path, help="work here, by default in a temporary folder")
    return made


@contextmanager
def scratch_folder(options: argparse.Namespace) -> Iterator[Path]:
    """Yield a new folder, inside `--folder` if that is given, and remove it afterwards."""
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rft-bench-", dir=options.folder, ignore_cleanup_errors=True) as name:
        os.chmod(name, 0o755)  # the database may run as another user
        yield Path(name)


@contextmanager
def kept_folder(options: argparse.Namespace, parent: Path | None = None) -> Iterator[Path]:
    """Yield `--folder`, whose files stay; without it, a temporary folder in `parent`."""
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
        yield options.folder.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="rft-bench-", dir=parent, ignore_cleanup_errors=True) as name:
        os.chmod(name, 0o755)
        yield Path(name)


def names(*allowed: str) -> Callable[[str], list[str]]:
    """Return a type for names with commas between them."""

    def parse(text: str) -> list[str]:
        found = list(dict.fromkeys(text.split(",")))
        if unknown := [name for name in found if name not in allowed]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; allowed: {', '.join(allowed)}")
        return found

    return parse


def integer(least: int = 1) -> Callable[[str], int]:
    """Return a type for a whole number of at least `least`."""

    def parse(text: str) -> int:
        return _integers(text, [text], least)[0]

    return parse


def integers(least: int = 1) -> Callable[[str], tuple[int, ...]]:
    """Return a type for whole numbers of at least `least` with commas between them."""

    def parse(text: str) -> tuple[int, ...]:
        return tuple(dict.fromkeys(_integers(text, text.split(","), least)))

    return parse


def _integers(text: str, parts: Collection[str], least: int) -> list[int]:
    try:
        found = [int(part) for part in parts]
    except ValueError:
        what = "whole numbers with commas between them" if len(parts) > 1 else "a whole number"
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None
    if min(found) < least:
        raise argparse.ArgumentTypeError(f"{min(found)} is too small; allowed: {least} or more")
    return found


def positive(text: str) -> float:
    """Parse a number above 0."""
    try:
        found = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not found > 0:
        raise argparse.ArgumentTypeError(f"{text} is too small; allowed: a number above 0")
    return found
