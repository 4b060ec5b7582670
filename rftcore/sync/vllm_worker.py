"""What vLLM's workers do with a published weights file; on CPU and CUDA alike.

The weights go through `reload_weights`, vLLM's layerwise reload: it puts each layer back into checkpoint form, loads,
and runs the layer's own post-processing. Calling `model.load_weights` instead fails on a CPU, where linear weights are
prepacked and their parameters emptied. The file must name `lm_head.weight` even for tied embeddings: on a CPU the head
has a prepacked copy of its own, which would silently stay old. Where the head shares the embedding's storage (CUDA)
the same values are written twice, or skipped as an alias: both right.

vLLM imports this module by name inside the worker (`worker_extension_cls`) and mixes the class into its worker.
"""

from __future__ import annotations

from typing import Any

from rftcore.sync.weights_file import iterate_weights


class WeightsFileExtension:
    """Mixed into vLLM's worker class; the method is called by `collective_rpc`."""

    # `self` is vLLM's worker. Declaring its attributes here would collide with them when the class is mixed in.
    def load_weights_file(self: Any, path: str) -> None:
        """Replace all weights by those in the safetensors file at `path`."""
        self.reload_weights(weights_iterator=iterate_weights(path))
