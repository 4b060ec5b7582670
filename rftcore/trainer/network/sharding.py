"""Sharding of a model over the ranks of a process group: FSDP2 (`fully_shard`), tensor parallelism, compiled layers.

Parameters are sharded along their first dimension over the data-parallel ranks and gathered layer by layer for computing
(ZeRO stage 3, arXiv 1910.02054). The shard in float32 is the master that the optimizer updates; on a GPU the gathered copy is bfloat16.
Gradients are added up over ranks in float32 after every micro-batch, not averaged: the weights of a loss already refer to the whole batch.

Tensor parallelism (arXiv 1909.08053) splits attention heads and the hidden units of the feed-forward layers of Llama- and Qwen-shaped models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch._functorch.config
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rftcore.trainer.network.stacked_weights import Unread
from rftdata.errors import ConfigError

_DATA, _TENSOR = "data", "tensor"
# The end of a rank is noticed without it (`rftcore.trainer.processes.other_ranks`). Ranks may wait long for one that writes its weights to a slow disk.
TIMEOUT = timedelta(hours=2)
# Norms over one head (Qwen3): every tensor-parallel rank has them whole and applies them to its own heads only.
_HEAD_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")


@dataclass(frozen=True)
class Grid:
    """The ranks of the trainer, data-parallel × tensor-parallel; a single rank may have no process group.

    Attributes:
        mesh: None for a single rank without a process group.
        group: the process group of all ranks; None for the default one.
    """

    device: torch.device
    mesh: DeviceMesh | None = None
    group: dist.ProcessGroup | None = None

    def beside(self) -> Grid:
        """Return the same ranks with a separate group, for a thread whose collectives must not mix with those of training."""
        if self.mesh is None:
            return self
        return replace(self, group=dist.new_group(backend="gloo", timeout=TIMEOUT))

    @property
    def num_data_ranks(self) -> int:
        return 1 if self.mesh is None else self.mesh[_DATA].size()

    @property
    def data_rank(self) -> int:
        """The share of a batch that this rank computes."""
        return 0 if self.mesh is None else self.mesh[_DATA].get_local_rank()

    @property
    def num_tensor_ranks(self) -> int:
        return 1 if self.mesh is None else self.mesh[_TENSOR].size()

    @property
    def rank(self) -> int:
        """The number of this rank among all."""
        return 0 if self.mesh is None else dist.get_rank()

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files."""
        return self.rank == 0

    def add_up(self, values: Tensor) -> Tensor:
        """Add up the values of the data-parallel ranks, in place; return them."""
        if self.mesh is not None and self.num_data_ranks > 1:
            dist.all_reduce(values, group=self.mesh[_DATA].get_group())
        return values

    def wait_for_all(self) -> None:
        """Return when every rank has called this."""
        if self.mesh is not None:
            dist.barrier(self.group)


