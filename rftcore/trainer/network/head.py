"""The output layer at the tokens that count: log-probability and entropy without logits of all tokens at once.

Chunks of tokens are multiplied with the vocabulary, reduced to one number per token, and computed again in the backward pass. Logits of the first
chunks are kept instead, as far as there is room. The backward pass is written out: with p = softmax(z / T) and H its entropy,

    ∂ log p_y / ∂z = (1[y] - p) / T          ∂H / ∂z = -p (log p + H) / T

(the idea: "Cut your losses", arXiv 2411.09009; Liger kernel, arXiv 2410.10989). Gradients of the weight are added up in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from rftcore.trainer.model_shape import KEPT_LOGITS_BYTES, LOGITS_BYTES


@dataclass(frozen=True)
class Output:
    """The output layer of a model.

    Attributes:
        weight_VH: of any type; products have the type of the hidden states.
        bias_V: of any type, added to float32 products; None where the layer has none.
        scale: logits are multiplied by it (Cohere's `logit_scale`, Granite's `logits_scaling`, and 1 / temperature).
        soft_cap: logits z become cap · tanh(z / cap) before the temperature (Gemma 2, arXiv 2408.00118); None for no cap.
        chunk: tokens whose float32 logits exist at once, or twice as many of logits in half precision.
        kept_bytes: of logits that are kept for the backward pass of `logprobs_and_entropy`.
    """

    weight_VH: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    soft_cap: float | None = None
    temperature: float = 1.0
    chunk: int = field(kw_only=True, default=0)
    kept_bytes: int = field(kw_only=True, default=KEPT_LOGITS_BYTES)

    def __post_init__(self) -> None:
        if not self.chunk:
            object.__setattr__(self, "chunk", max(1, LOGITS_BYTES // (4 * self.weight_VH.shape[0])))

    def logits(self, hidden_CH: Tensor) -> Tensor:
        """Return logits, float32 [C, V], after division by the temperature."""
        z = linear(hidden_CH, self.weight_VH.to(hidden_CH.dtype)).float()
        if self.bias_V is not None:
            z = z + self.bias_V
        if self.scale != 1.0:
            z = z * self.scale
        if self.soft_cap is not None:
            z = self.soft_cap * torch.tanh(z / self.soft_cap)
        return z / self.temperature if self.temperature != 1.0 else z

    @property
    def is_linear(self) -> bool:
        return self.bias_V is None and self.soft_cap is None


def logprobs_and_entropy(
    hidden_NH: Tensor, output: Output, target_N: Tensor, *, entropy_has_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Return log π of the targets and the entropy before them, nats, float32 [N] each.

    Args:
        hidden_NH: in the type of the products.
        entropy_has_gradient: False where entropy is only a metric.
    """
    if output.is_linear:
        fused: tuple[Tensor, Tensor] = _LogprobsAndEntropy.apply(
            hidden_NH,
            output.weight_VH,
            target_N,
            output.scale / output.temperature,
            output.chunk * 4 // hidden_NH.element_size(),
            output.kept_bytes if torch.is_grad_enabled() else 0,
            entropy_has_gradient,
        )  # type: ignore[no-untyped-call]  # of torch
        return fused

    def read(logits_CV: Tensor, target_C: Tensor) -> Tensor:
        logprobs_CV = logits_CV.log_softmax(dim=-1)
        entropy_C = -(logprobs_CV.exp() * logprobs_CV).sum(dim=-1)
        return torch.stack([logprobs_CV.gather(1, target_C[:, None])[:, 0], entropy_C])

    both = (
        torch.cat([*_read(hidden_NH, output, read, target_N)], dim=1)
        if len(target_N)
        else _nothing(hidden_NH, output).expand(2, 0)
    )
    return both[0], both[1] if entropy_has_gradient else both[1].detach()


def read_logits(hidden_NH: Tensor, output: Output, read: Callable[..., Tensor], *others: Tensor) -> Tensor:
    """Return one number per token, float32 [N], from a function of its logits.

    Args:
        read: from logits [C, V] and the same rows of each of `others` to [C]; it is called again in the backward pass.
    """
    return torch.cat([*_read(hidden_NH, output, read, *others)]) if len(hidden_NH) else _nothing(hidden_NH, output)


def _nothing(hidden_NH: Tensor, output: Output) -> Tensor:
    """Return no numbers, with a gradient of 0 for all inputs of the numbers."""
    nothing = hidden_NH.float().sum() + 0.0 * output.weight_VH.float().sum()
    if output.bias_V is not None:
        nothing = nothing + 0.0 * output.bias_V.float().sum()
    return nothing.expand(0)


