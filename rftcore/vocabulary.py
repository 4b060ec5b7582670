"""The vocabularies of a run's models: their files must be whole, and all must number the policy's tokens alike."""

from __future__ import annotations

import json
from pathlib import Path

from rftdata.errors import ConfigError, ModelError

_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def refuse_damaged_tokenizer(folder: Path, key: str) -> None:
    """Refuse a model whose tokenizer files cannot be read, as after an interrupted copy. Roles would only find it once they start.

    Args:
        key: the setting with the model's path, for messages.

    Raises:
        ModelError: names the file and what is wrong with it.
    """
    file = folder
    try:
        for file in filter(Path.is_file, (folder / name for name in _SETTINGS)):
            if not isinstance(json.loads(file.read_text(encoding="utf-8")), dict):
                raise ValueError("it holds no JSON object")
        file = folder / "tokenizer.json" if (folder / "tokenizer.json").is_file() else folder
        _vocabulary(folder)
    except Exception as error:  # that of `tokenizers` is a plain Exception
        reason = " ".join(str(error).split())[:400]
        raise ModelError(
            f"the tokenizer of {key} cannot be read: {reason}",
            value=str(file),
            todo=f"copy or download the model again, or correct {key}",
        ) from error


def refuse_other_tokenizer(policy: Path, other: Path, key: str) -> None:
    """Refuse another model of a run unless it has every token of the policy under the same number. It may have further tokens.

    Args:
        key: the setting with the other model's path, for messages.

    Raises:
        ConfigError: names a token that differs.
    """
    if policy == other:
        return
    ours, theirs = _vocabulary(policy), _vocabulary(other)
    different = [token for token, number in ours.items() if theirs.get(token) != number]
    if different:
        first = min(different, key=ours.__getitem__)
        there = f"number {theirs[first]}" if first in theirs else "unknown"
        raise ConfigError(
            f"the model of {key} has another tokenizer than the policy: the policy's token {first!r} (number {ours[first]}) is {there} in it, and "
            f"{len(different):,} of {len(ours):,} tokens differ, so it cannot read what the policy writes",
            value=str(other),
            todo=f"name a model with the policy's tokenizer in {key}",
        )


def _vocabulary(folder: Path) -> dict[str, int]:
    """Return the number of each token."""
    if (folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab(with_added_tokens=True)
    from transformers import AutoTokenizer

    vocabulary: dict[str, int] = AutoTokenizer.from_pretrained(folder).get_vocab()
    return vocabulary
