"""Attention over packed sequences, registered with transformers under one name; a `Packing` holds where sequences begin and end.

A packed row of L tokens holds, in this order, sequences of their own, prompts that several experiences share, and the continuations of
those prompts, prompt after prompt. Every segment attends causally to itself, and every continuation to all of its prompt, too.

On a GPU in bfloat16 the kernels are variable-length FlashAttention (arXiv 2307.08691). The keys and values of a shared prompt are copied for each of
its continuations, which are queries of the last of their keys only; in the backward pass the gradients of the copies are added up. The kernels that
instead attend to a prompt once for all of its continuations have one block of work for 128 tokens of the prompt, and leave most of a GPU idle.

Elsewhere `torch.nn.functional.scaled_dot_product_attention` gets rows of similar length, with a mask where a prompt is shared; only attention sees
padding.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag, scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig

from rftcore.trainer.batches.packed_rows import Packing, PaddedRows, Rows, Segments
from rftcore.trainer.network.packable import unpackable

NAME = "packed"
# Arguments that models pass to attention and that have no effect on scores.
_WITHOUT_EFFECT = frozenset(
    {"dropout", "position_ids", "output_attentions", "use_cache", "past_key_values", "cache_position"}
)


def packed_attention(
    module: nn.Module,
    query_1HLD: Tensor,
    key_1HLD: Tensor,
    value_1HLD: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Compute attention for transformers' interface, [1, L, heads, head size].

    Keys and values may have fewer heads than queries.

    Raises:
        ConfigError: the model needs more than this attention computes, such as a mask of its own, sinks or a cap on scores.
        ValueError: there is no packing, because the call comes from outside the trainer (use `Network.unpacked`) or the model does not pass it
            on to attention.
    """
    if packing is None:
        raise ValueError(
            f"a packed {module.config.model_type} was called without its packing: call it within Network.unpacked(); if the trainer called it, the "  # type: ignore[union-attr]
            "model's layers do not hand it on, and the trainer cannot train a model of this type"
        )
    wanted = sorted(name for name, value in others.items() if value is not None and name not in _WITHOUT_EFFECT)
    if attention_mask is not None:
        wanted.append("attention_mask")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        wanted.append("is_causal: false")
    if wanted:
        raise unpackable(f"its attention has {', '.join(wanted)}", cast(PretrainedConfig, module.config))
    if isinstance(packing, Segments):
        query, key, value = (x[0].transpose(0, 1) for x in (query_1HLD, key_1HLD, value_1HLD))
        window = -1 if sliding_window is None else sliding_window - 1
        out_LHD, _ = torch.ops.rftcore.packed_attention(query, key, value, *packing, scaling, window)
        return out_LHD[None], None
    return _attend_parts(query_1HLD[0], key_1HLD[0], value_1HLD[0], packing, scaling, sliding_window)[None], None


