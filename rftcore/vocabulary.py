"""The vocabularies of a run's models: all must number the policy's tokens alike."""

from __future__ import annotations

from pathlib import Path

from rftdata.errors import ConfigError


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
