"""Texts of the pages in the reader's language. English texts are the keys; files of each other language have the translations."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

LANGUAGES = {"en": "English", "zh": "中文"}
COOKIE = "rft_studio_language"


@cache
def texts(language: str) -> Mapping[str, str]:
    """Return the translations into a language, by English text."""
    if language == "en":
        return {}
    files = sorted(Path(__file__).parent.glob(f"{language}*.json"))  # zh.json, and one for each group of pages
    return {key: value for file in files for key, value in json.loads(file.read_text(encoding="utf-8")).items()}


def translate(language: str, text: str) -> str:
    """Return an English text in a language; itself where there is no translation."""
    return texts(language).get(text, text)


def chosen_language(cookie: str | None, accepted: str) -> str:
    """Return the language of a reader.

    Args:
        cookie: what the reader has chosen before.
        accepted: the header Accept-Language.
    """
    if cookie in LANGUAGES:
        return cookie
    for part in accepted.split(","):
        name = part.partition(";")[0].strip().lower().partition("-")[0]
        if name in LANGUAGES:
            return name
    return "en"
