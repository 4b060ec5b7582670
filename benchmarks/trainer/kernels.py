"""Where the time of an optimisation step goes on its device: `rft bench trainer --profile`.

torch's profiler records one step. Every kernel belongs to one class, by the part of our trainer that launched it, else by its name:

    matmul       matrix products of the layers
    attention    attention kernels, and what our operator does around them
    head         everything in the output layer that is computed at the tokens that count
    compiled     kernels of compiled layers between the products: norms, rotary positions, activations, residuals
    sharding     conversions of weights to the type of the products, and of gradients to that of the masters
    optimizer    norms and scaling of gradients, and the optimizer
    elementwise, copies, other
    idle         the device has nothing to do

On a CPU operators take the place of kernels, and only the form of the result means something.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

_NUM_KERNELS = 25
_NUM_GAPS = 8
_LONGEST_NAME = 160
_STEP = "optimisation step"

# Parts of names of regions and operators on the host, outermost last.
_REGIONS = (
    ("attention", ("packed_attention",)),
    ("head", ("LogprobsAndEntropy",)),
    ("sharding", ("FSDP::",)),
    ("optimizer", ("Optimizer.step", "clip_grad")),
)
_NAMES = (
    ("attention", ("flash", "fmha", "sdpa", "attention")),
    ("matmul", ("gemm", "nvjet", "cutlass", "xmma", "splitk", "gemv", "::mm", "addmm", "::bmm", "matmul")),
    ("optimizer", ("adam", "multi_tensor_apply", "lpnorm")),
    ("compiled", ("triton_",)),
    ("copies", ("memcpy", "memset", "copy", "cat", "index", "chunk")),
    ("elementwise", ("elementwise", "reduce", "softmax")),
)
_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm"})


class StepProfile:
    """Records one step, between `start` and `stop`."""

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, record_shapes=True)
        self._step = record_function(_STEP)

    def start(self) -> None:
        """Begin the step; the device has nothing to do."""
        self._profile.start()
        self._step.__enter__()

    def stop(self, seconds: float) -> dict[str, Any]:
        """Return milliseconds by class, the kernels that take most of the time, and the matrix products by shape.

        Args:
            seconds: wall time of the step; the profiler makes it longer than it would be without.
        """
        self._step.__exit__(None, None, None)
        self._profile.stop()
        return summary(self._profile.events(), seconds)


def summary(events: Iterable[FunctionEvent], seconds: float) -> dict[str, Any]:
    """Summarise the events of a step; see `StepProfile.stop`."""
    events = list(events)
    step = next(event for event in events if event.name == _STEP and event.device_type == DeviceType.CPU)
    events = [event for event in events if event.name != _STEP]
    device = [event for event in events if event.device_type != DeviceType.CPU and not event.is_user_annotation]
    launched = list(_launched(events) if device else _operators(events))
    kernels: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0])
    for name, group, ms in launched:
        _add(kernels[name, group], ms, 1)
    ran = _totals((event.name, event.time_range.elapsed_us() / 1e3) for event in device)
    listed = _totals((name, ms) for name, _, ms in launched)
    for (name, _), total in kernels.items():
        # Several operators may list one kernel.
        share = ran[name][1] / listed[name][1] if name in ran else 1.0
        if share < 1.0:
            total[0], total[1] = total[0] * share, round(total[1] * share)
    for name, (ms, calls) in ran.items():
        known_ms, known_calls = listed.get(name, (0.0, 0.0))
        # Kernels that no operator of the host launched have only a name.
        if calls > known_calls:
            _add(kernels[name, class_of(name)], ms - known_ms, int(calls - known_calls))
    classes: dict[str, float] = defaultdict(float)
    for (_, group), (ms, _calls) in kernels.items():
        classes[group] += ms
    gaps, before, after = _gaps(device), None, None
    if device:
        before = (min(event.time_range.start for event in device) - step.time_range.start) / 1e3
        after = (step.time_range.end - max(event.time_range.end for event in device)) / 1e3
        classes["idle"] = before + sum(gap["ms"] for gap in gaps) + after
    most = sorted(kernels.items(), key=lambda item: -item[1][0])[:_NUM_KERNELS]
    return {
        "seconds": seconds,
        "class_ms": {name: round(ms, 2) for name, ms in sorted(classes.items(), key=lambda item: -item[1])},
        "kernels": [
            {"class": group, "ms": round(ms, 3), "calls": calls, "name": name[:_LONGEST_NAME]}
            for (name, group), (ms, calls) in most
        ],
        "products": _products(events),
        "before_first_kernel_ms": before,
        "after_last_kernel_ms": after,
        "gaps": sorted(gaps, key=lambda gap: -gap["ms"])[:_NUM_KERNELS],
    }


def table(found: dict[str, Any]) -> str:
    """Return the profile as lines of text."""
    lines = [f"{name:>12} {ms:9.1f} ms {ms / found['seconds'] / 10:5.1f} %" for name, ms in found["class_ms"].items()]
    lines += [
        f"{each['ms']:9.2f} ms {each['calls']:6} × {each['class']:<11} {each['name']}" for each in found["kernels"]
    ]
    lines += [
        f"{each['ms']:9.2f} ms {each['calls']:6} × {each['tflop_per_s']:7.1f} TFLOP/s {each['shapes']}"
        for each in found["products"][:_NUM_KERNELS]
    ]
    if found["before_first_kernel_ms"] is not None:
        lines.append(f"{found['before_first_kernel_ms']:9.2f} ms idle before the first kernel")
        lines.append(f"{found['after_last_kernel_ms']:9.2f} ms idle after the last kernel")
    lines += [f"{gap['ms']:9.2f} ms idle before {gap['next']}" for gap in found["gaps"][:_NUM_GAPS]]
    return "\n".join(lines)


def _add(total: list[float], ms: float, calls: int) -> None:
    total[0] += ms
    total[1] += calls


def _launched(events: Iterable[FunctionEvent]) -> Iterator[tuple[str, str, float]]:
    """Yield name, class and milliseconds of each kernel that an operator of the host launched."""
    for event in events:
        if event.device_type == DeviceType.CPU and event.kernels:
            region = _region(event)
            for kernel in event.kernels:
                yield kernel.name, region or class_of(kernel.name), kernel.duration / 1e3


def _operators(events: Iterable[FunctionEvent]) -> Iterator[tuple[str, str, float]]:
    for event in events:
        yield event.name, _region(event) or class_of(event.name), event.self_cpu_time_total / 1e3


def _totals(times: Iterable[tuple[str, float]]) -> dict[str, list[float]]:
    """Return milliseconds and number of calls by name."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for name, ms in times:
        _add(totals[name], ms, 1)
    return dict(totals)


