"""On a CUDA device: every preset trains as it does on the CPU. `pytest -m gpu`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rftcore.algorithms import build_algorithm
from rftcore.algorithms.presets import presets
from rftcore.trainer.batches.micro_batches import Cutting, split_batch
from rftcore.trainer.batches.padding import PackedColumns, pad_batch
from rftcore.trainer.batches.train_batch import TrainBatch
from rftcore.trainer.network.attention import packed_attention
from tests.support.learning import VOCABULARY, batch_with_everything, config, make_batch, make_learner, save_model
from tests.support.models import make_tiny_moe

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda", 0)


def test_presets_give_the_same_losses_on_a_gpu_as_on_a_cpu(cuda: torch.device, tmp_path: Path) -> None:
    model = str(save_model(tmp_path / "model", tied=True))
    differences = {}
    for name in sorted(presets()):
        changes = {"teacher": model} if "teacher_logits" in build_algorithm(name, {"teacher": model}).signals else {}
        losses = {}
        for device in ("cpu", "cuda"):
            algorithm = build_algorithm(name, changes)
            learner = make_learner(model, config(), algorithm, 0, device=device)
            metrics = learner.update(batch_with_everything(paired=algorithm.draws_pairs), 1)
            assert metrics["skipped"] == 0.0, (name, device)
            losses[device] = metrics["loss"]
        differences[name] = abs(losses["cpu"] - losses["cuda"])
        # A critic and a reward model begin with a random head, drawn on another device here and there.
        if algorithm.trains_scorer or algorithm.config.critic is not None:
            assert math.isfinite(losses["cuda"])
        else:
            assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-3, abs=1e-4), name
    print(f"{len(differences)} presets; largest difference of a loss {max(differences.values()):.2e}")


def many_lengths() -> TrainBatch:
    """Groups of 4 with prompts and responses of 1 to 60 tokens, and some experiences that share no prompt."""
    random = np.random.default_rng(3)
    rows: list[tuple[list[int], list[int], int]] = []
    for group in range(12):
        prompt = random.integers(0, VOCABULARY, random.integers(1, 60)).tolist()
        for member in range(4):
            own = prompt if group < 9 else [*prompt, member]
            rows.append((own, random.integers(0, VOCABULARY, random.integers(1, 60)).tolist(), group))
    offsets = np.concatenate([[0], np.cumsum([len(prompt) + len(response) for prompt, response, _ in rows])])
    return pad_batch(
        PackedColumns(
            token_ids=(np.concatenate([[*prompt, *response] for prompt, response, _ in rows]), offsets),
            loss_mask=(np.concatenate([[False] * len(p) + [True] * len(r) for p, r, _ in rows]), offsets),
            behavior_logprobs=(np.full(offsets[-1], -3.9, np.float32), offsets),
            rewards=random.integers(0, 2, len(rows)).astype(np.float32),
            group_ids=[group for *_, group in rows],
            rollout_index=list(range(len(rows))),
        )
    )


def test_packed_attention_is_that_of_masked_rows(cuda: torch.device) -> None:
    batch = many_lengths()
    by_kernel: dict[str, list[Tensor]] = {}
    for kernel in ("segments", "rows"):
        ((micro,),) = split_batch(batch, Cutting(max_tokens=100_000, sharing="always", kernel=kernel))  # type: ignore[arg-type]
        random = torch.Generator(cuda).manual_seed(0)
        shapes = ((1, 8, micro.num_tokens, 64), (1, 2, micro.num_tokens, 64), (1, 2, micro.num_tokens, 64))
        inputs = [torch.randn(shape, generator=random, device=cuda).bfloat16().requires_grad_() for shape in shapes]
        given = inputs if kernel == "segments" else [x.detach().float().requires_grad_() for x in inputs]
        out, _ = packed_attention(torch.nn.Module(), *given, None, packing=micro.to(cuda).packing, scaling=0.125)
        weights = torch.randn(out.shape, generator=torch.Generator(cuda).manual_seed(1), device=cuda)
        by_kernel[kernel] = [out.float(), *(x.float() for x in torch.autograd.grad((out * weights).sum(), given))]
    for flash, exact in zip(by_kernel["segments"], by_kernel["rows"], strict=True):
        assert (flash - exact).norm() < 0.01 * exact.norm()
        torch.testing.assert_close(flash, exact, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"compile": True},
        {"share_prompts": False},
        {"max_tokens_per_microbatch": 500},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "compile": True},
    ],
)
def test_the_ways_to_compute_on_a_gpu_agree_with_the_cpu(
    changes: dict[str, Any], cuda: torch.device, tmp_path: Path
) -> None:
    model = str(save_model(tmp_path / "model", tied=True))
    algorithm = build_algorithm("grpo", {"entropy": {"coef": 0.01}})
    exact = make_learner(model, config(), algorithm, 0, device="cpu").update(many_lengths(), 1)
    found = make_learner(model, config(**{"autocast": "bfloat16"} | changes), algorithm, 0).update(many_lengths(), 1)
    for name in ("loss", "grad_norm", "entropy", "logprob_diff"):
        assert found[name] == pytest.approx(exact[name], rel=0.03, abs=2e-3), name


@pytest.mark.parametrize(
    ("changes", "close"),
    [
        ({"autocast": "none"}, 1e-3),
        ({}, 0.05),
        ({"compile": True}, 0.05),
        ({"gradient_checkpointing": True}, 0.05),
        ({"max_tokens_per_microbatch": 500}, 0.05),
    ],
)
def test_a_mixture_of_experts_trains_on_a_gpu_as_on_the_cpu(
    changes: dict[str, Any], close: float, cuda: torch.device, tmp_path: Path
) -> None:
    model = str(make_tiny_moe(tmp_path / "model", num_experts=8))
    algorithm, shared = build_algorithm("grpo", {"entropy": {"coef": 0.01}}), {"router_aux_coef": 0.1}
    # The loss of the routers is that of a micro-batch.
    cut = {name: value for name, value in changes.items() if name == "max_tokens_per_microbatch"}
    exact = make_learner(model, config(**shared | cut), algorithm, 0, device="cpu").update(many_lengths(), 1)
    found = make_learner(model, config(**{"autocast": "bfloat16"} | shared | changes), algorithm, 0).update(
        many_lengths(), 1
    )
    for name in ("loss", "grad_norm", "entropy", "router_aux_loss", "router_entropy"):
        assert found[name] == pytest.approx(exact[name], rel=close, abs=close / 20), name
    # Routers send some tokens to other experts in bfloat16, and this metric counts tokens: 0.845 instead of 0.744.
    assert found["router_max_violation"] == pytest.approx(exact["router_max_violation"], rel=4 * close)


def test_a_micro_batch_is_moved_while_the_gpu_is_busy(cuda: torch.device) -> None:
    cutting = Cutting(max_tokens=1_000_000, sharing="never")
    ((micro,),) = split_batch(make_batch(1, groups=300, size=16), cutting)
    assert micro.token_ids_L.nbytes > 2**17  # small copies never wait
    micro.to(cuda)  # allocates
    torch.cuda.synchronize()
    torch.cuda._sleep(2**34)  # cycles: some seconds, longer than this process may have to wait for a processor
    busy = torch.cuda.Event()
    busy.record()
    micro.to(cuda)
    assert not busy.query()


def test_adapters_train_on_a_gpu(cuda: torch.device, tmp_path: Path) -> None:
    model = str(save_model(tmp_path / "model", tied=True))
    learner = make_learner(model, config(autocast="bfloat16", lora={"rank": 4, "alpha": 8}), build_algorithm("sft"), 0)
    losses = [learner.update(many_lengths(), step)["loss"] for step in range(1, 11)]
    assert losses[-1] < losses[0]
    learner.save_checkpoint(tmp_path / "c")
    learner.load_checkpoint(tmp_path / "c")
    assert learner.update(many_lengths(), 11)["loss"] < losses[0]


def test_an_offloaded_reference_changes_nothing(cuda: torch.device, tmp_path: Path) -> None:
    model = str(save_model(tmp_path / "model", tied=True))
    found = {}
    for offload in (False, True):
        algorithm = build_algorithm("grpo", {"kl": {"type": "k3", "coef": 0.1}})
        learner = make_learner(model, config(autocast="bfloat16", offload_reference=offload), algorithm, 0)
        found[offload] = [learner.update(many_lengths(), step)["loss"] for step in (1, 2)]
    # Sums of a GPU differ from run to run, by up to 1.6e-4 in the second loss of twelve pairs. Its penalty, where the reference counts, is 8e-3.
    assert found[True] == pytest.approx(found[False], abs=1e-3)


def test_a_checkpoint_of_a_gpu_is_resumed_on_the_cpu(cuda: torch.device, tmp_path: Path) -> None:
    model = str(save_model(tmp_path / "model", tied=True))
    first = make_learner(model, config(), build_algorithm("grpo"), 0)
    first.update(many_lengths(), 1)
    first.save_checkpoint(tmp_path / "c")
    expected = first.update(many_lengths(), 2)
    resumed = make_learner(model, config(), build_algorithm("grpo"), 0, device="cpu")
    resumed.load_checkpoint(tmp_path / "c")
    found = resumed.update(many_lengths(), 2)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-3, abs=1e-4)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-2)
