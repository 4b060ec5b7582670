"""The number of parameters computed from a config.json equals that of the model that transformers builds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rftcore.trainer.model_shape import model_shape
from rftdata.errors import ConfigError, ModelError
from tests.support.published_models import LLAMA_8B, QWEN_1_5B, QWEN_8B

SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 96,
    "intermediate_size": 224,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
CONFIGS = [
    LLAMA_8B,
    LlamaConfig(**SIZES, tie_word_embeddings=True),
    LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    LlamaConfig(**SIZES, head_dim=32),
    MistralConfig(**SIZES),
    QWEN_1_5B,
    Qwen2Config(**SIZES),
    QWEN_8B,
    Qwen3Config(**SIZES, attention_bias=True, tie_word_embeddings=True),
    MixtralConfig(**SIZES),
    Qwen2MoeConfig(**SIZES, shared_expert_intermediate_size=80),
    Qwen3MoeConfig(**SIZES),
    Qwen3MoeConfig(
        **SIZES, num_experts=5, moe_intermediate_size=40, attention_bias=True, head_dim=24, decoder_sparse_step=2
    ),
    Qwen3MoeConfig(**SIZES, num_experts=5, moe_intermediate_size=40, mlp_only_layers=[0]),
]


def parameters(config: PretrainedConfig) -> int:
    """Count the parameters of the real model, built without memory; tied ones count once."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.model_type}-{config.hidden_size}")
def test_the_number_of_parameters_equals_that_of_the_real_model(config: PretrainedConfig) -> None:
    assert model_shape(config.to_dict()).parameters == parameters(config)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.model_type}-{config.hidden_size}")
def test_missing_sizes_have_the_default_of_the_family(config: PretrainedConfig) -> None:
    # Key heads are always written: the families' defaults for them differ, and every published model names them.
    written = {**config.to_diff_dict(), **{name: getattr(config, name) for name in SIZES}}
    assert model_shape(written) == model_shape(config.to_dict())


@pytest.mark.parametrize("modules", ["all-linear", ["q_proj", "v_proj"], ["mlp.down_proj"]])
def test_the_number_of_adapter_parameters_equals_that_of_peft(modules: str | list[str]) -> None:
    from peft import LoraConfig, get_peft_model

    config = Qwen2Config(**SIZES)
    model = get_peft_model(AutoModelForCausalLM.from_config(config), LoraConfig(r=8, target_modules=modules))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert model_shape(config.to_dict()).adapter_parameters(8, modules) == trained


def test_adapters_of_no_layer_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"names no linear layer .* q_proj"):
        model_shape(QWEN_8B.to_dict()).adapter_parameters(8, ["query_key_value"])


def test_experts_have_no_adapters_and_are_not_split() -> None:
    shape = model_shape(Qwen3MoeConfig(**SIZES).to_dict())
    assert shape.adapter_parameters(8, "all-linear") == shape.adapter_parameters(
        8, ["q_proj", "k_proj", "v_proj", "o_proj"]
    )
    with pytest.raises(
        ConfigError, match=r"mixture of experts that can have no adapter \(got \['gate_proj'\]\).*q_proj"
    ):
        shape.adapter_parameters(8, ["q_proj", "gate_proj"])
    with pytest.raises(ConfigError, match=r"tensor_parallel cannot split this model \(got 'qwen3_moe'\)"):
        shape.refuse_uneven_division(2)


@pytest.mark.parametrize("model_type", ["gpt_oss", "gemma3_text", None])
def test_a_family_of_unknown_sizes_is_refused(model_type: str | None) -> None:
    with pytest.raises(ModelError, match="llama, mistral, qwen2, qwen3"):
        model_shape({**SIZES, "model_type": model_type})


def test_a_missing_size_is_named() -> None:
    with pytest.raises(ModelError, match="lacks hidden_size, vocab_size"):
        model_shape({**SIZES, "model_type": "llama", "hidden_size": None, "vocab_size": None})
