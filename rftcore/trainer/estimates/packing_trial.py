"""The packing trial: whether a model computes packed sequences as it computes them alone, tried with a few layers of random weights.

`packable.refuse_unpackable` refuses families by name and by their configuration; this trial finds others. The tried model has the sizes of the
real one, one layer of each type and a small vocabulary, because a whole model takes minutes on a CPU. Where that is still too large, it also
has fewer experts and narrower layers; heads keep their size, and every mechanism stays.
"""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from rftcore.sync.checkpoint_layout import CheckpointLayout
from rftcore.trainer.batches.micro_batches import Cutting, split_batch
from rftcore.trainer.batches.padding import PackedColumns, pad_batch
from rftcore.trainer.network import attention, packable
from rftcore.trainer.network.computation import Computation, output_layer
from rftcore.trainer.network.head import logprobs_and_entropy
from rftcore.trainer.network.opened_model import refuse_other_head
from rftdata.errors import ConfigError

_VOCABULARY = 64
_FIRST_TOKEN = 3  # after padding, begin and end of text
_WINDOW = 4  # of sliding attention; shorter than the sequences, so that it matters
_LENGTHS = (11, 7)
_MOST_PARAMETERS = 500_000_000  # 2 GB
_TOLERANCE = 1e-3  # nats; two correct kernels differ by 1e-6
# The families' names for the number of experts, for the experts of a token, and for the inner widths of layers.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
_INNER_WIDTHS = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "intermediate_size_mlp",
    "ffn_dim",
    "n_inner",
)
_FEWEST_EXPERTS = 8
_INNER_WIDTH = 256


def try_packing(config: PretrainedConfig) -> str | None:
    """Compare log-probabilities of packed sequences with those of the sequences alone.

    Returns:
        The reason why nothing was compared; None where the comparison was made.

    Raises:
        ConfigError: they differ, the packed model cannot be computed, or its weights cannot be handed to engines.
    """
    try:
        small = _small(config.get_text_config())
        if _num_parameters(small) > _MOST_PARAMETERS:
            small = _narrow(small)
        num = _num_parameters(small)
        if num > _MOST_PARAMETERS:
            return f"one narrow layer of each type has {num:,} parameters"
        model = _random_model(small)
        lengths = _lengths(small)
        alone_N = _alone(model, lengths)
    except Exception as error:  # noqa: BLE001 - code of any family, on a reduced configuration; its error does not concern packing
        return (
            f"a small model of its type cannot be built: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        )
    model.set_attn_implementation(attention.NAME)
    refuse_other_head(model)
    CheckpointLayout(model)
    try:
        difference = (_packed(model, lengths) - alone_N).abs().max().item()
    except ConfigError:
        raise
    except (ValueError, RuntimeError, TypeError) as error:
        reason = f"its packed layers fail with {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise packable.unpackable(reason, small) from error
    if not difference <= _TOLERANCE:
        raise packable.unpackable(
            f"packed sequences get other log-probabilities, by up to {difference:.2g} nats", small
        )
    return None


def _small(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration with one layer of each type and few tokens."""
    values = copy.deepcopy(config).to_dict()
    num = config.num_hidden_layers
    types = values.get("layer_types") or ["full_attention"] * num
    kept = sorted({types.index(name) for name in types})
    for name, value in values.items():
        if isinstance(value, list) and len(value) == num:
            values[name] = [value[place] for place in kept]
    own_name = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    values |= {own_name: len(kept), "vocab_size": min(config.vocab_size, _VOCABULARY)}
    values |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if values.get("sliding_window"):
        values["sliding_window"] = _WINDOW
    return type(config).from_dict(values)


def _narrow(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration with fewer experts, narrower feed-forward layers, and fewer heads in a model that is narrower by as much."""
    values = copy.deepcopy(config).to_dict()
    groups = values.get("n_group") or 1  # of experts: some groups are chosen, then experts within them
    chosen = max(values.get(name) or 0 for name in _CHOSEN)
    for name in _EXPERTS:
        if values.get(name):
            values[name] = min(values[name], groups * -(-max(_FEWEST_EXPERTS, 2 * chosen) // groups))
    for name in _INNER_WIDTHS:
        if isinstance(values.get(name), int):
            values[name] = min(values[name], _INNER_WIDTH)
    heads = {name: values[name] for name in ("num_attention_heads", "num_key_value_heads") if values.get(name)}
    if heads and isinstance(values.get("hidden_size"), int):
        common, fewest = math.gcd(values["hidden_size"], *heads.values()), min(heads.values())
        factor = max(n for n in range(1, common + 1) if common % n == 0 and (n == 1 or fewest // n > 1))
        values |= {name: number // factor for name, number in {**heads, "hidden_size": values["hidden_size"]}.items()}
    return type(config).from_dict(values)


def _num_parameters(config: PretrainedConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())


def _random_model(config: PretrainedConfig) -> PreTrainedModel:
    """Return a model with random weights that give every part an effect, which the weights of a new model may not do."""
    generator = torch.Generator().manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else parameter + 0.25 * noise)
    return model


def _lengths(config: PretrainedConfig) -> list[int]:
    """Return the lengths of the sequences, within the model's limit."""
    longest = packable.length_limit(config) or max(_LENGTHS)
    return [min(length, longest) for length in _LENGTHS]


def _sequences(lengths: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(_FIRST_TOKEN, _VOCABULARY, (length,), generator=generator) for length in lengths]


@torch.no_grad()
def _alone(model: PreTrainedModel, lengths: list[int]) -> Tensor:
    logprobs = []
    for token_ids_T in _sequences(lengths):
        token_ids_T = token_ids_T % model.config.vocab_size
        logprobs_TV = model(input_ids=token_ids_T[None], use_cache=False).logits[0, :-1].float().log_softmax(dim=-1)
        logprobs.append(logprobs_TV.gather(1, token_ids_T[1:, None])[:, 0])
    return torch.cat(logprobs)


@torch.no_grad()
def _packed(model: PreTrainedModel, lengths: list[int]) -> Tensor:
    token_ids = torch.cat(_sequences(lengths)).numpy() % model.config.vocab_size
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    batch = pad_batch(
        PackedColumns(
            token_ids=(token_ids, offsets),
            loss_mask=(np.ones(len(token_ids), bool), offsets),
            behavior_logprobs=None,
            rewards=[0.0] * len(lengths),
            group_ids=[0] * len(lengths),
            rollout_index=range(len(lengths)),
        )
    )
    ((micro_batch,),) = split_batch(batch, Cutting(max_tokens=sum(lengths), sharing="never", kernel="rows"))

    def head(hidden_NH: Tensor) -> Tensor:
        return logprobs_and_entropy(hidden_NH, output_layer(model, 1.0), micro_batch.target_N)[0]

    logprobs_N: Tensor = Computation(model)(micro_batch, nullcontext(), head)
    return torch.zeros_like(logprobs_N).index_copy_(0, micro_batch.index_N, logprobs_N)