def make_grid(device: torch.device, tensor_parallel: int = 1) -> Grid:
    """Return the grid of all ranks of the default process group; of this process alone where there is none.

    Raises:
        ConfigError: `tensor_parallel` does not divide the number of ranks.
    """
    if not dist.is_initialized():
        if device.type != "cuda":
            return Grid(device)
        # A group of one: `fully_shard` then keeps the masters beside the weights of the products on one GPU, too.
        dist.init_process_group("cpu:gloo,cuda:nccl", store=HashStore(), rank=0, world_size=1, device_id=device)
    num_ranks = dist.get_world_size()
    if num_ranks % tensor_parallel:
        raise ConfigError(
            "trainer.tensor_parallel does not divide the number of ranks",
            value=f"{tensor_parallel} of {num_ranks} ranks",
            allowed=", ".join(str(n) for n in range(1, num_ranks + 1) if num_ranks % n == 0),
            todo="set trainer.tensor_parallel to one of these",
        )
    sizes = {_DATA: num_ranks // tensor_parallel, _TENSOR: tensor_parallel}
    # A named backend creates new groups for parts of the ranks. By default they are split from the group of all ranks, and gloo's split
    # crashes a process that has had another gloo group before (pytorch #192106).
    backends: dict[int | str, Any] = {
        name: dist.get_backend_config() for name, size in sizes.items() if size < num_ranks
    }
    mesh = init_device_mesh(
        device.type,
        tuple(sizes.values()),
        mesh_dim_names=tuple(sizes),
        backend_override=backends if device.type == "cuda" else None,
    )
    return Grid(device, mesh)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a transformers model."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def compile_layers(layers: Iterable[nn.Module], backend: str = "inductor") -> None:
    """Compile each block in place. Blocks of one shape share the code, and so do micro-batches, since lengths are dynamic.

    The backward pass computes normalised inputs and the product of gate and up again, beside what it computes of their inputs anyway: a third
    of the activations of a Qwen2.5-1.5B.
    """
    torch._functorch.config.ban_recompute_materialized_backward = False
    for layer in layers:
        layer.compile(backend=backend, dynamic=True)


def shard(
    root: nn.Module,
    layers: list[nn.Module],
    grid: Grid,
    *,
    master: torch.dtype,
    compute: torch.dtype | None,
    offload: bool = False,
    replicated: Sequence[nn.Parameter] = (),
    unread: Unread | None = None,
    keeps_gathered: bool = False,
) -> None:
    """Put `root` on the device and shard it in place: each layer is a unit, and the rest of `root` is one more.

    One layer at a time is whole on the device, so a model may be larger than the memory of one device. Where the weights of `root` are mapped files,
    this process allocates memory for no more than one layer at a time.

    Args:
        master: type of the shards.
        compute: type of gathered parameters; None for that of the shards.
        offload: on a GPU, keep the shards in the memory of the host.
        replicated: parameters that every rank keeps whole, in their own type.
        unread: parameters whose values are still in files; emptied.
        keeps_gathered: whether gathered parameters stay after a forward pass.

    Raises:
        ConfigError: the model cannot be divided by the tensor-parallel ranks.
    """
    whole = set(replicated)
    for parameter in replicated:
        parameter.data = parameter.data.to(grid.device)
    take = partial(
        _take_to_device, device=grid.device, dtype=master, others=whole, unread={} if unread is None else unread
    )
    if grid.mesh is None:
        take(root)
        return
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32 if compute else None)
    options: dict[str, Any] = {
        "mesh": grid.mesh[_DATA],
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy() if offload and grid.device.type == "cuda" else OffloadPolicy(),
        "ignored_params": whole,
        "reshard_after_forward": not keeps_gathered,
    }
    for layer in layers:
        take(layer)
        if grid.num_tensor_ranks > 1:
            _split_heads(layer, grid.mesh[_TENSOR])
        fully_shard(layer, **options)
    take(root)
    fully_shard(root, **options | {"reshard_after_forward": None})
    if grid.num_data_ranks == 1:  # where even a division by 1 is a pass over all gradients
        return
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # Both: the first alone divides before the sum, in the type of the communication.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _take_to_device(
    module: nn.Module, device: torch.device, dtype: torch.dtype, others: Set[nn.Parameter], unread: Unread
) -> None:
    """Move parameters to the device in this type, and buffers (the frequencies of rotary positions) in theirs; leave sharded parameters and `others`."""
    for parameter in module.parameters():
        # Removed from `unread`, which would otherwise keep the whole parameter when this rank has its share.
        if (read := unread.pop(parameter, None)) is not None:
            whole = torch.empty(parameter.shape, device=device, dtype=dtype)
            read(whole)
            parameter.data = whole
        elif not isinstance(parameter, DTensor) and parameter not in others:
            # A copy even where the type is the same: the weights may be the mapped file, at any offset, and products with a vector (a value head)
            # round by the alignment of their memory, so a resumed run would differ in the last bit from an uninterrupted one.
            parameter.data = parameter.data.to(device, dtype, copy=True)
    for submodule in module.modules():
        for name, buffer in submodule.named_buffers(recurse=False):
            setattr(submodule, name, buffer.to(device))


def _split_heads(layer: nn.Module, mesh: DeviceMesh) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns = [f"self_attn.{name}_proj" for name in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
    rows = ["self_attn.o_proj", "mlp.down_proj"]
    parallelize_module(
        layer, mesh, {**{name: ColwiseParallel() for name in columns}, **{name: RowwiseParallel() for name in rows}}
    )


def add_up_head_norms(model: nn.Module, grid: Grid) -> None:
    """Add up the gradients of norms within heads over tensor-parallel ranks; each rank has the gradients of its own heads."""
    if grid.mesh is None or grid.num_tensor_ranks == 1:
        return
    for name, parameter in model.named_parameters():
        if name.endswith(_HEAD_NORMS) and parameter.grad is not None:
            # The mesh of these parameters has the data dimension only, so their shards are alike on all tensor-parallel ranks.
            part = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            if part.numel():
                dist.all_reduce(part, group=grid.mesh[_TENSOR].get_group())


def keep_gathered(root: nn.Module, *, keep: bool) -> None:
    """Set whether gathered parameters stay after the next backward pass."""
    if isinstance(root, FSDPModule):
        root.set_reshard_after_backward(not keep)


def reshard(root: nn.Module) -> None:
    """Free all gathered parameters."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def gathered(root: nn.Module) -> Iterator[None]:
    """Allow calls of a module inside `root` within the block: parameters outside layers are whole on every rank; layers gather themselves."""
    if not isinstance(root, FSDPModule):
        yield
        return
    # The first module that is called would take itself for the root. torch has no public name for this.
    root._get_fsdp_state()._lazy_init()
    root.unshard()
    try:
        yield
    finally:
        reshard(root)


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
    """Scale gradients down to this norm over all ranks; return the norm before, a number on the device.

    torch's own function adds norms of one mesh only; with tensor parallelism some parameters lie on two dimensions and others on one.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    by_mesh: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        by_mesh.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(gradient)
    norms = [full(nn.utils.get_total_norm(members)) for members in by_mesh.values()]
    norm = torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([each.to_local() if isinstance(each, DTensor) else each for each in gradients], scale)
    return norm


def full(tensor: Tensor) -> Tensor:
    """Return the whole tensor from the parts of all ranks, which call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
