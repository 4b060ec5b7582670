"""The estimate of a GPU's memory agrees with torch and with measurements; too little memory is refused with settings that help."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import (
    AutoModel,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rftcore.algorithms import build_algorithm
from rftcore.algorithms.losses.jsd import JSD
from rftcore.algorithms.losses.smoothed_sft import SmoothedSFT
from rftcore.config.trainer import LoraConfig, TrainerConfig
from rftcore.trainer.estimates import memory
from rftcore.trainer.estimates.activation_memory import activation_bytes
from rftcore.trainer.estimates.memory import (
    GIB,
    Estimate,
    Trained,
    engine_memory,
    host_memory,
    refuse_too_little_host_memory,
    refuse_too_little_memory,
    training_memory,
)
from rftcore.trainer.model_shape import ModelShape, model_shape, read_model_shape
from rftcore.trainer.network.head import Output, read_logits
from rftcore.trainer.network.optimizers import Optimizers
from rftcore.trainer.network.sharding import compile_layers
from rftdata.errors import ConfigError, ModelError
from tests.support.learning import make_batch, make_learner
from tests.support.models import make_tiny_model, make_tiny_moe
from tests.support.published_models import LLAMA_8B, QWEN_1_5B

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
QWEN = model_shape(QWEN_1_5B.to_dict())
LLAMA = model_shape(LLAMA_8B.to_dict())


def estimate(models: Trained | ModelShape = QWEN, **settings: Any) -> Estimate:
    models = models if isinstance(models, Trained) else Trained(policy=models)
    return training_memory(TrainerConfig(**settings), models)


def kept_bytes(config: PretrainedConfig, tokens: int, *, checkpointing: bool = False, compiled: bool = True) -> int:
    """Return the bytes that autograd keeps of a forward pass, beside the weights."""
    torch.manual_seed(0)
    model = AutoModel.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # The tensor itself, too: storage that was freed could come back at the same address.
        kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    elif compiled:
        compile_layers(model.layers, "aot_eager_decomp_partition")  # decides what to keep as the real compiler does
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    return sum(size for place, (size, _) in kept.items() if place not in weights)


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96}


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("family", [LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig, Qwen2MoeConfig])
def test_activations_of_a_layer_equal_those_that_torch_keeps(family: type[PretrainedConfig], compiled: bool) -> None:
    tokens = 192
    sizes = SMALL | (EXPERTS if family in (Qwen2MoeConfig, Qwen3MoeConfig) else {})
    sizes |= {"shared_expert_intermediate_size": 64} if family is Qwen2MoeConfig else {}
    one, three = (family(**sizes, num_hidden_layers=layers) for layers in (1, 3))
    torch.compiler.reset()
    kept = kept_bytes(three, tokens, compiled=compiled) - kept_bytes(one, tokens, compiled=compiled)
    first, third = (activation_bytes(model_shape(each.to_dict()), tokens, compiled=compiled) for each in (one, three))
    # A reciprocal norm of each row is kept, too, which is nothing at the width of a real model.
    assert kept == pytest.approx(third - first, rel=0.02)


def test_checkpointing_keeps_the_input_of_each_layer() -> None:
    tokens = 192
    one, three = (LlamaConfig(**SMALL, num_hidden_layers=layers) for layers in (1, 3))
    kept = kept_bytes(three, tokens, checkpointing=True) - kept_bytes(one, tokens, checkpointing=True)
    first, third = (
        activation_bytes(model_shape(config.to_dict()), tokens, checkpointing=True) for config in (one, three)
    )
    assert kept == third - first == 2 * 2 * tokens * SMALL["hidden_size"]


@pytest.mark.parametrize("make_model", [make_tiny_model, make_tiny_moe])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_weights_gradients_and_moments_equal_those_of_the_optimizer(
    tmp_path: Path, optimizer: str, make_model: Callable[[Path], Path]
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(make_model(tmp_path))
    config = TrainerConfig(optimizer=optimizer)
    optimizers = Optimizers(model, config.optimizer, 1e-3).members
    model(input_ids=torch.arange(8)[None]).logits.sum().backward()
    for each in optimizers:
        each.step()
    moments = [value for each in optimizers for state in each.state.values() for value in state.values() if value.ndim]
    found = training_memory(config, Trained(policy=read_model_shape(tmp_path)))
    assert found.part("weights") == sum(parameter.nbytes for parameter in model.parameters())
    assert found.part("gradients") == sum(parameter.grad.nbytes for parameter in model.parameters())
    assert found.part("optimizer") == sum(moment.nbytes for moment in moments)


def test_the_estimate_agrees_with_a_measured_step() -> None:
    """Peaks of a packed, compiled prototype on an H100 at 1.5B: 47.3 GiB with 8,192 tokens a micro-batch and 64.1 with 16,384.

    It kept the two normalised inputs of each layer and the product of gate and up, too, no logits, and a whole bfloat16 copy of the gradients, which
    are divided by layers here.
    """
    small, large = (estimate(max_tokens_per_microbatch=tokens) for tokens in (8192, 16384))
    kept_once = 2 * 28 * (2 * QWEN.hidden + QWEN.intermediate)  # bytes a token

    def as_measured(found: Estimate, tokens: int) -> float:
        copies = 2 * QWEN.parameters - found.part("gathered gradients") - found.part("runtime")
        return (found.size_bytes - found.part("logits") + tokens * kept_once + copies) / GIB

    assert as_measured(small, 8192) == pytest.approx(47.3, rel=0.05)
    assert as_measured(large, 16384) == pytest.approx(64.1, rel=0.05)


def test_states_are_divided_over_gpus_and_activations_are_not() -> None:
    one, four = estimate(), estimate(num_gpus=4)
    for name in ("weights", "gradients", "optimizer"):
        assert four.part(name) == pytest.approx(one.part(name) / 4, abs=1)
    assert four.part("activations") == one.part("activations")


def test_tensor_parallelism_divides_activations_within_a_layer() -> None:
    plain, divided = estimate(LLAMA, num_gpus=4), estimate(LLAMA, num_gpus=4, tensor_parallel=4)
    # Embedding and output layer are not divided over the GPUs of a group, nor is the residual stream.
    whole = 4 * LLAMA.root_parameters
    assert divided.part("weights") - plain.part("weights") == pytest.approx(0.75 * whole, rel=0.01)
    assert plain.part("activations") / 4 < divided.part("activations") < plain.part("activations") / 2


def test_adapters_have_gradients_and_moments_on_every_gpu_and_frozen_weights_have_none() -> None:
    found = estimate(LLAMA, lora=LoraConfig(rank=16), num_gpus=2)
    adapters = LLAMA.adapter_parameters(16, "all-linear")
    assert found.part("weights") == LLAMA.parameters  # of 2 bytes, on two GPUs
    assert (found.part("adapters"), found.part("gradients"), found.part("optimizer")) == (
        4 * adapters,
        4 * adapters,
        8 * adapters,
    )
    assert found.part("gathered gradients") == 0


def test_the_models_beside_the_policy_count() -> None:
    models = Trained(policy=QWEN, critic=QWEN, has_reference=True, teacher=LLAMA)
    found = estimate(models, num_gpus=2)
    assert found.part("reference") == QWEN.parameters and found.part("teacher") == LLAMA.parameters
    assert found.part("critic") == 8 * QWEN.parameters  # 16 bytes a weight, on two GPUs
    assert estimate(models, num_gpus=2, offload_reference=True).part("reference") == 0
    assert "reference  " in "\n".join(found.lines())


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
def test_the_copy_of_a_checkpoint_on_the_host_has_the_size_of_its_files(
    lora: LoraConfig | None, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path / "model")
    config = TrainerConfig(lora=lora, autocast="none", max_tokens_per_microbatch=4096)
    learner = make_learner(str(model), config, build_algorithm("sft"), 0)
    learner.update(make_batch(1), 1)
    learner.save_checkpoint(tmp_path / "checkpoint")
    found = host_memory(config, Trained(policy=read_model_shape(model)))
    for name, files in (
        ("copy of the weights", "model.safetensors"),
        ("copy of the optimizer", "training/*.safetensors"),
    ):
        [path] = (tmp_path / "checkpoint").glob(files)
        assert found.part(name) == sum(
            tensor.nbytes
            for key, tensor in load_file(path).items()
            if not key.endswith("/step") and "random/" not in key
        )


def test_the_host_holds_a_copy_of_all_trained_models_and_an_offloaded_reference() -> None:
    models = Trained(policy=QWEN, critic=QWEN, has_reference=True)
    config = TrainerConfig(num_gpus=4, offload_reference=True)
    assert host_memory(config, models).size_bytes == (12 + 12 + 2) * QWEN.parameters
    refuse_too_little_host_memory(config, models, 38 * GIB)
    with pytest.raises(ConfigError, match=r"37\.. GiB and has 32\.0 .*reference 2\.9\).*offload_reference: false"):
        refuse_too_little_host_memory(config, models, 32 * GIB)


class LiveBytes(TorchDispatchMode):
    """Measures the most bytes that results of operations take at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for storage in (x.untyped_storage() for x in tree_iter(found) if isinstance(x, torch.Tensor)):
            if storage._cdata not in self._sizes:
                self._sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._sizes.pop, storage._cdata)
        self.most = max(self.most, sum(self._sizes.values()))
        return found


