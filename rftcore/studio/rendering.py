"""Templates: where they are, how values in them are printed, and what all of them may use."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from fastapi import Request

from rftcore.studio.differences import difference
from rftcore.studio.formats import FORMATS, number
from rftcore.studio.page import Page
from rftcore.studio.texts import exact, finalized, heat_class, shown
from rftcore.studio.translations import COOKIE, LANGUAGES, chosen_language, translate

HERE = Path(__file__).parent
STATIC = HERE / "static"
# htmx reads it from a meta element. Without scripts in answers, inline styles, eval, and a history of pages in the browser's storage.
HTMX_CONFIG = {
    "allowEval": False,
    "allowScriptTags": False,
    "includeIndicatorStyles": False,
    "historyCacheSize": 0,
    "selfRequestsOnly": True,
    "responseHandling": [
        {"code": "204", "swap": False},
        {"code": "[23]..", "swap": True},
        {"code": "[45]..", "swap": True, "error": True, "target": "#problems", "swapOverride": "innerHTML"},
    ],
}


# States of experiences and groups (rft.state), roles of messages, and types and targets of labels, as English texts to translate.
STATES = {
    "drawn": "trained on",
    "awaits verdict": "awaits the pipeline",
    "dropped": "dropped",
    "closed": "closed",
    "ready": "ready to train on",
    "planned": "planned",
    "claimed": "being sampled",
    "abandoned": "given up",
}
ROLES = {"system": "System", "user": "User", "assistant": "Model", "tool": "Tool"}

TYPES = {
    "bool": "yes or no",
    "number": "a number",
    "choice": "a choice",
    "tags": "tags",
    "rubric": "a rubric",
    "text": "a text",
    "edit": "a better response",
    "ranking": "a ranking",
    "spans": "marked parts",
    "turns": "values of turns",
}
TARGETS = {"experience": "Experience", "rollout": "Rollout", "group": "Group", "task": "Task"}


class Renderer:
    """Fills templates.

    Args:
        pages: in the order of the navigation.
    """

    def __init__(self, pages: Sequence[Page]) -> None:
        self._environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(HERE / "templates"),
            autoescape=True,
            finalize=finalized,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters |= {"exact": exact, "shown": shown, "heat": heat_class, "number": number, **FORMATS}
        self._environment.globals |= {
            "difference": difference,
            "pages": [page for page in pages if page.order is not None],
            "languages": LANGUAGES,
            "htmx_config": json.dumps(HTMX_CONFIG),
            "asset": asset,
            "roles": ROLES,
            "targets": TARGETS,
            "types": TYPES,
            "states": STATES,
        }

    def language_of(self, request: Request) -> str:
        """Return the language of the reader."""
        return chosen_language(request.cookies.get(COOKIE), request.headers.get("accept-language", ""))

    def render(self, template: str, language: str, /, **values: Any) -> str:
        """Return a template, filled."""

        def text(english: str, /, **named: Any) -> str:
            words = translate(language, english)
            return words.format(**named) if named else words

        return self._environment.get_template(template).render(_=text, language=language, **values)


_DIGESTS: dict[str, str] = {}


def asset(name: str) -> str:
    """Return the address of a static file, which changes with its content, so that browsers may keep it."""
    if name not in _DIGESTS:
        _DIGESTS[name] = hashlib.sha256((STATIC / name).read_bytes()).hexdigest()[:12]
    return f"/static/{name}?v={_DIGESTS[name]}"
