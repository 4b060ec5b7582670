"""Write a random Llama of 0.75 million parameters with one token per character: a model that two cores train in a minute.

Usage: python examples/sort_from_scratch/make_model.py FOLDER [HIDDEN_SIZE NUM_LAYERS]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # small_chat_model.py is beside this folder

from small_chat_model import make_tokenizer, write_model

TOKENS = ["<pad>", "<bos>", "<eos>", "<unk>", *"0123456789>"]
# A prompt is the question alone, after the beginning-of-text token.
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"


def make_model(folder: Path, hidden_size: int = 128, num_layers: int = 3, seed: int = 0) -> Path:
    """Write the model and its tokenizer to `folder`; the same seed gives the same weights.

    Args:
        hidden_size: a multiple of 64, since heads of 32 are the smallest that vLLM computes on a CPU.
    """
    return write_model(folder, make_tokenizer(TOKENS, CHAT_TEMPLATE), hidden_size, num_layers, seed, context_length=128)


if __name__ == "__main__":
    print(make_model(Path(sys.argv[1]), *map(int, sys.argv[2:])))
