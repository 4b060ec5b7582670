"""Where the program cites its documentation: in the help of every command, in messages, and in the texts of the packages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
from typer.main import get_command

from rftcore.cli import app

CHECKOUT = Path(__file__).resolve().parents[2]
_COMMAND = re.compile(r"\brft docs ([a-z0-9][\w./-]*\w)")
_PATH = re.compile(r"\bdocs/([\w./-]*\w)")


def cited(text: str) -> set[str]:
    """The pages that a text names as `rft docs PAGE` or by their path."""
    return {*_COMMAND.findall(text), *_PATH.findall(text)}


def cites_a_path(text: str) -> bool:
    """Whether a text names a page by its path in the checkout, which an installed program does not have."""
    return bool(_PATH.search(text))


def help_texts() -> Iterator[tuple[str, str]]:
    """(command line, help) of every command, its arguments and options."""
    yield from _help_of(get_command(app), "rft")


def _help_of(command: click.Command, line: str) -> Iterator[tuple[str, str]]:
    yield line, command.help or ""
    for parameter in command.params:
        yield f"{line} {parameter.name}", getattr(parameter, "help", None) or ""
    for name, inner in getattr(command, "commands", {}).items():
        yield from _help_of(inner, f"{line} {name}")


def messages() -> Iterator[tuple[str, str]]:
    """(file and line, text) of every string of the packages that is no docstring, f-strings without what they insert."""
    for path in _sources(".py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstrings = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                yield f"{path.relative_to(CHECKOUT)}:{node.lineno}", node.value
    for path in _sources(".sql"):
        code = re.sub(r"--[^\n]*", "", path.read_text(encoding="utf-8"))
        yield str(path.relative_to(CHECKOUT)), code


def texts() -> Iterator[tuple[str, str]]:
    """(file, text) of everything that the wheel carries beside the pages, comments and docstrings included."""
    for path in (*_sources(".py"), *_sources(".sql")):
        yield str(path.relative_to(CHECKOUT)), path.read_text(encoding="utf-8")


def all_cited() -> set[str]:
    """Every page that help, messages or texts name."""
    return {name for _, text in (*help_texts(), *texts()) for name in cited(text)}


def _sources(ending: str) -> list[Path]:
    return sorted(
        path
        for folder in ("rftdata", "operators", "rftcore", "sql")
        for path in (CHECKOUT / folder).rglob(f"*{ending}")
    )
