"""The form of a response: tags in their order, or a regular expression (the format reward of DeepSeek-R1, arXiv 2501.12948, section 2.2.2).

    - {name: format, weight: 0.2}
    - {name: format, tags: [reasoning, answer]}
    - {name: format, pattern: '.*\\boxed\\{.+\\}\\s*'}

1 if the response is `<think>…</think>` and `<answer>…</answer>`, with nothing but white space before, between and after, each tag once and none of them
empty; else 0. A response that was cut off has no end, so it is 0.

A pattern must match the whole response; its `.` matches line breaks, too.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from rftcore.workflows.task import Task, Turn
from rftdata.errors import ConfigError

_TAG = re.compile(r"[A-Za-z][\w-]*")


class Format:
    """A reward of 1 for the right form.

    Args:
        tags: names of the tags, in their order; think and answer by default.
        opened: whether the prompt ends with the first tag, as the chat templates of some reasoning models do, so that the response begins within it.
        pattern: regular expression in place of tags.

    Raises:
        ConfigError: a tag or the pattern is not valid.
    """

    def __init__(
        self,
        *,
        tags: Annotated[list[str], Field(min_length=1)] | None = None,
        opened: bool = False,
        pattern: str | None = None,
    ) -> None:
        if pattern is not None and (tags is not None or opened):
            raise ConfigError("pattern takes the place of tags and opened", todo="remove the pattern or the tags")
        names = tags or ["think", "answer"]
        wrong = [name for name in names if not _TAG.fullmatch(name)]
        if wrong or len(set(names)) < len(names):
            raise ConfigError(
                "tags are different names without brackets",
                value=names,
                allowed="letters, digits, _ and -, such as [think, answer]",
            )
        self._names, self._opened = names, opened
        try:
            self._pattern = None if pattern is None else re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ConfigError(f"pattern is not a regular expression: {error}", value=pattern) from error
        # A pattern of one's own may take very long.
        self.runs_in_explorer = pattern is None

    def __call__(self, turn: Turn, task: Task) -> float:
        """Return 1 or 0."""
        if turn.finish_reason != "stop":
            return 0.0
        if self._pattern is not None:
            return float(self._pattern.fullmatch(turn.response) is not None)
        return float(self._has_tags(turn.response))

    def _has_tags(self, text: str) -> bool:
        rest = text.strip()
        for place, name in enumerate(self._names):
            opening, closing = "" if self._opened and place == 0 else f"<{name}>", f"</{name}>"
            content, closed, after = rest.removeprefix(opening).partition(closing)
            once = text.count(f"<{name}>") == bool(opening) and text.count(closing) == 1
            if not (rest.startswith(opening) and closed and content.strip() and once):
                return False
            rest = after.lstrip()
        return not rest
