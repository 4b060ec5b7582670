"""`ModelShape`: the sizes of a transformer from its config.json, and the number of its parameters, without torch and without weights.

It supports families whose layers are attention with grouped heads and a gated MLP, or a mixture of such MLPs, the experts. Other families are refused,
because their number of parameters would be a guess.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftdata.errors import ConfigError, ModelError

LOGITS_BYTES = 2**29
"""Bytes of logits that the output layer holds at one time, besides what is kept and, where a loss reads them, what it makes of them."""
KEPT_LOGITS_BYTES = 2**32
"""Bytes of logits, in the type of the products, that it keeps between the forward and the backward pass of log-probabilities."""
DENSE_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
FAMILIES = (*DENSE_FAMILIES, "mixtral", "qwen2_moe", "qwen3_moe")
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
# Sizes that a configuration may leave out, with the family's defaults in transformers.
_EXPERT_DEFAULTS = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "qkv_bias": True,
    },
    "qwen3_moe": {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
}


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The mixture of experts of a model.

    Attributes:
        num: experts of a layer.
        chosen: experts that compute each token.
        intermediate: width within an expert.
        shared: width within the shared expert, which computes every token; 0 where there is none.
        layers: number of layers that have experts. The others have a plain MLP.
    """

    num: int
    chosen: int
    intermediate: int
    shared: int
    layers: int


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a model.

    Attributes:
        model_type: its family, one of FAMILIES.
        hidden: width of the residual stream.
        head_dim: width of one head; heads · head_dim may differ from `hidden`.
        vocabulary: rows of the embedding, padding included.
        is_tied: whether embedding and output layer are one matrix.
        biased: matrices of a layer that have a bias.
        experts: None for a model without.
        dtype: type of the stored weights, as config.json names it.
    """

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    is_tied: bool
    biased: frozenset[str]
    dtype: str
    experts: Experts | None = None

    @property
    def query(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        """Width of all key heads together; also of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def norms_heads(self) -> bool:
        """Whether queries and keys are normalised per head."""
        return self.model_type in ("qwen3", "qwen3_moe")

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the linear layers of one layer that may have an adapter, by name; not experts, nor an MLP of a model with experts."""
        attention = {
            "q_proj": (self.hidden, self.query),
            "k_proj": (self.hidden, self.kv),
            "v_proj": (self.hidden, self.kv),
            "o_proj": (self.query, self.hidden),
        }
        return attention if self.experts is not None else attention | self._mlp

    @property
    def _mlp(self) -> dict[str, tuple[int, int]]:
        inputs, outputs = (self.hidden, self.intermediate), (self.intermediate, self.hidden)
        return {"gate_proj": inputs, "up_proj": inputs, "down_proj": outputs}

    @property
    def matrix_parameters(self) -> int:
        """Number of weights in the matrices of all layers, without experts, whose matrices are one tensor of three dimensions."""
        number = self.layers * _size(self.matrices)
        if self.experts is not None:
            number += (self.layers - self.experts.layers) * _size(
                self._mlp
            ) + self.experts.layers * self._beside_experts
        return number

    @property
    def _experts(self) -> int:
        assert self.experts is not None
        return self.experts.num * 3 * self.hidden * self.experts.intermediate

    @property
    def _beside_experts(self) -> int:
        """Number of weights of the router, and of a shared expert with its gate."""
        assert self.experts is not None
        shared = 3 * self.hidden * self.experts.shared + self.hidden if self.experts.shared else 0
        return self.experts.num * self.hidden + shared

    @property
    def layer_parameters(self) -> int:
        """Number of parameters of one layer; of a layer with experts where the model has some."""
        return self._outside_mlp + (_size(self._mlp) if self.experts is None else self._mixture)

    @property
    def _mixture(self) -> int:
        """Number of parameters of a layer's experts, their router and the shared expert."""
        return self._experts + self._beside_experts

    @property
    def _outside_mlp(self) -> int:
        """Number of parameters of attention and norms, and of biases."""
        sizes = self.matrices | self._mlp
        biases = sum(outputs for name, (_, outputs) in sizes.items() if name in self.biased)
        norms = 2 * self.hidden + (2 * self.head_dim if self.norms_heads else 0)
        return _size({name: sizes[name] for name in _ATTENTION}) + biases + norms

    @property
    def embedding_parameters(self) -> int:
        """Number of parameters of the embedding; as many again in the output layer unless they are tied."""
        return self.vocabulary * self.hidden

    @property
    def root_parameters(self) -> int:
        """Number of parameters outside the layers: embedding, output layer, last norm."""
        return self.embedding_parameters * (1 if self.is_tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        """Number of parameters; tied ones count once."""
        dense = 0 if self.experts is None else self.layers - self.experts.layers
        return (
            (self.layers - dense) * self.layer_parameters
            + dense * (self._outside_mlp + _size(self._mlp))
            + self.root_parameters
        )

    def adapter_parameters(self, rank: int, target_modules: str | list[str]) -> int:
        """Number of parameters of low-rank adapters in all layers.

        Args:
            target_modules: all-linear, or the ends of the names of the matrices with an adapter.

        Raises:
            ConfigError: no matrix of a layer has such a name, or it is one of experts.
        """
        if self.experts is not None and target_modules != "all-linear":
            refused = [name for name in target_modules if name.rpartition(".")[2] not in self.matrices]
            if refused:
                raise ConfigError(
                    "trainer.lora.target_modules names layers of a mixture of experts that can have no adapter",
                    value=refused,
                    allowed=f"all-linear, or a list of {', '.join(self.matrices)}",
                    todo="remove them, or leave trainer.lora out",
                )
        chosen = [
            sizes
            for name, sizes in self.matrices.items()
            if target_modules == "all-linear" or any(name == module.rpartition(".")[2] for module in target_modules)
        ]
        if not chosen:
            raise ConfigError(
                "trainer.lora.target_modules names no linear layer of the model",
                value=target_modules,
                allowed=f"all-linear, or a list of {', '.join(self.matrices)}",
                todo="correct it",
            )
        return self.layers * sum(rank * (inputs + outputs) for inputs, outputs in chosen)

    def refuse_uneven_division(self, tensor_parallel: int) -> None:
        """Raise a ConfigError if so many GPUs cannot divide what lies within a layer."""
        if self.model_type not in DENSE_FAMILIES:
            raise _unsplittable(self.model_type)
        sizes = {"attention heads": self.heads, "key heads": self.kv_heads, "intermediate size": self.intermediate}
        uneven = [f"{value} ({name})" for name, value in sizes.items() if value % tensor_parallel]
        if uneven:
            possible = [gpus for gpus in range(1, self.kv_heads + 1) if not any(size % gpus for size in sizes.values())]
            raise ConfigError(
                f"trainer.tensor_parallel must divide the model's {', '.join(sizes)}, and does not divide {' and '.join(uneven)}",
                value=tensor_parallel,
                allowed=", ".join(map(str, possible)),
                todo="change it; trainer.num_gpus may stay above it",
            )


def refuse_indivisible(values: Mapping[str, Any], tensor_parallel: int) -> None:
    """Refuse tensor parallelism for a model, by the values of its config.json.

    Raises:
        ConfigError: the family is not supported, or so many GPUs cannot divide its layers.
    """
    if values.get("model_type") not in DENSE_FAMILIES:
        raise _unsplittable(values.get("model_type"))
    model_shape(values).refuse_uneven_division(tensor_parallel)


def _unsplittable(model_type: object) -> ConfigError:
    return ConfigError(
        "trainer.tensor_parallel cannot split this model",
        value=model_type,
        allowed=", ".join(DENSE_FAMILIES),
        todo="set trainer.tensor_parallel: 1; the model is sharded over all GPUs anyway",
    )


def _size(matrices: Mapping[str, tuple[int, int]]) -> int:
    return sum(inputs * outputs for inputs, outputs in matrices.values())


def read_model_shape(folder: Path) -> ModelShape:
    """Return the sizes of the model in a folder.

    Raises:
        ModelError: its config.json cannot be read, or it is of a family that is not in FAMILIES.
    """
    file = folder / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}", todo="correct model.path") from error
    if not isinstance(values, dict):
        raise ModelError(f"{file} must contain a mapping", value=type(values).__name__, todo="correct model.path")
    return model_shape(values)


