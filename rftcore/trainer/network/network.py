"""`Network`: one transformer in the trainer, from opening to saving.

Invariants:
- Log-probabilities and values are float32, whatever the type of the matrix products, and are computed only at tokens that count:
  with a vocabulary of 49,152 the output layer costs a quarter of the model, and responses are a few percent of the tokens.
- A gradient that is not finite changes no weight.
- Every rank of the grid calls the same methods in the same order.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rftcore.config.trainer import TrainerConfig
from rftcore.sync.checkpoint_layout import CheckpointLayout
from rftcore.sync.tensors import HeldRows, WireTensor
from rftcore.trainer.batches.micro_batches import Cutting, MicroBatch
from rftcore.trainer.model_shape import KEPT_LOGITS_BYTES
from rftcore.trainer.network import attention, packable
from rftcore.trainer.network.computation import Computation, output_layer
from rftcore.trainer.network.head import Output, logprobs_and_entropy
from rftcore.trainer.network.lora import (
    adapter_tensors,
    add_adapters,
    load_adapters,
    merged,
    merged_update_error,
    named_adapters,
    named_layers,
    save_adapters,
)
from rftcore.trainer.network.opened_model import Head, opened_model
from rftcore.trainer.network.optimizers import Optimizers, value_head
from rftcore.trainer.network.routing import find_routers
from rftcore.trainer.network.sharding import (
    Grid,
    add_up_head_norms,
    clip_gradients,
    compile_layers,
    full,
    gathered,
    keep_gathered,
    layers_of,
    reshard,
    shard,
)
from rftcore.trainer.network.weight_parts import held_rows, wire_tensors

# Continuations can share a prompt where attention sees all of it.
_MODEL_TYPES_SHARING_PROMPTS = frozenset({"llama", "qwen2", "qwen3", "qwen3_moe"})
Result = TypeVar("Result")
ADAPTERS = "adapters"  # folder beside the weights that they are merged into


class Network:
    """A model with a language-model head, or with a value head of one number.

    Args:
        path: folder of a model or a checkpoint, or a Hugging Face id. A value head that is not in it starts from random weights.
        grid: the ranks that hold it.
        head: what the output layer returns.
        learning_rate: peak, for a model that is trained; None for a model that is not.
        adapters: train `config.lora`, where it is set, and not the model's own weights.
        offload: keep a model that is not trained in the memory of the host.

    Attributes:
        is_compiled: whether passes run compiled code: layers, or functions of the output layer, which always are on a GPU.
        routers: those of a mixture of experts that is trained; None for other models.

    Raises:
        ModelError: the model cannot be opened.
        ConfigError: its attention cannot be packed, its optimizer cannot be built on this machine, the ranks cannot divide it, its weights cannot be
            exported, or it has no routers to balance.
    """

    def __init__(
        self,
        path: str,
        config: TrainerConfig,
        grid: Grid,
        *,
        head: Head = "vocabulary",
        learning_rate: float | None = None,
        adapters: bool = False,
        offload: bool = False,
    ) -> None:
        self.config = config
        self.grid = grid
        self.model, unread = opened_model(path, config, grid, head)
        trained = learning_rate is not None
        on_gpu = self.device.type == "cuda"
        self._autocasts = _autocasts(config, self.device)
        compute = torch.bfloat16 if on_gpu and self._autocasts else None
        adapted = adapters and config.lora is not None
        master = getattr(torch, config.dtype) if compute is None or (trained and not adapted) else compute
        if trained:
            # Merged weights are float32, whatever the type of the frozen ones.
            self._blank = _blank(self.model, torch.float32 if adapted else master)
            self._layout = CheckpointLayout(self._blank)
        if trained and config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model.train(trained).requires_grad_(trained)
        has_routing_loss = trained and head == "vocabulary"
        self.routers = find_routers(self.model, config.router_aux_coef) if has_routing_loss else None
        self._lora = named_layers(self.model, config.lora, self._layout.stacked) if adapted and config.lora else None
        self._adapters = [] if self._lora is None else add_adapters(self.model, self._lora)
        layers = layers_of(self.model)
        compiles_layers = config.compile if config.compile is not None else on_gpu
        if compiles_layers:
            compile_layers(layers)
        self.is_compiled = compiles_layers or on_gpu
        self._computation = Computation(self.model)
        # A single rank converts its weights once for all micro-batches. Copies in the type of the masters would double their memory.
        is_full = trained and not self._adapters
        self._keeps_gathered = is_full and grid.num_data_ranks == 1 and compute not in (None, master)
        shard(
            self._computation,
            layers,
            grid,
            master=master,
            compute=None if self._adapters else compute,
            offload=offload,
            replicated=self._adapters,
            unread=unread,
            keeps_gathered=self._keeps_gathered,
        )
        self.optimizers = Optimizers(self.model, config.optimizer, learning_rate)

    @property
    def device(self) -> torch.device:
        return self.grid.device

    @property
    def num_tokens(self) -> int:
        """Size of the vocabulary of its inputs."""
        embeddings = self.model.get_input_embeddings()
        assert isinstance(embeddings, nn.Embedding)
        return embeddings.num_embeddings

    @property
    def cutting(self) -> Cutting:
        """How batches are cut for this model, device and number of ranks."""
        shares = self.config.share_prompts and _can_share_prompts(self.model.config)
        # FlashAttention takes half precision only.
        is_half = self._compute == torch.bfloat16
        flash = self.device.type == "cuda" and is_half and packable.suits_flash(self.model.config)
        return Cutting(
            max_tokens=self.config.max_tokens_per_microbatch,
            sharing="never" if not shares else "always" if flash else "rows",
            kernel="segments" if flash else "rows",
            num_ranks=self.grid.num_data_ranks,
            quadratic_at=12.0 * self.model.config.get_text_config().hidden_size,
        )

    def read(self, micro_batch: MicroBatch, temperature: float, head: Callable[[Tensor, Output], Result]) -> Result:
        """Return the result of `head` for the hidden states that predict the tokens that count, [N, H], and the output layer.

        Args:
            temperature: of the distributions that the output layer computes.
        """

        def with_output(hidden_NH: Tensor) -> Result:
            kept_bytes = 0 if self.config.gradient_checkpointing else KEPT_LOGITS_BYTES
            return head(hidden_NH.to(self._compute), output_layer(self.model, temperature, kept_bytes))

        result: Result = self._computation(micro_batch, self._autocast(), with_output)
        return result

    def logprobs(self, micro_batch: MicroBatch, temperature: float) -> Tensor:
        """Return the log-probabilities of the tokens that count, nats, float32 [N]."""
        return self.read(micro_batch, temperature, lambda h, o: logprobs_and_entropy(h, o, micro_batch.target_N))[0]

    @contextmanager
    def unpacked(self) -> Iterator[PreTrainedModel]:
        """Yield the model with the attention of transformers, to call it without gradient with padded rows and masks, or to sample from it.

        All ranks enter the block together, and call the model together and with the same tokens.
        """
        self.model.set_attn_implementation("sdpa")
        try:
            with gathered(self._computation):
                yield self.model
        finally:
            self.model.set_attn_implementation(attention.NAME)

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Prepare for the forward and the backward pass of a micro-batch.

        Args:
            is_last: of the update.
        """
        if self._keeps_gathered:
            keep_gathered(self._computation, keep=not is_last)

    def release(self) -> None:
        """Free the gathered weights that stay after a pass without gradient: embedding, last norm and output layer, and on a single rank the layers."""
        reshard(self._computation)

    def values(self, micro_batch: MicroBatch) -> Tensor:
        """Return the value of the state before each token that counts, float32 [N]."""

        def head(hidden_NH: Tensor) -> Tensor:
            with self._autocast():
                return cast(Tensor, value_head(self.model)(hidden_NH))[:, 0].float()

        return cast(Tensor, self._computation(micro_batch, self._autocast(), head))

    def update(self, share: float) -> float:
        """Make one optimizer step from the accumulated gradients, and clear them; return their norm before clipping.

        If the norm is not finite, the weights stay as they are.

        Args:
            share: of the peak learning rate.
        """
        limit = math.inf if self.config.max_grad_norm is None else self.config.max_grad_norm
        for parameter in self._adapters:
            if parameter.grad is not None:
                self.grid.add_up(parameter.grad)
        add_up_head_norms(self.model, self.grid)
        grad_norm = clip_gradients(self.model.parameters(), limit).item()
        if math.isfinite(grad_norm):
            self.optimizers.step(share)
        self.optimizers.clear_gradients()
        return grad_norm

    def wire_tensors(self, adapters_alone: bool = False) -> tuple[WireTensor, ...]:
        """Return the description of what the ranks hand over to engines: every weight, a tied one under the first of its names, or the adapters.

        It never changes.
        """
        if adapters_alone:
            return wire_tensors(named_adapters(self.model), {}, self.grid)
        names: dict[int, str] = {}
        tied: dict[str, str] = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            first = names.setdefault(id(tensor), name)
            if first != name:
                tied[name] = first
        return wire_tensors(self._weights(), tied, self.grid, self._layout)

    def held_rows(
        self,
        tensors: Iterable[WireTensor],
        dtype: str,
        in_float32: Collection[str] = (),
        *,
        adapters_alone: bool = False,
    ) -> Iterator[HeldRows]:
        """Yield the rows that this rank holds of each weight that is handed over. All ranks iterate together.

        Args:
            tensors: see `wire_tensors`.
            dtype: type in which weights are gathered that must be.
            in_float32: names of weights that are gathered in float32 instead.
        """
        travelling = {tensor.name for tensor in tensors if tensor.same_as is None}
        weights = named_adapters(self.model) if adapters_alone else self._weights()
        held = ((name, weight) for name, weight in weights if travelling.intersection(self._layout.names(name)))
        yield from held_rows(held, getattr(torch, dtype), frozenset(in_float32), self._layout)

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the sharded tensor of every weight, with the adapters merged in."""
        state = self.model.state_dict()
        yield from (merged(self.model, state) if self._adapters else ((name, state[name].detach()) for name in state))

    def merged_update_error(self, dtype: torch.dtype) -> float:
        """Return the share of the adapters' update that merging loses in this type; see `rftcore.trainer.network.lora`."""
        return merged_update_error(self.model, dtype)

    def load_adapters(self, folder: Path) -> None:
        """Read the adapters of a checkpoint.

        Raises:
            ModelError: the checkpoint has no adapters, or others.
        """
        load_adapters(self.model, folder / ADAPTERS)

    def adapter_tensors(self) -> dict[str, Tensor]:
        """Return copies of the adapters in the host's memory, by peft's names; every rank has them whole."""
        return adapter_tensors(self.model)

    def stage(self, copied: Callable[[str, Tensor], Tensor] | None = None) -> Callable[[Path], None]:
        """Copy the weights to the memory of the first rank's host; all ranks call it.

        Args:
            copied: returns a copy of a named tensor in the host's memory; None for one in new memory.

        Returns:
            A function that writes the copy as a Hugging Face folder without a tokenizer, for the first rank. Training cannot change what it reads.
        """
        copied = copied or (lambda _, tensor: tensor.to("cpu", copy=True))
        first, tensors = dict[int, str](), dict[str, Tensor]()
        owner = {
            name: first.setdefault(id(p), name) for name, p in self._blank.named_parameters(remove_duplicate=False)
        }
        for name, tensor in self._weights():
            whole = full(tensor)
            if not self.grid.is_first:
                continue
            # Tied weights stay one tensor, so that they are copied and written once.
            of_owner = self._layout.names(owner.get(name, name))
            for (part, values), same_as in zip(self._layout.tensors(name, whole), of_owner, strict=True):
                tensors[part] = tensors[same_as] if same_as in tensors else copied(part, values)
        adapters = {} if self._lora is None else adapter_tensors(self.model)

        def write(folder: Path) -> None:
            self._blank.save_pretrained(folder, state_dict=tensors, save_original_format=False)
            if self._lora is not None:
                save_adapters(adapters, self._lora, folder / ADAPTERS)

        return write

    @property
    def _compute(self) -> torch.dtype:
        """The type of matrix products."""
        return torch.bfloat16 if self._autocasts else cast(torch.dtype, getattr(torch, self.config.dtype))

    def _autocast(self) -> AbstractContextManager[Any]:
        # On a GPU the gathered weights already are in the type of the products, and so is everything between them.
        # Adapters are float32 everywhere.
        if not self._autocasts or (self.device.type == "cuda" and not self._adapters):
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


def _autocasts(config: TrainerConfig, device: torch.device) -> bool:
    """Return whether matrix products are bfloat16 by autocast.

    A CPU without instructions for bfloat16 multiplies it one to two orders of magnitude more slowly than float32.
    """
    if config.autocast != "auto" or device.type == "cuda":
        return config.autocast != "none"
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))


def _blank(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Copy the model without memory for its weights: transformers writes folders with the copy while the model is in use."""
    blanks = {
        id(tensor): torch.empty_like(tensor, device="meta", dtype=dtype if tensor.is_floating_point() else None)
        for tensor in (*model.parameters(), *model.buffers())
    }
    for parameter in model.parameters():
        blanks[id(parameter)] = nn.Parameter(blanks[id(parameter)], requires_grad=False)
    return copy.deepcopy(model, blanks)


def _can_share_prompts(model_config: Any) -> bool:
    layer_types = set(getattr(model_config, "layer_types", None) or ["full_attention"])
    return model_config.model_type in _MODEL_TYPES_SHARING_PROMPTS and layer_types == {"full_attention"}
