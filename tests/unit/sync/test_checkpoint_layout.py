"""Tensors of a model under the names of its checkpoint: views that transformers' own files agree with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM as Auto
from transformers import (
    GPTNeoXConfig,
    GptOssConfig,
    GraniteMoeConfig,
    HrmTextConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from rftcore.engines.weights_fit import WeightsFit
from rftcore.sync.checkpoint_layout import CheckpointLayout
from rftcore.sync.files.weights_file import read_shapes_of_model
from rftdata.errors import ConfigError
from tests.support.weights import write_weights

SIZES: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_key_value_heads": 2, "num_local_experts": 3, "num_experts_per_tok": 2}
QWEN3 = Qwen3MoeConfig(**SIZES, moe_intermediate_size=6, num_experts=3, num_experts_per_tok=2, head_dim=4)
CONFIGS: dict[str, PretrainedConfig] = {
    "one matrix per expert": QWEN3,
    "other names for layers": MixtralConfig(**SIZES, **EXPERTS),
    "experts stacked": GraniteMoeConfig(**SIZES, **EXPERTS),
    "the same": GptOssConfig(**SIZES, **EXPERTS, head_dim=4),
    "no experts": LlamaConfig(**SIZES),
    "another name for the head": GPTNeoXConfig(**SIZES),
}


def random_model(config: PretrainedConfig, folder: Path) -> PreTrainedModel:
    """A model that is opened from a folder that transformers has written."""
    torch.manual_seed(0)
    Auto.from_config(config).save_pretrained(folder)
    model: PreTrainedModel = Auto.from_pretrained(folder, dtype=torch.float32)
    return model


@pytest.mark.parametrize("case", CONFIGS)
def test_views_are_the_tensors_that_transformers_has_written(case: str, tmp_path: Path) -> None:
    model = random_model(CONFIGS[case], tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    state = model.state_dict()
    views = CheckpointLayout(model).of_state(state.items())
    assert stored.keys() <= views.keys()
    assert all(torch.equal(views[name], tensor) for name, tensor in stored.items())
    for number, view in enumerate(views.values()):
        view.fill_(float(number))
    assert sum(view.sum() for view in views.values()) == sum(tensor.sum() for tensor in state.values())
    write_weights(views.items(), tmp_path / "published")
    WeightsFit(read_shapes_of_model(tmp_path), None).refuse_file(tmp_path / "published")


def test_rows_that_a_rank_holds_contain_their_experts(tmp_path: Path) -> None:
    model = random_model(QWEN3, tmp_path)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    layout, fused = CheckpointLayout(model), model.get_parameter(name).detach()
    pieces = {piece.name.removeprefix("model.layers.1.mlp.experts."): piece for piece in layout.pieces(name) or ()}
    assert [*pieces] == [f"{expert}.{half}_proj.weight" for expert in range(3) for half in ("gate", "up")]
    assert torch.equal(pieces["2.up_proj.weight"].view(fused[1:], 1), fused[2, 6:])
    assert pieces["0.up_proj.weight"].view(fused[1:], 1).shape == (0, 8)


def test_a_conversion_that_is_not_a_view_is_refused() -> None:
    with torch.device("meta"):
        model = Auto.from_config(HrmTextConfig(**SIZES))
    with pytest.raises(ConfigError, match=r"gate_up_proj.weight is computed from several tensors .*\(got 'hrm_text'\)"):
        CheckpointLayout(model)
