"""`ModelShape`: the sizes of a transformer by its config.json, and the number of its parameters, without torch and without weights.

It knows the families whose layers the trainer can divide and pack: attention with grouped heads and a gated MLP. Other families are
refused, because their number of parameters would be a guess.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftdata.errors import ConfigError, ModelError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


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
        return self.model_type == "qwen3"

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """The matrices of one layer: inputs and outputs by name."""
        return {
            "q_proj": (self.hidden, self.query), "k_proj": (self.hidden, self.kv), "v_proj": (self.hidden, self.kv),
            "o_proj": (self.query, self.hidden), "gate_proj": (self.hidden, self.intermediate), "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }  # fmt: skip

    @property
    def layer_matrix_parameters(self) -> int:
        """Number of weights in the matrices of one layer."""
        return sum(inputs * outputs for inputs, outputs in self.matrices.values())

    @property
    def layer_parameters(self) -> int:
        """Number of parameters of one layer."""
        biases = sum(outputs for name, (_, outputs) in self.matrices.items() if name in self.biased)
        norms = 2 * self.hidden + (2 * self.head_dim if self.norms_heads else 0)
        return self.layer_matrix_parameters + biases + norms

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
        """Number of parameters; what is tied counts once."""
        return self.layers * self.layer_parameters + self.root_parameters

    def adapter_parameters(self, rank: int, target_modules: str | list[str]) -> int:
        """Number of parameters of low-rank adapters in all layers.

        Args:
            target_modules: all-linear, or the ends of the names of the matrices that have one.

        Raises:
            ConfigError: no matrix of a layer has such a name.
        """
        chosen = [
            sizes for name, sizes in self.matrices.items()
            if target_modules == "all-linear" or any(name == module.rpartition(".")[2] for module in target_modules)
        ]  # fmt: skip
        if not chosen:
            raise ConfigError(
                "trainer.lora.target_modules names no linear layer of the model", value=target_modules,
                allowed=f"all-linear, or a list of {', '.join(self.matrices)}", todo="correct it",
            )  # fmt: skip
        return self.layers * sum(rank * (inputs + outputs) for inputs, outputs in chosen)

    def refuse_uneven_division(self, tensor_parallel: int) -> None:
        """Raise a ConfigError if so many GPUs cannot divide what lies within a layer."""
        sizes = {"attention heads": self.heads, "key heads": self.kv_heads, "intermediate size": self.intermediate}
        uneven = [f"{value} ({name})" for name, value in sizes.items() if value % tensor_parallel]
        if uneven:
            possible = [gpus for gpus in range(1, self.kv_heads + 1) if not any(size % gpus for size in sizes.values())]
            raise ConfigError(
                f"trainer.tensor_parallel must divide the model's {', '.join(sizes)}, and does not divide {' and '.join(uneven)}",
                value=tensor_parallel, allowed=", ".join(map(str, possible)), todo="change it; trainer.num_gpus may stay above it",
            )  # fmt: skip


def refuse_indivisible(values: Mapping[str, Any], tensor_parallel: int) -> None:
    """For the values of a config.json.

    Raises:
        ConfigError: tensor parallelism does not know the layers of the family, or so many GPUs cannot divide them.
    """
    if values.get("model_type") not in FAMILIES:
        raise ConfigError(
            "trainer.tensor_parallel cannot split this model", value=values.get("model_type"), allowed=", ".join(FAMILIES),
            todo="set trainer.tensor_parallel: 1; the model is sharded over all GPUs anyway",
        )  # fmt: skip
    model_shape(values).refuse_uneven_division(tensor_parallel)


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
    # What a configuration leaves out has the default of the family in transformers.
    head_dim = values.get("head_dim") or (128 if model_type == "qwen3" else hidden // heads)
    biased = set(_ATTENTION[:3]) if model_type == "qwen2" else set[str]()
    if model_type in ("llama", "qwen3") and values.get("attention_bias"):
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
    )
