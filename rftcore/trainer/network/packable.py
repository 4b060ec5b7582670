"""Which families of models can be computed on packed sequences, and up to which length, according to their configurations."""

from __future__ import annotations

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from rftdata.errors import ConfigError

_WITH_SINKS = frozenset({"gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash"})
_WITH_STATE = frozenset({"recurrent_gemma"})
# Their masks depend on more than the places of tokens.
_WITH_OWN_MASK = frozenset({"doge"})
_NOT_HANDING_ON = frozenset({"nemotron"})
_LARGEST_FLASH_HEAD = 256


def refuse_unpackable(config: PretrainedConfig) -> None:
    """Refuse a causal language model whose attention `packed_attention` cannot replace.

    Raises:
        ConfigError: tokens affect each other outside softmax attention, or attention changes their scores.
    """
    text = config.get_text_config()
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)
    layers = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if (
        layers
        or text.model_type in _WITH_STATE
        or (model_class is not None and not getattr(model_class, "_supports_attention_backend", False))
    ):
        reason = (
            "its layers carry a state along the sequence"
            if layers or text.model_type in _WITH_STATE
            else "it computes attention itself"
        )
    elif getattr(text, "attn_logit_softcapping", None):
        reason = "it caps attention scores"
    elif text.model_type in _WITH_SINKS:
        reason = "its attention has sinks"
    elif text.model_type in _WITH_OWN_MASK:
        reason = "it masks attention by more than the order of tokens"
    elif text.model_type in _NOT_HANDING_ON:
        reason = "its layers do not tell attention which tokens belong together"
    else:
        return
    raise unpackable(reason, text)


def unpackable(reason: str, config: PretrainedConfig) -> ConfigError:
    """Return the error for a model that the trainer cannot compute."""
    return ConfigError(
        f"the trainer packs sequences without padding, which this model cannot: {reason}",
        value=config.model_type,
        allowed="models of plain softmax attention, such as llama, mistral, qwen2, qwen3, phi",
        todo="name another model in model.path",
    )


def length_limit(config: PretrainedConfig) -> int | None:
    """Return the number of tokens up to which rotary frequencies do not depend on the longest sequence of a packed row; None where they never do."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    by_layer = [each for each in rope.values() if isinstance(each, dict)] or [rope]
    limits = [
        int(each.get("original_max_position_embeddings") or text.max_position_embeddings)
        for each in by_layer
        if each.get("rope_type") in ("dynamic", "longrope")
    ]
    return min(limits, default=None)


def refuse_longer(length: int, longest: int, config: PretrainedConfig) -> None:
    """Refuse a sequence beyond the `length_limit` of a model.

    Raises:
        ConfigError: the sequence is longer, so sequences packed beside it would be computed with other frequencies than alone.
    """
    if length > longest:
        raise ConfigError(
            "this model's rotary frequencies depend on the length of a text beyond its original context, so longer sequences cannot be packed",
            value=f"{length} tokens, {config.model_type}",
            allowed=f"up to {longest} tokens",
            todo="set explorer.max_tokens and prompts so that sequences stay within it, or train a model with another rope_type",
        )


def suits_flash(config: PretrainedConfig) -> bool:
    """Return whether FlashAttention has kernels for the model's heads: of a size that is a multiple of 8, up to 256, and values of the size of keys.

    Models with latent attention declare a size of values, which usually differs from that of keys.
    """
    text = config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return getattr(text, "v_head_dim", None) is None and size % 8 == 0 and size <= _LARGEST_FLASH_HEAD