def _region(event: FunctionEvent) -> str | None:
    """Return the class of the innermost region of the host that has one."""
    at: FunctionEvent | None = event
    while at is not None:
        for group, parts in _REGIONS:
            if any(part in at.name for part in parts):
                return group
        at = at.cpu_parent
    return None


def class_of(name: str) -> str:
    """Return the class of a kernel by its name alone."""
    lower = name.lower()
    return next((group for group, parts in _NAMES if any(part in lower for part in parts)), "other")


def _gaps(device: Iterable[FunctionEvent]) -> list[dict[str, Any]]:
    """Return the times in which no kernel ran, with the kernel that ended each."""
    gaps, end = [], math.inf
    for event in sorted(device, key=lambda event: event.time_range.start):
        if event.time_range.start > end:
            gaps.append({"ms": (event.time_range.start - end) / 1e3, "next": event.name[:_LONGEST_NAME]})
        end = event.time_range.end if end == math.inf else max(end, event.time_range.end)
    return gaps


def _products(events: Iterable[FunctionEvent]) -> list[dict[str, Any]]:
    """Return the matrix products by the shapes of their inputs, those that take longest first."""
    by_shapes: dict[str, list[float]] = defaultdict(lambda: [0.0, 0, 0.0])
    for event in events:
        if event.name not in _PRODUCTS or not event.input_shapes:
            continue
        shapes = cast(Sequence[Sequence[int]], event.input_shapes)
        left, right = [shape for shape in shapes if len(shape) >= 2][-2:]
        total = by_shapes[f"{left} × {right}"]
        _add(total, sum(kernel.duration for kernel in event.kernels) / 1e3 or event.self_cpu_time_total / 1e3, 1)
        total[2] += 2.0 * math.prod(left) * right[-1]
    return [
        {"shapes": shapes, "calls": int(calls), "ms": round(ms, 3), "tflop_per_s": round(flop / max(ms, 1e-6) / 1e9, 1)}
        for shapes, (ms, calls, flop) in sorted(by_shapes.items(), key=lambda item: -item[1][0])
    ]
