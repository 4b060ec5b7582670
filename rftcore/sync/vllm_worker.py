"""Load a published weights file in vLLM's workers, on CPU and CUDA.

The weights go through `reload_weights`, vLLM's layerwise reload, which restores each layer's checkpoint form, loads it,
and runs the layer's own post-processing. Calling `model.load_weights` instead fails on a CPU, where linear weights are
prepacked and their parameters emptied. The file must contain `lm_head.weight` even for tied embeddings: on a CPU the head
has its own prepacked copy, which would silently stay old. Where the head shares the embedding's storage (CUDA)
the same values are written twice, or skipped as an alias. Both are correct.

vLLM imports this module by name inside the worker (`worker_extension_cls`) and mixes the class into its worker.
"""

from __future__ import annotations

from typing import Any

from rftcore.sync.weights_file import iterate_weights


class WeightsFileExtension:
    """Mixed into vLLM's worker class; `collective_rpc` calls its method."""

    # `self` is vLLM's worker. Declaring its attributes here would collide with them when the class is mixed in.
    def load_weights_file(self: Any, path: str) -> None:
        """Replace all weights by those in the safetensors file at `path`."""
        self.reload_weights(weights_iterator=iterate_weights(path))