def model_shape(values: Mapping[str, Any]) -> ModelShape:
    """Return the sizes that the values of a config.json name.

    Raises:
        ModelError: the family is not in FAMILIES, or a size is missing.
    """
    model_type = values.get("model_type")
    if model_type not in FAMILIES:
        raise ModelError(
            "the sizes of this family of models are unknown", value=model_type, allowed=", ".join(FAMILIES)
        )
    missing = [name for name in _SIZES if not isinstance(values.get(name), int)]
    if missing:
        raise ModelError(f"the model's config.json lacks {', '.join(missing)}", todo="correct model.path")
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    # Sizes that a configuration leaves out have the default of the family in transformers.
    head_dim = values.get("head_dim") or (128 if model_type == "qwen3" else hidden // heads)
    values = {**_EXPERT_DEFAULTS.get(model_type, {}), **values}
    biased = set(_ATTENTION[:3]) if model_type == "qwen2" or values.get("qkv_bias") else set[str]()
    if model_type in ("llama", "qwen3", "qwen3_moe") and values.get("attention_bias"):
        biased |= {*_ATTENTION}
    if model_type == "llama" and values.get("mlp_bias"):
        biased |= {*_MLP}
    return ModelShape(
        model_type=model_type,
        hidden=hidden,
        layers=values["num_hidden_layers"],
        heads=heads,
        kv_heads=values.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        intermediate=values["intermediate_size"],
        vocabulary=values["vocab_size"],
        is_tied=bool(values.get("tie_word_embeddings")),
        biased=frozenset(biased),
        dtype=str(values.get("dtype") or values.get("torch_dtype") or "float32"),
        experts=_experts(values) if model_type in _EXPERT_DEFAULTS else None,
    )


def _experts(values: Mapping[str, Any]) -> Experts:
    """Return the experts of a model of a family that has some; some layers of qwen models may have none."""
    layers, step = range(values["num_hidden_layers"]), values.get("decoder_sparse_step") or 1
    without = values.get("mlp_only_layers") or ()
    num: int = values.get("num_local_experts") or values["num_experts"]
    return Experts(
        num=num,
        chosen=values["num_experts_per_tok"],
        intermediate=values.get("moe_intermediate_size") or values["intermediate_size"],
        shared=values.get("shared_expert_intermediate_size") or 0,
        layers=sum(layer not in without and (layer + 1) % step == 0 for layer in layers),
    )
