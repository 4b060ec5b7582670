"""The answers of a request while they are sampled, for streams: what of their texts may be shown already.

What is shown never changes. So an end is held back that may be the beginning of a stop text or of a call, a part of a character, a special token that may
have ended the answer, or space, which templates strip.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rftcore.engines.answer_text import AnswerText, GrowingText
from rftcore.engines.base import Decoding
from rftcore.tools.formats.unfinished import before_marks


class Parts:
    """The answers of one request. For one event loop.

    Args:
        model: its name for the program.
        text: decodes the answers.
        num: of answers.

    Attributes:
        shown: of each answer, the beginning of its content that may be shown.
        changed: done once `shown` has changed; there is another one then.
    """

    def __init__(self, model: str, text: AnswerText, num: int) -> None:
        self.model = model
        self.shown = [""] * num
        self.changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._texts = [GrowingText(text) for _ in range(num)]
        self._content: Callable[[str], str] | None = None
        self._is_closed = False

    def begin(self, content: Callable[[str], str] | None) -> None:
        """Set what returns the content of an unfinished answer; None where the whole text is the content."""
        self._content = content

    def listen(self, number: int, token_ids: Sequence[int], decoding: Decoding) -> None:
        """Add tokens to an answer; a `Listener`."""
        if self._is_closed:
            return
        grown = self._texts[number].add(token_ids)
        found = before_marks(grown, decoding.stop)
        found = (found if self._content is None else self._content(found)).rstrip()
        if len(found) > len(self.shown[number]):
            self.shown[number] = found
            self.changed.set_result(None)
            self.changed = asyncio.get_running_loop().create_future()

    def close(self) -> list[str]:
        """Return what is shown of each answer, which is final: the answers are whole."""
        self._is_closed = True
        return self.shown


def continued(shown: str, content: str) -> str | None:
    """Return a content that begins with what was shown of it; None if it does not. Space does not count, as formats of calls strip what stands between them."""
    if content.startswith(shown):
        return content
    letters, place = "".join(shown.split()), 0
    for end, letter in enumerate(content):
        if place == len(letters):
            return shown + content[end:]
        if letter.isspace():
            continue
        if letter != letters[place]:
            return None
        place += 1
    return shown if place == len(letters) else None
