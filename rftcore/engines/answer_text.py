"""Text of a sampled answer, as workflows, rewards and the buffer see it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Bytes of a character in UTF-8: each may be a token.
_MAX_CHARACTER_TOKENS = 4


class AnswerText:
    """Decodes the tokens of answers.

    Special tokens that mark something within an answer, such as the call of a tool, are part of its text. Those that begin, end or fill a
    text (the tokenizer's bos, eos, unk, sep, pad, cls and mask) are not. Neither is a special token that ended the answer, such as a template's
    end of a turn.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        named = (getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
        self._left_out = {token_id for token_id in named if token_id is not None}
        added = tokenizer.added_tokens_decoder.items()
        self._special = {*tokenizer.all_special_ids, *(token_id for token_id, token in added if token.special)}

    def __call__(self, token_ids: Sequence[int], *, ended: bool, stop: Iterable[str] = ()) -> str:
        """Return the text of an answer.

        Args:
            ended: whether the answer ended by itself, with its last token, or by a text in `stop`.
            stop: where the answer ended, its text ends before the first of these that occurs in it.
        """
        text = self.decode(token_ids)
        starts = [start for start in map(text.find, stop) if start >= 0] if ended else []
        if starts:
            return text[: min(starts)]
        return self.decode(token_ids[:-1]) if ended and token_ids and token_ids[-1] in self._special else text

    def ends_an_answer(self, token_id: int) -> bool:
        """Return whether an answer may end with a token that is no part of its text."""
        return token_id in self._special

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens of an answer that goes on."""
        return str(self._tokenizer.decode([token_id for token_id in token_ids if token_id not in self._left_out]))


class GrowingText:
    """The text of an answer while its tokens are sampled, without an end that further tokens may change.

    Decoding takes time in proportion to the new tokens: those before them are decoded with the new ones only as far as the last two additions.
    """

    def __init__(self, text: AnswerText) -> None:
        self._answer = text
        self._token_ids: list[int] = []
        self._before = self._known = 0  # beginnings of the last two additions
        self._text = ""

    def add(self, token_ids: Sequence[int]) -> str:
        """Return the text with further tokens."""
        self._token_ids += token_ids
        end = len(self._token_ids)
        while end > self._known and self._answer.ends_an_answer(self._token_ids[end - 1]):
            end -= 1
        if end == self._known:
            return self._text
        known = self._answer.decode(self._token_ids[self._before : self._known])
        found = self._answer.decode(self._token_ids[self._before : end])
        if found.endswith("\ufffd"):  # a part of a character
            end, found = self._decided(end, found)
        if end > self._known:
            self._text += found[len(known) :]
            self._before, self._known = self._known, end
        return self._text

    def _decided(self, end: int, found: str) -> tuple[int, str]:
        """Return the end and the text of the tokens that hold no part of a character that further tokens may complete.

        Only the last few tokens may be completed. So a long answer of nothing but parts of characters is decoded in linear time, too.
        """
        last = end - _MAX_CHARACTER_TOKENS
        for place in range(last, max(self._known, last - _MAX_CHARACTER_TOKENS), -1):
            text = self._answer.decode(self._token_ids[self._before : place])
            if found.startswith(text):
                return place, text
        return self._known, ""
