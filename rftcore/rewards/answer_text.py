"""The part of a response that is its answer, for rewards that compare answers."""

from __future__ import annotations

import re

from rftcore.workflows.task import Turn


def final_text(turn: Turn, tag: str | None) -> str:
    """Return the text of a response without its thoughts; empty if it was cut off.

    Args:
        tag: the answer is the text in the last `<tag>…</tag>`; if the response has no such tags, all of the response after `</think>`.
    """
    if turn.finish_reason != "stop":
        return ""
    text = turn.response
    if tag is not None:
        found = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, re.DOTALL)
        if found:
            return str(found[-1]).strip()
    _, mark, rest = text.rpartition("</think>")
    if not mark and "<think>" in text:
        return ""  # nothing but thoughts
    return rest.strip()
