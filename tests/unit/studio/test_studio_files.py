"""Files of the studio: vendored ones are what their makers published, and every text of the pages has its translation."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import re
from pathlib import Path

import pytest
from fastapi.routing import APIRoute

from rftcore.studio.app import _router
from rftcore.studio.pages import all_pages
from rftcore.studio.sign_in import router as sign_in
from rftcore.studio.translations import LANGUAGES, texts

STUDIO = Path(inspect.getfile(all_pages)).parents[1]
AXE = Path(__file__).parents[2] / "support" / "axe"
_TEXT = re.compile(r"""\b_\(\s*(?:"([^"]+)"|'([^']+)')""")


@pytest.mark.parametrize("folder", [STUDIO / "static" / "vendor", AXE], ids=lambda folder: folder.name)
def test_vendored_files_are_unchanged_and_have_their_licence(folder: Path) -> None:
    recorded = json.loads((folder / "vendored.json").read_text())
    files = {name: digest for package in recorded for name, digest in package["files"].items()}
    assert {file.name for file in folder.iterdir()} == {*files, "vendored.json"}
    assert {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in files} == files
    for package in recorded:
        assert package["version"] and package["licence"] and [name for name in package["files"] if "LICENSE" in name]


def test_own_scripts_stay_small_and_need_no_build() -> None:
    lines = [line.strip() for file in (STUDIO / "static").glob("*.js") for line in file.read_text().splitlines()]
    assert len([line for line in lines if line and not line.startswith("//")]) <= 600


def english_texts() -> set[str]:
    """Texts that templates and Python name: `_("…")`, titles of pages, `visit.text("…")`, and problems of the sign-in."""
    found = {a or b for file in (STUDIO / "templates").glob("*.html") for a, b in _TEXT.findall(file.read_text())}
    found |= {page.title for page, _ in all_pages()}
    for file in STUDIO.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and (_name(node) in ("text", "_sign_in_page")):
                found |= {
                    each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)
                }
    return found


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


@pytest.mark.parametrize("language", [each for each in LANGUAGES if each != "en"])
def test_every_text_is_translated_and_no_translation_is_left_over(language: str) -> None:
    from rftcore.studio.rendering import ROLES, STATES, TARGETS, TYPES

    wanted = english_texts() | {text for names in (ROLES, STATES, TARGETS, TYPES) for text in names.values()}
    assert sorted(wanted - texts(language).keys()) == []
    assert sorted(texts(language).keys() - wanted) == []
    named = re.compile(r"{\w+}")
    assert [text for text in wanted if set(named.findall(text)) != set(named.findall(texts(language)[text]))] == []


def test_no_route_blocks_the_event_loop() -> None:
    routes = [route for router in (_router, sign_in, *(router for _, router in all_pages())) for route in router.routes]
    waiting = [
        route.path for route in routes if isinstance(route, APIRoute) and inspect.iscoroutinefunction(route.endpoint)
    ]
    assert waiting == ["/events"]


def test_templates_have_no_inline_script_style_or_unescaped_text() -> None:
    for file in (STUDIO / "templates").glob("*.html"):
        text = file.read_text()
        assert not re.search(r"\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)|<style|\|\s*safe\b|autoescape", text), file.name
