"""One transformer as the trainer uses it: opened, computed at the tokens that count, updated, saved.

Invariants:
- Log-probabilities and values are float32, whatever the type of the matrix products, and are computed only at tokens that count:
  with a vocabulary of 49,152 the output layer costs a quarter of the model, and responses are a few percent of the tokens.
- A gradient that is not finite changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel

from rftcore.trainer.config import TrainerConfig
from rftcore.trainer.micro_batches import MicroBatch
from rftcore.trainer.optimizers import build_optimizers
from rftdata.errors import ModelError

# Attention of these is plain softmax over a mask that we may give, so prompts can be shared; others compute every row.
_MODEL_TYPES_SHARING_PROMPTS = frozenset({"llama", "qwen2", "qwen3"})
Head = Literal["vocabulary", "value"]

_ROWS_AT_ONCE = 1024
_READ_ROWS = 256


class Network:
    """A model with a language-model head, or with a value head of one number.

    Args:
        path: folder of a model or a checkpoint, or a Hugging Face id. A value head that is not in it starts from random weights.
        device: where it lives.
        head: what the output layer gives.
        learning_rate: peak, for a model that is trained; None for one that is not.

    Raises:
        ModelError: the model cannot be opened.
        ConfigError: the optimizer cannot be built here.
    """

    def __init__(
        self, path: str, config: TrainerConfig, device: torch.device, *, head: Head = "vocabulary",
        learning_rate: float | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.device = device
        self.learning_rate = learning_rate
        self.model = _open(path, config, head)
        self.model.to(device)  # type: ignore[arg-type]  # transformers' wrapper of the method hides that it is bound
        self.shares_prompts = config.share_prompts and _can_share_prompts(self.model.config)
        self.optimizers: list[Optimizer] = []
        if learning_rate is None:
            self.model.eval().requires_grad_(False)
            return
        self.model.train()
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.optimizers = build_optimizers(self.model, config.optimizer, learning_rate)

    @property
    def num_tokens(self) -> int:
        """Size of the vocabulary that it reads."""
        embeddings = self.model.get_input_embeddings()
        assert isinstance(embeddings, nn.Embedding)
        return embeddings.num_embeddings

    def logprobs(self, micro_batch: MicroBatch, temperature: float) -> Tensor:
        """Log-probabilities of the whole vocabulary where a token that counts is predicted, float32 [N, V]."""
        with _output_only_at(self.model.get_output_embeddings(), micro_batch.source_N):
            logits_1NV = self._forward(micro_batch)
        return (logits_1NV[0].float() / temperature).log_softmax(dim=-1)

    def values(self, micro_batch: MicroBatch) -> Tensor:
        """Value of the state before each token that counts, float32 [N]."""
        head = self.model.score
        assert isinstance(head, nn.Module)
        with _output_only_at(head, micro_batch.source_N):
            return self._forward(micro_batch)[0, :, 0].float()

    def update(self, share: float) -> float:
        """One optimizer step from the accumulated gradients, which are cleared; returns their norm before clipping.

        A norm that is not finite leaves the weights as they are.

        Args:
            share: of the peak learning rate.
        """
        assert self.learning_rate is not None
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        limit = math.inf if self.config.max_grad_norm is None else self.config.max_grad_norm
        grad_norm = nn.utils.clip_grad_norm_(parameters, limit).item()
        for optimizer in self.optimizers:
            if math.isfinite(grad_norm):
                for group in optimizer.param_groups:
                    group["lr"] = share * self.learning_rate
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return grad_norm

    def optimizer_state(self) -> dict[str, Tensor]:
        """Every tensor of the optimizers, as `parameter/key`."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return {
            f"{names[id(parameter)]}/{key}": value
            for optimizer in self.optimizers for parameter, state in optimizer.state.items() for key, value in state.items()
        }  # fmt: skip

    def load_optimizer_state(self, tensors: dict[str, Tensor]) -> None:
        """The reverse of `optimizer_state`.

        Raises:
            ModelError: state of a parameter that the model does not have.
        """
        owners = {
            id(parameter): optimizer
            for optimizer in self.optimizers for group in optimizer.param_groups for parameter in group["params"]
        }  # fmt: skip
        parameters = dict(self.model.named_parameters())
        for key, tensor in tensors.items():
            name, _, part = key.rpartition("/")
            if name not in parameters:
                raise ModelError(f"the checkpoint has optimizer state for {name!r}, which its model lacks")
            parameter = parameters[name]
            # A copy: safetensors may hand out the file itself, mapped, and the optimizer writes in place.
            owners[id(parameter)].state[parameter][part] = tensor.to(self.device, copy=True)

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder, without a tokenizer."""
        self.model.save_pretrained(folder)

    def _forward(self, micro_batch: MicroBatch) -> Tensor:
        shared = micro_batch.attention_R1LL is not None
        with self._autocast():
            # Positions are given only where they are not 0, 1, 2, …: transformers looks for packed sequences in them.
            logits: Tensor = self.model(
                input_ids=micro_batch.token_ids_RL,
                attention_mask=micro_batch.attention_R1LL,
                position_ids=micro_batch.position_ids_RL if shared else None,
                use_cache=False,
            ).logits
        return logits

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.config.autocast == "none":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


def pick(logprobs_NV: Tensor, target_N: Tensor) -> Tensor:
    """The log-probability of one token in each row, [N]."""
    return logprobs_NV.gather(1, target_N[:, None])[:, 0]


def entropy(logprobs_NV: Tensor) -> Tensor:
    """-Σ p log p of each row, nats [N]."""
    return by_rows(lambda rows: -(rows.exp() * rows).sum(dim=-1), logprobs_NV)


def by_rows(function: Callable[[Tensor], Tensor], logprobs_NV: Tensor) -> Tensor:
    """One number per row, [N], computed on some rows at a time: a metric should not cost another [N, V]."""
    return torch.cat([function(rows) for rows in logprobs_NV.split(_ROWS_AT_ONCE)])


def read_rows(read: Callable[[Tensor, Tensor], Tensor], logprobs_NV: Tensor, teacher_NV: Tensor) -> Tensor:
    """One number per row from `HeadTerm.read`, [N]. Some rows at a time, and again in the backward pass: it makes several [rows, V]."""
    pieces = zip(logprobs_NV.split(_READ_ROWS), teacher_NV.split(_READ_ROWS), strict=True)
    return torch.cat([checkpoint(read, rows, teacher, use_reentrant=False) for rows, teacher in pieces])


def _open(path: str, config: TrainerConfig, head: str) -> PreTrainedModel:
    dtype = getattr(torch, config.dtype)
    try:
        model: PreTrainedModel = (
            AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
            if head == "vocabulary"
            else AutoModelForTokenClassification.from_pretrained(
                path, dtype=dtype, attn_implementation="sdpa", num_labels=1
            )
        )
    except (OSError, ValueError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"the model {path} cannot be opened: {first_line}",
            allowed="a folder with config.json and safetensors, or a Hugging Face id",
            todo="correct model.path",
        ) from error
    # Dropout is off for good: the ratio has to compare two policies, not two draws of noise.
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0  # type: ignore[assignment]  # torch takes every attribute for a tensor
    return model


@contextmanager
def _output_only_at(layer: nn.Module, source_N: Tensor) -> Iterator[None]:
    """Within it, the output layer sees [1, N, hidden]: the rows `source_N` of its flattened input.

    A hook on the layer, and not the hidden states and the layer called by hand, because what some models do to logits
    afterwards (scaling, soft-capping) then stays theirs to do.
    """

    def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0].flatten(0, 1).index_select(0, source_N)[None],)

    handle = layer.register_forward_pre_hook(keep)
    try:
        yield
    finally:
        handle.remove()


def _can_share_prompts(model_config: Any) -> bool:
    layer_types = set(getattr(model_config, "layer_types", None) or ["full_attention"])
    return model_config.model_type in _MODEL_TYPES_SHARING_PROMPTS and layer_types == {"full_attention"}