@pytest.mark.parametrize("rows", [16, 64])
def test_a_comparison_with_a_teacher_takes_as_much_as_in_torch(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, shape = 256, replace(QWEN, vocabulary=4096, hidden=64, is_tied=True)
    monkeypatch.setattr(memory, "LOGITS_BYTES", 4 * rows * shape.vocabulary)
    hidden_NH, teacher_NH = (torch.randn(tokens, shape.hidden).bfloat16() for _ in range(2))
    weight_VH = torch.randn(shape.vocabulary, shape.hidden).requires_grad_()
    teacher = Output(torch.randn(shape.vocabulary, shape.hidden).bfloat16())
    loss = JSD()

    def compare(logits_CV: torch.Tensor, teacher_CH: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            teacher_CV = teacher.logits(teacher_CH)
        return loss.read(logits_CV, teacher_CV)

    with LiveBytes() as live:
        read_logits(hidden_NH.requires_grad_(), Output(weight_VH, chunk=rows), compare, teacher_NH).sum().backward()
    found = estimate(Trained(policy=shape, teacher=shape, compares_logits=True), max_tokens_per_microbatch=tokens)
    gradient = 4 * shape.embedding_parameters  # which gathered gradients has
    assert live.most == pytest.approx(found.part("logits") + found.part("output layer") + gradient, rel=0.03)
    assert found.part("gathered teacher") == 2 * shape.root_parameters


@pytest.mark.parametrize("rows", [64, 128])
def test_a_loss_that_reads_all_probabilities_takes_as_much_as_in_torch(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, shape = 256, replace(QWEN, vocabulary=4096, hidden=64, is_tied=True)
    monkeypatch.setattr(memory, "LOGITS_BYTES", 4 * rows * shape.vocabulary)
    hidden_NH = torch.randn(tokens, shape.hidden).bfloat16().requires_grad_()
    output, loss = Output(torch.randn(shape.vocabulary, shape.hidden).requires_grad_(), chunk=rows), SmoothedSFT()
    with LiveBytes() as live:
        read_logits(hidden_NH, output, lambda logits_CV: loss.read(logits_CV, None)).sum().backward()
    found = estimate(Trained(policy=shape, reads_logits=True), max_tokens_per_microbatch=tokens)
    gradient = 4 * shape.embedding_parameters  # of which half does not exist yet when most does
    assert live.most == pytest.approx(found.part("logits") + found.part("output layer") + gradient / 2, rel=0.03)


@pytest.mark.parametrize(
    ("settings", "bytes_a_weight"),
    [({}, 16), ({"dtype": "bfloat16"}, 8)],
)
def test_bytes_of_a_weight_with_its_gradient_and_moments(settings: dict[str, Any], bytes_a_weight: int) -> None:
    found = estimate(**settings)
    assert sum(found.part(name) for name in ("weights", "gradients", "optimizer")) == bytes_a_weight * QWEN.parameters


def test_an_engine_keeps_keys_and_values_of_every_token() -> None:
    engine = engine_memory(QWEN, "bfloat16")
    assert engine.weights_bytes == 2 * QWEN.parameters
    assert engine.cache_token_bytes == 2 * 28 * 256 * 2  # keys and values, layers, key heads of 128, bytes
    assert engine.cached_tokens(engine.weights_bytes + 10 * engine.cache_token_bytes) == 10
    assert engine.cached_tokens(0) == 0


def test_a_run_that_fits_is_not_refused() -> None:
    assert refuse_too_little_memory(TrainerConfig(), Trained(policy=QWEN), 80 * GIB) == estimate()


def test_too_little_memory_is_refused_with_the_parts_and_with_settings_that_suffice() -> None:
    config, models = TrainerConfig(), Trained(policy=QWEN, has_reference=True)
    with pytest.raises(ConfigError) as caught:
        refuse_too_little_memory(config, models, 40 * GIB)
    text = str(caught.value)
    assert "optimizer 11.5" in text and "activations" in text
    for setting in ("gradient_checkpointing: true", "max_tokens_per_microbatch: 4096", "num_gpus: 2", "lora: {}"):
        assert f"trainer.{setting}" in text
    assert "offload_reference" not in text  # it takes less, but not enough
    advised = config.model_copy(update={"gradient_checkpointing": True})
    assert refuse_too_little_memory(advised, models, 40 * GIB)


def test_settings_that_help_are_named_where_none_suffices_alone() -> None:
    models = Trained(policy=LLAMA, has_reference=True)
    with pytest.raises(ConfigError, match=r"none of these is enough alone: .*offload_reference.*all together"):
        refuse_too_little_memory(TrainerConfig(), models, 14 * GIB)


def test_a_config_json_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for text in ("{", json.dumps([1])):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=r"config\.json"):
            read_model_shape(tmp_path)
