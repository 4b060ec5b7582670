"""In a step the host waits for the device a fixed number of times, however many micro-batches there are, and for no threads of its own before them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rftcore.algorithms import build_algorithm
from rftcore.algorithms.algorithm import Algorithm
from rftcore.algorithms.base import Loss, Signals, StepBatch, TokenView
from rftcore.algorithms.losses.sft import SFT
from rftcore.algorithms.parts import AlgorithmParts
from rftcore.algorithms.presets import presets
from rftdata.errors import RftError
from tests.support.learning import batch_with_everything, config, make_batch, make_learner
from tests.support.models import make_tiny_moe

WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class HostWaits(TorchDispatchMode):
    """Counts the operations that a GPU would have to finish before the host goes on: those whose result is a Python number, or decides a size.

    Indexing with numbers has the second tag, too, and waits for nothing. `tolist` and `numpy` of tensors on a CPU are not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_):
            waits = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        elif func.overloadpacket == torch.ops.aten.repeat_interleave:
            waits = func == torch.ops.aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
        else:
            waits = bool(WAITING & set(func.tags))
        if waits:
            self.count[str(func)] += 1
        return func(*args, **kwargs)


def waits_of(function: Callable[[], object]) -> Counter[str]:
    with HostWaits() as found:
        function()
    return found.count


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum().item(),
        lambda x: x.unique(),
        lambda x: x.nonzero(),
        lambda x: x[x > 1],
        lambda x: x.bincount(),
        lambda x: x.repeat_interleave(x),
        lambda x: x.masked_select(x > 1),
        lambda x: bool((x > 1).any()),
        lambda x: x.index_put_((x > 1,), x.sum()),
        lambda x: torch.equal(x, x),
    ],
)
def test_operations_that_wait_for_a_gpu_are_counted(function: Callable[[Tensor], object]) -> None:
    assert waits_of(lambda: function(torch.tensor([1, 2, 2])))


@pytest.mark.parametrize("function", [lambda x: x[x], lambda x: x.index_add(0, x, x), lambda x: x.repeat_interleave(2)])
def test_other_operations_are_not_counted(function: Callable[[Tensor], object]) -> None:
    assert not waits_of(lambda: function(torch.tensor([0, 1, 2])))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", sorted(presets()))
def test_waits_do_not_grow_with_the_number_of_micro_batches_in_any_preset(
    name: str, checkpointing: bool, model_path: str
) -> None:
    needs_model = "teacher_logits" in build_algorithm(name, {"teacher": model_path}).signals
    found = {}
    for max_tokens in (30, 4096):
        algorithm = build_algorithm(name, {"teacher": model_path} if needs_model else {})
        settings = config(max_tokens_per_microbatch=max_tokens, gradient_checkpointing=checkpointing)
        learner = make_learner(model_path, settings, algorithm, 0)
        batch = batch_with_everything(paired=algorithm.draws_pairs)
        found[max_tokens] = waits_of(lambda: learner.update(batch, 1))  # noqa: B023 - called at once
    assert found[30] == found[4096]


@pytest.mark.parametrize("coef", [0.0, 0.1])
def test_waits_for_routers_do_not_grow_either(coef: float, tmp_path: Path) -> None:
    model_path, found = str(make_tiny_moe(tmp_path)), {}
    for max_tokens in (30, 4096):
        settings = config(max_tokens_per_microbatch=max_tokens, router_aux_coef=coef)
        learner = make_learner(model_path, settings, build_algorithm("grpo"), 0)
        found[max_tokens] = waits_of(lambda: learner.update(make_batch(1), 1))  # noqa: B023 - called at once
    assert found[30] == found[4096]


def test_a_step_is_planned_on_one_thread_and_computed_on_all(model_path: str) -> None:
    threads: dict[str, int] = {}

    class Watched(SFT):
        def over_update(self, batch: StepBatch, signals: Signals, members_B: Tensor) -> None:
            threads["plan"] = torch.get_num_threads()

        def __call__(self, view: TokenView) -> Loss:
            threads["loss"] = torch.get_num_threads()
            return super().__call__(view)

    sft = build_algorithm("sft")
    watched = Algorithm("watched", sft.config, AlgorithmParts(loss=Watched(), aggregation=sft.aggregation))
    learner, before = make_learner(model_path, config(), watched, 0), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.get_num_threads() == 3, "torch takes what this process sets"
        learner.update(make_batch(1), 1)
        assert threads == {"plan": 1, "loss": 3} and torch.get_num_threads() == 3
        with pytest.raises(RftError, match="row 0"):
            make_learner(model_path, config(), build_algorithm("grpo"), 0).update(
                make_batch(1, rewards=[math.nan] * 12), 1
            )
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
