"""The memory that autograd keeps of a forward pass, by arithmetic alone; part of `rftcore.trainer.estimates.memory`."""

from __future__ import annotations

from rftcore.trainer.model_shape import Experts, ModelShape

_FP32 = 4
# For a token in each of its experts: the places that it is sorted to and from, 64-bit numbers, and its weight.
_PLACES_BYTES = 34


def activation_bytes(
    shape: ModelShape,
    tokens: int,
    *,
    checkpointing: bool = False,
    compiled: bool = True,
    tensor_parallel: int = 1,
    item: int = 2,
) -> int:
    """Return the bytes that autograd keeps of a forward pass, and those of the layer that is differentiated.

    A compiled layer keeps for each token its input and the output of attention after o_proj (2 · hidden), queries and the output of
    attention (2 · query), keys and values (2 · kv), and gate and up (2 · intermediate).
    Where queries and keys are normalised, it keeps them from before, too. Attention of packed sequences keeps one float32 per head and
    token, and no [tokens, tokens]. A layer that is not compiled keeps each normalised input twice and what it was computed from in
    float32 (8 · hidden in all), and the activation of the gate (1 · intermediate). With checkpointing only the input of each layer is
    kept.

    Args:
        item: bytes of an activation.
    """
    normalised = shape.query + shape.kv if shape.norms_heads else 0
    gates = 2 if compiled else 4
    if compiled:
        whole = item * 2 * shape.hidden
        within = item * (2 * shape.query + 2 * shape.kv + normalised)
    else:
        whole = 2 * (2 * item + _FP32) * shape.hidden
        within = item * (2 * shape.query + 2 * shape.kv) + (item + _FP32) * normalised
    attention = whole + (within + _FP32 * shape.heads) / tensor_parallel
    layer = attention + item * gates * shape.intermediate / tensor_parallel
    mixed = layer if shape.experts is None else attention + _mixture_bytes(shape.experts, shape.hidden, gates, item)
    num_mixed = 0 if shape.experts is None else shape.experts.layers
    kept = num_mixed * mixed + (shape.layers - num_mixed) * layer
    if checkpointing:
        kept = shape.layers * item * shape.hidden
    # The layer that is differentiated has a gradient for most of what it keeps; with checkpointing it is computed again first.
    working = (mixed if num_mixed else layer) * (2 if checkpointing else 1)
    last = 2 * item * shape.hidden
    return round(tokens * (kept + working + last))


def _mixture_bytes(experts: Experts, hidden: int, gates: int, item: int) -> float:
    """Return the bytes that a mixture of experts keeps of a token: router probabilities; for each chosen expert input, inner activations, output, places."""
    chosen = experts.chosen * (2 * item * hidden + item * gates * experts.intermediate + _PLACES_BYTES)
    shared = item * (gates * experts.shared + hidden) if experts.shared else 0
    return _FP32 * experts.num + chosen + shared
