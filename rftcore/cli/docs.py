"""`rft docs`: the documentation pages of the installed version."""

from __future__ import annotations

from typing import Annotated

import typer

from rftcore.cli.session import JsonOption


def docs(
    page: Annotated[
        str | None, typer.Argument(metavar="PAGE", help="Name of the page or the last part of it; omit it to list all.")
    ] = None,
    path_only: Annotated[bool, typer.Option("--path", help="Print the file's path instead of its text.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the pages of the documentation, or print one as Markdown (`rft docs install`)."""
    from rftcore.cli.output import print_json, print_rows
    from rftcore.installation.pages import find_page, pages

    if page is None:
        rows = [{"page": one.name, "title": one.title, "path": str(one.path)} for one in pages()]
        columns = ["page", "title", "path"] if path_only or as_json else ["page", "title"]
        print_rows(rows, columns, as_json=as_json)
        return
    match = find_page(page)
    text = match.path.read_text(encoding="utf-8")
    if as_json:
        print_json({"page": match.name, "title": match.title, "path": str(match.path), "text": text})
    else:
        print(match.path if path_only else text, end="\n" if path_only else "")
