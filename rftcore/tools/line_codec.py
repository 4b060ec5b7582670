"""A codec that decodes whole lines of UTF-8, for clients that join what they have read so far with every piece.

The package `mcp` searches all pieces of an unfinished line again with each further piece, which takes time quadratic in the line's length: seconds for
10 MB, in which the event loop hardly does anything else. With this codec as its encoding it receives lines as a whole.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

UTF_8_LINES = "utf_8_lines"


class _LineDecoder(codecs.IncrementalDecoder):
    """Returns nothing before the end of a line."""

    def __init__(self, errors: str = "strict") -> None:
        super().__init__(errors)
        self._pieces: list[bytes] = []

    def decode(self, input: ReadableBuffer, final: bool = False) -> str:
        piece = bytes(input)
        end = len(piece) if final else piece.rfind(b"\n") + 1
        if not end and not final:
            self._pieces.append(piece)
            return ""
        whole = b"".join([*self._pieces, piece[:end]])
        self._pieces = [piece[end:]] if end < len(piece) else []
        return whole.decode("utf-8", self.errors)

    def reset(self) -> None:
        self._pieces.clear()


def _found(name: str) -> codecs.CodecInfo | None:
    if name != UTF_8_LINES:
        return None
    whole = codecs.lookup("utf-8")
    return codecs.CodecInfo(name=name, encode=whole.encode, decode=whole.decode, incrementaldecoder=_LineDecoder)


codecs.register(_found)
