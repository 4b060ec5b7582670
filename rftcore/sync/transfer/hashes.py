"""64-bit hashes of tensors, many at once, computed where the tensors are, GPU or CPU. Hashes of parts of a tensor add up to that of the tensor.

    h = n + Σ_b o_b · Σ_j a_j x_bj   modulo 2^64

over the n bytes of a tensor as 32-bit numbers x_bj (signed; j within block b of 1024 bytes, zeros after the last byte), with odd pseudo-random a_j and o_b.
A change within any one of these numbers always shows; changes of several go unseen with a probability of 2^-32 or less. With 64-bit
numbers two changed signs, 2^63 each, would always cancel. It is a sum, so that its terms can be computed where the parts of a tensor are. A hash on the CPU,
such as xxh3, would cost more than the transfer between GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from rftcore.sync.transfer.plan import BLOCK_BYTES, num_blocks

Span = tuple[int, int]
"""The byte of its tensor at which a part begins, and its number of bytes."""

_NUMBERS = BLOCK_BYTES // 4
# Intermediate results stay in the cache of a CPU, and small in the memory of a GPU.
_BLOCKS_AT_ONCE = {"cpu": 1 << 10, "cuda": 1 << 14}


def hashes_of(packed: Tensor, spans: Sequence[Span]) -> Tensor:
    """Return the hash of each part, int64 [len(spans)], on their device.

    Args:
        packed: uint8, whole blocks: those that the first part touches in its tensor, then those of the second, …; zeros around the parts.
        spans: span of each part.
    """
    device = packed.device
    if not spans:
        return torch.zeros(0, dtype=torch.int64, device=device)
    counts = [num_blocks(*span) for span in spans]
    firsts, end = [], 0
    for (offset, _), count in zip(spans, counts, strict=True):
        firsts.append(offset // BLOCK_BYTES - end)
        end += count
    sizes = [num_bytes for _, num_bytes in spans]
    counts_S, firsts_S, hashes_S = torch.tensor([counts, firsts, sizes], dtype=torch.int64).to(device).unbind()
    span_B = torch.repeat_interleave(torch.arange(len(spans), device=device), counts_S, output_size=end)
    outer_B = _odd_numbers(torch.arange(end, device=device) + firsts_S[span_B], stream=1)
    inner = _inner(device)
    blocks = packed.view(torch.int32).view(end, _NUMBERS).split(_BLOCKS_AT_ONCE[device.type])
    sums_B = torch.cat([(block * inner).sum(1) for block in blocks])
    hashes_S.index_add_(0, span_B, sums_B.mul_(outer_B))
    return hashes_S


@lru_cache(maxsize=16)
def _inner(device: torch.device) -> Tensor:
    return _odd_numbers(torch.arange(_NUMBERS, device=device), stream=0)


def _odd_numbers(index: Tensor, stream: int) -> Tensor:
    """Return splitmix64 of index + 1, made odd."""
    z = (index + 1) * _signed(0x9E3779B97F4A7C15) + stream
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return (z ^ _shifted(z, 31)) | 1


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Return z shifted right without its sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64)
