"""Vectors of texts: the last hidden states of a transformers model, averaged over the tokens of each text.

Both sentence encoders and language models work; vectors of the latter have a large component in common (see
`operators.task.diversity_score`). The vector of a text does not depend on the texts it is encoded with, except for rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from rftcore.model_folder import resolve_model
from rftcore.whole_models import open_whole, opening

_BATCH_TOKENS = 8192
_SAMPLE = 1 << 20


class Encoder:
    """A model that turns texts into vectors.

    Args:
        model: a folder, or a Hugging Face id.
        max_tokens: longer texts are truncated.

    Raises:
        ModelError: the model cannot be found or opened.
    """

    def __init__(self, model: str, max_tokens: int) -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer

        folder = resolve_model(model)
        with _quiet(), opening(folder, "the stage's model"):
            self._tokenizer = AutoTokenizer.from_pretrained(folder)
            # `encode` averages, and needs no pooler.
            self._model = open_whole(AutoModel, folder, key="the stage's model", new="pooler.", dtype=torch.float32)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model.to(self._device).eval()
        limit = getattr(self._model.config, "max_position_embeddings", None) or max_tokens
        self._max_tokens = min(max_tokens, int(limit))

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return one vector per text, [texts, dimensions], not normalised; zeros for a text without tokens."""
        import torch

        tokens = [self._tokens(text) for text in texts]
        out = np.zeros((len(texts), int(self._model.config.hidden_size)), np.float32)
        # Texts of similar length together, so that little is computed on padding.
        order = sorted((i for i, ids in enumerate(tokens) if ids), key=lambda i: len(tokens[i]))
        start = 0
        while start < len(order):
            count = 1
            while start + count < len(order) and (count + 1) * len(tokens[order[start + count]]) <= _BATCH_TOKENS:
                count += 1
            rows = order[start : start + count]
            width = len(tokens[rows[-1]])
            ids = torch.zeros((count, width), dtype=torch.long)
            mask = torch.zeros((count, width), dtype=torch.long)
            for i, row in enumerate(rows):
                ids[i, : len(tokens[row])] = torch.tensor(tokens[row])
                mask[i, : len(tokens[row])] = 1
            with torch.inference_mode():
                hidden_BTD = self._model(
                    input_ids=ids.to(self._device), attention_mask=mask.to(self._device)
                ).last_hidden_state
                weight_BT1 = mask.to(self._device).unsqueeze(-1).to(hidden_BTD.dtype)
                mean_BD = (hidden_BTD * weight_BT1).sum(dim=1) / weight_BT1.sum(dim=1)
            out[rows] = mean_BD.float().cpu().numpy()
            start += count
        return out

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer(text, truncation=True, max_length=self._max_tokens)["input_ids"])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the progress bar, and the report that the head of a language model is not used."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def encoder_name(model: str, max_tokens: int) -> str:
    """Return the name under which vectors of this encoder are stored; for a folder, its checkpoint's digest is included.

    Raises:
        ModelError: the model cannot be found.
    """
    name = model
    if Path(model).expanduser().is_dir():
        name = f"{Path(model).name}@{_files_digest(Path(model).expanduser())}"
    return f"{name} ({max_tokens} tokens)"


def _files_digest(folder: Path) -> str:
    """Digest the weights' names, sizes, beginnings and ends, which is enough to distinguish checkpoints."""
    state = xxhash.xxh3_64()
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("config.json")]):
        size = file.stat().st_size
        state.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as content:
            state.update(content.read(_SAMPLE))
            content.seek(max(0, size - _SAMPLE))
            state.update(content.read(_SAMPLE))
    return state.hexdigest()[:12]
