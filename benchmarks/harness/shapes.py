"""Models with random weights: their shapes, and folders that contain them.

A model is written once as a Hugging Face folder in bfloat16, so that every case of every system starts from the same numbers. A case that trains
float32 weights loads them into float32.
"""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_INITIALIZER_RANGE = 0.02
_SHM = Path("/dev/shm")


@dataclass(frozen=True)
class Shape:
    """Decoder-only transformer; `model_type` is that of transformers.

    Attributes:
        num_experts: experts of each layer, with `intermediate_size` each; 0 for a dense model.
        experts_per_token: experts that compute a token.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int = 151_936
    tied: bool = True
    rope_theta: float = 1.0e6
    num_experts: int = 0
    experts_per_token: int = 0

    def config(self) -> dict[str, Any]:
        """Return the content of config.json."""
        experts = {
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.experts_per_token,
            "moe_intermediate_size": self.intermediate_size,
            "head_dim": self.hidden_size // self.num_heads,
            "norm_topk_prob": True,
        }
        return (experts if self.num_experts else {}) | {
            "model_type": self.model_type,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": 262_144,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rms_norm_eps": 1.0e-6,
            "initializer_range": _INITIALIZER_RANGE,
            "use_cache": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }

    @property
    def num_parameters(self) -> int:
        """Number of parameters; tied ones count once."""
        head_size = self.hidden_size // self.num_heads
        width = (self.num_heads + 2 * self.num_kv_heads) * head_size
        bias = width if self.model_type == "qwen2" else 0
        norms = 2 * head_size if self.num_experts else 0  # of queries and keys
        attention = self.hidden_size * (width + self.num_heads * head_size) + bias + norms
        router = self.hidden_size * self.num_experts
        experts = max(1, self.num_experts) * 3 * self.hidden_size * self.intermediate_size
        layer = attention + router + experts + 2 * self.hidden_size
        return (1 if self.tied else 2) * self.vocab_size * self.hidden_size + self.num_layers * layer + self.hidden_size

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters that compute a token, without experts that do not receive it."""
        idle = self.num_experts - self.experts_per_token
        return self.num_parameters - self.num_layers * idle * 3 * self.hidden_size * self.intermediate_size

    @property
    def mean_logprob(self) -> float:
        """Log-probability of a random token with random weights: logits are normal with standard deviation s, so their log-sum-exp is log V + s²/2."""
        variance = _INITIALIZER_RANGE**2 * self.hidden_size
        return -(math.log(self.vocab_size) + variance / 2)


# SmolLM2-135M, Qwen2.5-0.5B and -1.5B, and Llama-3.1-8B; shapes with experts are small models of the kind of Qwen3-30B-A3B.
SHAPES = {
    "tiny": Shape("qwen2", 64, 128, 2, 4, 2, vocab_size=512),
    "small": Shape("llama", 256, 512, 4, 8, 4, vocab_size=512),
    "tiny-experts": Shape("qwen3_moe", 64, 48, 2, 2, 1, vocab_size=512, num_experts=8, experts_per_token=2),
    "135M": Shape("llama", 576, 1536, 30, 9, 3, vocab_size=49_152, rope_theta=1.0e5),
    "0.5B": Shape("qwen2", 896, 4864, 24, 14, 2),
    "1.5B": Shape("qwen2", 1536, 8960, 28, 12, 2),
    "1.4B-experts": Shape("qwen3_moe", 1024, 512, 12, 16, 4, num_experts=64, experts_per_token=8),
    "8B": Shape("llama", 4096, 14336, 32, 32, 8, vocab_size=128_256, tied=False, rope_theta=5.0e5),
}


def write_model(shape: Shape, folder: Path) -> None:
    """Write random weights as a Hugging Face folder in bfloat16, unless the folder exists."""
    if folder.exists():
        return
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape.config()), dtype=torch.bfloat16)
    draft = folder.with_suffix(".draft")
    model.save_pretrained(draft)
    draft.rename(folder)


def spacious_folder(num_bytes: int) -> Path | None:
    """Return a folder in memory with so much room for `tempfile`, None for the usual folder."""
    return _SHM if os.access(_SHM, os.W_OK) and shutil.disk_usage(_SHM).free > num_bytes else None
