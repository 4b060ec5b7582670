"""Load new weights in vLLM's workers, on CPU and CUDA: from a published file, or from the trainer. `rftcore.sync.vllm.adapters` loads adapters alone.

Whole weights go through `reload_weights`, vLLM's layerwise reload, which restores each layer's checkpoint form, loads it,
and runs the layer's own post-processing. Calling `model.load_weights` instead fails on a CPU, where linear weights are
prepacked and their parameters emptied. The weights must contain `lm_head.weight` even for tied embeddings: on a CPU the head
has its own prepacked copy, which would silently stay old. Where the head shares the embedding's storage (CUDA)
the same values are written twice, or skipped as an alias. Both are correct.

vLLM 0.32 prepacks the experts of a mixture for its CPU kernels when a layer is set up for the first time, and not when it is loaded again. So on a CPU
their layers are set up anew with every reload.

A reload that fails in the middle leaves layers in their checkpoint form, without storage. They get their old tensors back, so that the
next reload finds the model as it expects it; what these tensors contain is then a mixture.

vLLM imports this module by name inside the worker (`worker_extension_cls`) and mixes the class into its worker.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rftcore.sync.device_names import device_id
from rftcore.sync.files.weights_file import iterate_weights
from rftcore.sync.transfer.plan import TransferError, TransferPlan
from rftcore.sync.transfer.receiver import TransferReceiver
from rftcore.sync.vllm.adapters import load_adapters, load_adapters_folder
from rftcore.sync.vllm.check import differing_adapters, differing_tensors
from rftcore.sync.vllm.float32_names import end_reload, names_in_float32


@dataclass(frozen=True)
class ReceiveOutcome:
    """How a transfer ended in one worker.

    Attributes:
        checksum: checksum of what arrived; empty after an error.
        is_loaded: whether any tensor was loaded.
    """

    checksum: str
    error: TransferError | None
    is_loaded: bool


class WeightsExtension:
    """Mixed into vLLM's worker class; `collective_rpc` calls its methods."""

    # `self` is vLLM's worker. Declaring its attributes here would collide with them when the class is mixed in.
    def load_weights_file(self: Any, path: str) -> None:
        """Replace all weights by those in the safetensors file at `path`."""
        _reload(self, iterate_weights(path))

    def load_adapters_folder(self: Any, folder: str) -> None:
        """Replace the adapters by those in a folder in peft's format."""
        load_adapters_folder(self, folder)

    def transfer_device(self: Any) -> str:
        """Return the id of this worker's device."""
        return device_id(str(self.device))

    def receive_weights(self: Any, pickled_plan: bytes) -> bytes:
        """Replace all weights, or the adapters, by those that the trainer sends; return the pickled `ReceiveOutcome`."""
        return pickle.dumps(self._receive_weights(pickle.loads(pickled_plan)))

    def _receive_weights(self: Any, plan: TransferPlan) -> ReceiveOutcome:
        if not hasattr(self, "_transfer_receiver"):
            self._transfer_receiver = TransferReceiver()

        def load(tensors: Iterator[tuple[str, Tensor]]) -> None:
            if plan.adapters is None:
                _reload(self, tensors)
            else:
                load_adapters(self.model_runner.lora_manager, dict(tensors), plan.adapters)

        try:
            checksum = self._transfer_receiver.receive(plan, self.rank, load)
        except TransferError as error:
            if plan.adapters is None:
                end_reload(self.model_runner.get_model(), self.model_runner.model_config)
            return ReceiveOutcome("", error, error.is_half_applied)
        return ReceiveOutcome(checksum, None, True)

    def names_in_float32(self: Any, checkpoint: list[tuple[str, list[int]]]) -> list[str]:
        """Return the names of a checkpoint's tensors that must come in float32."""
        shapes = tuple((name, tuple(shape)) for name, shape in checkpoint)
        return names_in_float32(self.model_runner.get_model(), self.model_runner.model_config, shapes)

    def differing_weights(self: Any, folder: str) -> list[str]:
        """Return the names of this worker's tensors that differ from those of a model that is loaded anew from `folder`."""
        return differing_tensors(self.model_runner.get_model(), self.vllm_config, folder)

    def differing_adapters(self: Any, folder: str) -> list[str]:
        """Return the names of this worker's parts of adapters that differ from those that vLLM reads from `folder`, and keep the latter."""
        return differing_adapters(self, folder)

    def leave_weight_group(self: Any) -> None:
        """Leave the trainer's group, if this worker is in one."""
        if hasattr(self, "_transfer_receiver"):
            self._transfer_receiver.leave()


def _reload(worker: Any, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Replace all weights of a worker."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    layers = worker.model_runner.get_model().modules() if str(worker.device) == "cpu" else ()
    methods = (getattr(layer, "quant_method", None) for layer in layers)
    kernels = [(method, method.moe_kernel) for method in methods if isinstance(method, UnquantizedFusedMoEMethod)]
    for method, _ in kernels:
        method.moe_kernel = None  # vLLM takes the experts for new ones, and prepacks them
    try:
        worker.reload_weights(weights_iterator=tensors)
    finally:
        for method, kernel in kernels:
            if method.moe_kernel is None:  # nothing came for these experts, which keep what they have
                method.moe_kernel = kernel
