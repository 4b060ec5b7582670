"""Write a random Llama of about a million parameters for chats, with one token per character and per given word: two cores train it in minutes.

Usage: python examples/small_chat_model.py FOLDER [WORD ...] [--hidden-size 128] [--layers 4] [--seed 0]
"""

from __future__ import annotations

import argparse
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>", "<assistant>", "<user>", "<tool>"]
CHARACTERS = ["\n", *string.digits, *string.ascii_letters, *string.punctuation, " "]
# The same text whatever follows, so each turn extends the tokens of the one before. A system message reads as a user's.
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'assistant' %}{{- '<assistant>' + message['content'] + eos_token }}
    {%- elif message['role'] == 'tool' %}{{- '<tool>' + message['content'] }}
    {%- else %}{{- '<user>' + message['content'] }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<assistant>' }}{%- endif %}"""


def make_model(
    folder: Path, words: Sequence[str] = (), hidden_size: int = 128, num_layers: int = 4, seed: int = 0
) -> Path:
    """Write the model and its tokenizer to `folder`; the same seed gives the same weights.

    Args:
        words: sequences of lower-case or of upper-case letters that are one token each.
        hidden_size: a multiple of 64, since heads of 32 are the smallest that vLLM computes on a CPU.
    """
    tokens = [*SPECIAL, *CHARACTERS, *sorted(set(words) - set(CHARACTERS))]
    # A known word where it stands alone; otherwise each character.
    known = "|".join(sorted(words, key=len, reverse=True))
    pattern = rf"\b(?:{known})\b|[\s\S]" if words else r"[\s\S]"
    tokenizer = make_tokenizer(tokens, CHAT_TEMPLATE, pattern, additional_special_tokens=SPECIAL[4:])
    return write_model(folder, tokenizer, hidden_size, num_layers, seed)


def make_tokenizer(
    tokens: Sequence[str], chat_template: str, pattern: str = r"[\s\S]", **settings: Any
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with these tokens, which begin with <pad>, <bos>, <eos> and <unk>; `pattern` finds them in a text."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        **settings,
    )


def write_model(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    hidden_size: int,
    num_layers: int,
    seed: int,
    context_length: int = 1024,
) -> Path:
    """Write a random Llama with the tokens of a tokenizer, and the tokenizer, to `folder`."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden_size,
            intermediate_size=4 * hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=hidden_size // 32,
            num_key_value_heads=hidden_size // 64,
            max_position_embeddings=context_length,
            tie_word_embeddings=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            dtype="float32",
        )
    )
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("words", nargs="*", help="words that are one token each")
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(make_model(options.folder, options.words, options.hidden_size, options.layers, options.seed))


if __name__ == "__main__":
    main()