def _read(hidden_NH: Tensor, output: Output, read: Callable[..., Tensor], *others: Tensor) -> Iterator[Tensor]:
    if torch.is_grad_enabled() and len(hidden_NH) > output.chunk:
        # Gradients of the chunks are added up in the type of the leaf.
        bias_V = None if output.bias_V is None else output.bias_V.float()
        output = replace(output, weight_VH=output.weight_VH.float(), bias_V=bias_V)

    def compute(hidden_CH: Tensor, *rows: Tensor) -> Tensor:
        return read(output.logits(hidden_CH), *rows)

    for pieces in zip(*(x.split(output.chunk) for x in (hidden_NH, *others)), strict=True):
        yield checkpoint(compute, *pieces, use_reentrant=False)


class _LogprobsAndEntropy(torch.autograd.Function):
    """One pass over chunks of tokens forward, and one backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        target_N: Tensor,
        scale: float,
        chunk: int,
        kept_bytes: int,
        entropy_has_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        num, product_VH = len(target_N), weight_VH.to(hidden_NH.dtype)
        logprobs_N, entropy_N, lse_N = (hidden_NH.new_empty(num, dtype=torch.float32) for _ in range(3))
        kept: list[Tensor] = []
        for start in range(0, num, chunk):
            rows = slice(start, start + chunk)
            logits_CV = linear(hidden_NH[rows], product_VH)
            logprobs_N[rows], entropy_N[rows], lse_N[rows] = _fused(_reduced, logits_CV)(
                logits_CV, target_N[rows], scale
            )
            if len(kept) * chunk == start and logits_CV.nbytes <= kept_bytes:
                kept.append(logits_CV)
                kept_bytes -= logits_CV.nbytes
        ctx.save_for_backward(hidden_NH, product_VH, target_N, lse_N, entropy_N, *kept)
        ctx.scale, ctx.chunk, ctx.entropy_has_gradient, ctx.type = scale, chunk, entropy_has_gradient, weight_VH.dtype
        if not entropy_has_gradient:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_logprobs_N: Tensor, grad_entropy_N: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, target_N, lse_N, entropy_N, *kept = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden_NH = torch.zeros_like(hidden_NH) if needs_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if needs_weight else None
        for start in range(0, len(target_N), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            logits_CV = kept.pop(0) if kept else linear(hidden_NH[rows], weight_VH)
            # Written over the logits.
            _fused(_gradient, logits_CV)(
                logits_CV,
                target_N[rows],
                lse_N[rows],
                entropy_N[rows],
                grad_logprobs_N[rows],
                grad_entropy_N[rows] if ctx.entropy_has_gradient and grad_entropy_N is not None else None,
                ctx.scale,
            )
            if grad_hidden_NH is not None:
                torch.mm(logits_CV, weight_VH, out=grad_hidden_NH[rows])
            if grad_weight_VH is not None:
                _add_product(grad_weight_VH, logits_CV.T, hidden_NH[rows])
        return grad_hidden_NH, None if grad_weight_VH is None else grad_weight_VH.to(ctx.type), *[None] * 5


def _reduced(logits_CV: Tensor, target_C: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return log π of the targets, entropy, and log-sum-exp of the scaled logits."""
    z = logits_CV.float() * scale
    lse_C = z.logsumexp(dim=-1)
    expected_C = ((z - lse_C[:, None]).exp() * z).sum(dim=-1)
    return z.gather(1, target_C[:, None])[:, 0] - lse_C, lse_C - expected_C, lse_C


def _gradient(
    logits_CV: Tensor,
    target_C: Tensor,
    lse_C: Tensor,
    entropy_C: Tensor,
    grad_logprobs_C: Tensor,
    grad_entropy_C: Tensor | None,
    scale: float,
) -> None:
    """Replace logits by their gradient."""
    logprobs_CV = logits_CV.float() * scale - lse_C[:, None]
    p_CV = logprobs_CV.exp()
    grad_C1 = (grad_logprobs_C * scale)[:, None]
    if p_CV.is_cuda:  # fuses with the rest
        grad_CV = ((torch.arange(p_CV.shape[1], device=p_CV.device) == target_C[:, None]).float() - p_CV) * grad_C1
    else:
        grad_CV = (p_CV * -grad_C1).scatter_add_(1, target_C[:, None], grad_C1)
    if grad_entropy_C is not None:
        grad_CV = grad_CV - p_CV * (logprobs_CV + entropy_C[:, None]) * (grad_entropy_C * scale)[:, None]
    logits_CV.copy_(grad_CV)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a matrix product to a float32 total; on a GPU the product is not rounded to the type of its factors."""
    if total.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def _fused(function: Callable[..., Any], logits_CV: Tensor) -> Callable[..., Any]:
    """Return the function, compiled on a GPU, where its operations on [C, V] become one kernel."""
    return _compiled(function) if logits_CV.is_cuda else function


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # Only the number of tokens becomes dynamic, when it first differs: a vocabulary of known size makes indices cheap.
    return torch.compile(function)