# Not compiled: layers would be compiled again for every number of parts.
@torch.compiler.disable  # type: ignore[untyped-decorator]  # of torch
def _attend_parts(
    query_HLD: Tensor,
    key_HLD: Tensor,
    value_HLD: Tensor,
    packing: PaddedRows,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    groups = query_HLD.shape[0] // key_HLD.shape[0]
    out_PHD = torch.cat(
        [_attend_rows(query_HLD, key_HLD, value_HLD, rows, scaling, window, groups) for rows in packing.parts]
    )
    return out_PHD.index_select(0, packing.place_L)


def _attend_rows(
    query_HLD: Tensor,
    key_HLD: Tensor,
    value_HLD: Tensor,
    rows: Rows,
    scaling: float | None,
    window: int | None,
    groups: int,
) -> Tensor:
    num_rows, width = rows.place_RW.shape
    place = rows.place_RW.flatten()

    def padded(x_HLD: Tensor) -> Tensor:
        x_RHWD: Tensor = x_HLD.index_select(1, place).unflatten(1, (num_rows, width)).transpose(0, 1)
        return x_RHWD.repeat_interleave(groups, dim=1) if groups > 1 and x_HLD is not query_HLD else x_RHWD

    visible = rows.visible_R1WW
    if window is not None and window < width:
        steps = torch.arange(width, device=place.device)
        near = steps[:, None] - steps[None, :] < window
        visible = (
            torch.ones(width, width, dtype=torch.bool, device=place.device).tril() if visible is None else visible
        ) & near
    on_cpu = query_HLD.device.type == "cpu"
    query, key, value = (padded(x_HLD) for x_HLD in (query_HLD, key_HLD, value_HLD))
    if on_cpu:  # its backward kernel takes three times as long in bfloat16
        query, key, value = query.float(), key.float(), value.float()
    with torch.autocast("cpu", enabled=False) if on_cpu else nullcontext():
        out_RHWD = scaled_dot_product_attention(
            query, key, value, attn_mask=visible, is_causal=visible is None, scale=scaling
        )
    out: Tensor = out_RHWD.to(query_HLD.dtype).transpose(1, 2).flatten(0, 1)
    return out


class _FlashCall(NamedTuple):
    """Arguments that FlashAttention takes forward and backward.

    Attributes:
        query_starts, key_starts: int32; where each segment begins, and the end of the last one. Queries are those of the last keys.
        longest_query, longest_key: tokens.
        window: keys before a query that it sees, -1 for all.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_starts: Tensor
    key_starts: Tensor
    longest_query: int
    longest_key: int
    scaling: float | None
    window: int

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": self.scaling, "window_size_left": self.window, "window_size_right": 0}


def _flash_call(
    query_LHD: Tensor, key_LHD: Tensor, value_LHD: Tensor, packing: Segments, scaling: float | None, window: int
) -> _FlashCall:
    starts, longest = packing.starts_S, packing.longest
    if packing.key_place_K is None or packing.key_starts_S is None:
        return _FlashCall(query_LHD, key_LHD, value_LHD, starts, starts, longest, longest, scaling, window)
    key_KHD, value_KHD = (x_LHD.index_select(0, packing.key_place_K) for x_LHD in (key_LHD, value_LHD))
    return _FlashCall(
        query_LHD, key_KHD, value_KHD, starts, packing.key_starts_S, longest, packing.longest_keys, scaling, window
    )


def _sum_of_copies(grad_KHD: Tensor, packing: Segments) -> Tensor:
    """Add up the gradients of the copies of each key, [L, heads, head size]."""
    if packing.copies_K is None or packing.first_copy_L is None:
        return grad_KHD
    grad_LX: Tensor = embedding_bag(packing.copies_K, grad_KHD.flatten(1), packing.first_copy_L, mode="sum")
    return grad_LX.view(-1, *grad_KHD.shape[1:])


# A custom operator, so that torch.compile takes it as one node. The parameters of such an operator are tensors and numbers, so the fields of
# `Segments` stand one by one in the signatures of the two operators.
@torch.library.custom_op("rftcore::packed_attention", mutates_args=())
def _packed_attention(
    query_LHD: Tensor,
    key_LHD: Tensor,
    value_LHD: Tensor,
    starts_S: Tensor,
    longest: int,
    key_starts_S: Tensor | None,
    longest_keys: int,
    key_place_K: Tensor | None,
    copies_K: Tensor | None,
    first_copy_L: Tensor | None,
    scaling: float | None,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Return output [L, heads, head size] and log-sum-exp, float32 [heads, L]."""
    packing = Segments(starts_S, longest, key_starts_S, longest_keys, key_place_K, copies_K, first_copy_L)
    return _flash(_flash_call(query_LHD, key_LHD, value_LHD, packing, scaling, window))


@_packed_attention.register_fake
def _(query_LHD: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, _size = query_LHD.shape
    return torch.empty_like(query_LHD), query_LHD.new_empty((num_heads, num_tokens), dtype=torch.float32)


@torch.library.custom_op("rftcore::packed_attention_backward", mutates_args=())
def _packed_attention_backward(
    grad_LHD: Tensor,
    query_LHD: Tensor,
    key_LHD: Tensor,
    value_LHD: Tensor,
    out_LHD: Tensor,
    lse_HL: Tensor,
    starts_S: Tensor,
    longest: int,
    key_starts_S: Tensor | None,
    longest_keys: int,
    key_place_K: Tensor | None,
    copies_K: Tensor | None,
    first_copy_L: Tensor | None,
    scaling: float | None,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    packing = Segments(starts_S, longest, key_starts_S, longest_keys, key_place_K, copies_K, first_copy_L)
    call = _flash_call(query_LHD, key_LHD, value_LHD, packing, scaling, window)
    grad_query_LHD, *of_copies = _flash_backward(call, grad_LHD, out_LHD, lse_HL)
    grad_key_LHD, grad_value_LHD = (_sum_of_copies(grad_KHD, packing) for grad_KHD in of_copies)
    return grad_query_LHD, grad_key_LHD, grad_value_LHD


@_packed_attention_backward.register_fake
def _(grad_LHD: Tensor, query_LHD: Tensor, key_LHD: Tensor, value_LHD: Tensor, *_: object) -> tuple[Tensor, ...]:
    return torch.empty_like(query_LHD), torch.empty_like(key_LHD), torch.empty_like(value_LHD)


def _flash(call: _FlashCall) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(*call[:7], 0.0, True, False, **call.options)
    return out, lse


def _flash_backward(call: _FlashCall, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    random_state = torch.zeros(2, dtype=torch.uint64, device=grad.device)  # of dropout, which is 0
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad.contiguous(),
        *call[:3],
        out,
        lse,
        *call[3:7],
        0.0,
        True,
        random_state,
        random_state,
        **call.options,
    )
    return grads


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, starts, longest, key_starts, longest_keys, key_place, copies, first_copy, *rest = inputs
    ctx.save_for_backward(query, key, value, *output, starts, key_starts, key_place, copies, first_copy)
    ctx.longest, ctx.longest_keys, ctx.rest = longest, longest_keys, rest


def _backward(ctx: Any, grad_LHD: Tensor, _grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, out, lse, starts, key_starts, *places = ctx.saved_tensors
    grads = torch.ops.rftcore.packed_attention_backward(
        grad_LHD, query, key, value, out, lse, starts, ctx.longest, key_starts, ctx.longest_keys, *places, *ctx.rest
    )
    return (*grads, *[None] * (7 + len(ctx.rest)))


_packed_attention.register_autograd(_backward, setup_context=_keep_for_backward)
AttentionInterface.register(NAME, packed_attention)
