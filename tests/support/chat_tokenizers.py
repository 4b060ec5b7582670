"""Small byte-level tokenizers with the chat templates, and the special tokens, of published models; the templates are those that TRL's package contains."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

# By name of the template. The end of an answer is the end token of each model.
ENDS = {
    "deepseek_r1_distill": "<｜end▁of▁sentence｜>",
    "gemma3": "<end_of_turn>",
    "gemma4_v5": "<turn|>",
    "glm4moe": "<|user|>",
    "gptoss": "<|return|>",
    "llama3_1": "<|eot_id|>",
    "phi3_5": "<|end|>",
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
}
_FURTHER = {"gptoss": ["<|constrain|>"]}  # special tokens that are sampled, and that the template does not write
_SPECIAL = re.compile(
    r"<\|[a-z0-9_/]+\|>|<｜[A-Za-z▁]+｜>|<(?:start|end)_of_turn>|<(?:bos|eos|pad)>"
    r"|<\|[a-z_\"]+>|<[a-z_]+\|>|<\|\"\|>|\[gMASK\]|<sop>"
)
_TEXT = "the answer is 42. <think> no </think> <tool_call> user assistant system tool 1 + 1 = 2 " * 3


@cache
def chat_tokenizer(name: str | None) -> Any:
    """A tokenizer of some 500 byte pairs; without a template if `name` is None. Do not change it: it is shared."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    template = None if name is None else _template(name)
    end = "<eos>" if name is None else ENDS[name]
    special = sorted({"<bos>", "<pad>", end, *_SPECIAL.findall(template or ""), *_FURTHER.get(name or "", [])})
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    found = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token=end,
        pad_token="<pad>",
        additional_special_tokens=[token for token in special if token not in ("<bos>", "<pad>", end)],
        clean_up_tokenization_spaces=False,
    )
    found.chat_template = template
    return found


def _template(name: str) -> str:
    import trl

    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
