"""Choice of `sync.adapters: auto`: which engines compute adapters beside the model.

Merged weights W + BA are rounded to the engine's type. bfloat16 has 8 bits of mantissa, so an element of BA below W / 512 is lost: of updates with
|BA| of 1e-5 beside weights of 0.02, nine tenths. Adapters that stay beside the model keep theirs.
"""

from __future__ import annotations

from rftcore.engines.vllm_arguments import SLOT_RANKS

VLLM_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model families for which vLLM computes adapters of every linear layer."""


def reason_to_merge(engine: str, rank: int, model_type: str | None) -> str | None:
    """Return why an engine gets merged weights by default; None if it computes adapters beside the model.

    Args:
        engine: `explorer.engine`.
        rank: `trainer.lora.rank`.
        model_type: model_type in the model's config.json; None if the model is not on this machine.
    """
    if engine == "transformers":
        return None
    if engine != "vllm":
        return f"the engine {engine} is not known to compute adapters"
    if rank > SLOT_RANKS[-1]:
        return f"vLLM computes adapters up to rank {SLOT_RANKS[-1]}"
    if model_type is None:
        return "the model is not on this machine, so its family is unknown"
    if model_type not in VLLM_FAMILIES:
        return f"vLLM is not known to compute adapters of every layer of a {model_type} (it is for {', '.join(VLLM_FAMILIES)})"
    return None
