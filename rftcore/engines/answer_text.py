"""Text of a sampled answer, as workflows, rewards and the buffer see it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        text = self._decode(token_ids)
        starts = [start for start in map(text.find, stop) if start >= 0] if ended else []
        if starts:
            return text[: min(starts)]
        return self._decode(token_ids[:-1]) if ended and token_ids and token_ids[-1] in self._special else text

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([token_id for token_id in token_ids if token_id not in self._left_out]))
