"""A tiny random Llama, and a tiny mixture of experts, with a character tokenizer, made on the spot: real model files that every engine opens."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

CHARACTERS = string.digits + string.ascii_lowercase + " +-*/=?.,:\n"
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] + ':' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)


def make_unopened_model(folder: Path) -> Path:
    """Write the files by which a model's folder is recognised, with a tokenizer of one token; what opens the model fails."""
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).touch()
    vocabulary = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": vocabulary}))
    return folder


def make_tiny_model(
    folder: Path,
    *,
    tied: bool = False,
    seed: int = 0,
    context_length: int = 256,
    hidden_size: int = 128,
    num_layers: int = 3,
    words: tuple[str, ...] = (),
    tokenizer: Any = None,
) -> Path:
    """Write a random fp32 Llama (0.75 million parameters by default) and its tokenizer (one token per character) to `folder`.

    `words` are further tokens; `tokenizer` is another model's. By default its vocabulary is no multiple of 64, and its head size is 32, the smallest that
    vLLM's CPU attention takes.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tokenizer or make_character_tokenizer(words)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context_length,
        tie_word_embeddings=tied,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        # Random logits would be almost uniform; larger weights give differences that a test can see.
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(4.0)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_tiny_moe(folder: Path, *, tied: bool = False, seed: int = 0, num_experts: int = 4) -> Path:
    """Write a random fp32 Qwen3-MoE of two layers, of whose experts each token uses two, and its tokenizer to `folder`.

    Its head size is that of `make_tiny_model`. Routers are far from uniform, so that experts get different numbers of tokens.
    """
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = make_character_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=num_experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.mul_(4.0)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_character_tokenizer(words: tuple[str, ...] = ()):  # type: ignore[no-untyped-def]  # transformers' class; not imported at module level
    """`<pad>`, `<bos>`, `<eos>`, `<unk>`, then one token per character of `CHARACTERS` and per word; with a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    vocabulary = {token: index for index, token in enumerate([*special, *CHARACTERS, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    pattern = "|".join([*words, r"[\s\S]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
