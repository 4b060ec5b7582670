"""The ranks of a trainer send the whole model to engines, each row once and from a rank that holds it, however the model is sharded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from rftcore.algorithms import build_algorithm
from rftcore.sync.checkpoint_layout import CheckpointLayout
from rftcore.sync.tensors import HeldRows, WireTensor
from rftcore.sync.transfer.plan import TransferPlan
from rftcore.trainer.learner import Learner
from rftcore.trainer.network.sharding import Grid, full
from rftcore.trainer.network.weight_parts import held_rows, wire_tensors
from tests.support.learning import config, make_learner, save_model
from tests.support.models import make_tiny_moe
from tests.support.ranks import run_ranks
from tests.support.weights import weights_of

NUM_RANKS = 4
# Neither the vocabulary of 50 nor the 6 experts are multiples of the ranks.
CASES: dict[str, dict[str, Any]] = {
    "rows": {"num_gpus": 4},
    "rows and heads": {"num_gpus": 4, "tensor_parallel": 2},
    "adapters": {"num_gpus": 4, "lora": {"rank": 2, "alpha": 8}},
    "experts": {"num_gpus": 4},
    "experts, adapters": {"num_gpus": 4, "lora": {"rank": 2, "alpha": 8}},
}
TIED = [True, False]
# Name, shape and placements over 2 × 2 ranks.
OTHERS: list[tuple[str, tuple[int, ...], tuple[Placement, Placement]]] = [
    ("copies of halves", (7, 3), (Replicate(), Shard(0))),
    ("copies", (5,), (Replicate(), Replicate())),
    ("columns", (3, 8), (Shard(1), Replicate())),
    ("blocks", (6, 6), (Shard(0), Shard(1))),
    ("fewer rows than ranks", (1, 2), (Shard(0), Shard(0))),
]

Found = tuple[tuple[WireTensor, ...], list[HeldRows], dict[str, Tensor]]


def own_heads(learner: Learner) -> None:
    """Give adapters a value: B is 0 at first."""
    with torch.no_grad():
        for name, parameter in learner.policy.model.named_parameters():
            if ".lora_B" in name:
                parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) / 50)


def whole_weights(learner: Learner) -> dict[str, Tensor]:
    """Return the weights as torch gathers them, under the names of the checkpoint."""
    layout = CheckpointLayout(learner.policy.model)
    return {
        part: tensor.clone()
        for name, weight in learner.policy._weights()
        for part, tensor in layout.tensors(name, full(weight))
    }


def plan_of(tensors: tuple[WireTensor, ...]) -> TransferPlan:
    return TransferPlan(
        transfer_id=1,
        group_id=1,
        backend="gloo",
        host="",
        port=0,
        num_ranks=NUM_RANKS,
        first_rank=0,
        tensors=tensors,
        dtype="float32",
        bucket_bytes=1,
        timeout_s=1,
    )


def run_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=NUM_RANKS)
    found: dict[str, Found] = {}
    for tied in TIED:
        for case, settings in CASES.items():
            model = folder / f"{'experts' if case.startswith('experts') else 'dense'}-{tied}"
            learner = make_learner(str(model), config(**settings), build_algorithm("sft", {}), 0)
            own_heads(learner)
            tensors = learner.wire_tensors()
            held = [replace(rows, rows=rows.rows.clone()) for rows in learner.held_rows(plan_of(tensors))]
            whole = whole_weights(learner)
            found[f"{case}, {tied}"] = tensors, held, whole
            written = weights_of(learner)
            assert written.keys() == whole.keys()
            assert all(torch.equal(tensor, whole[name]) for name, tensor in written.items())
            if case == "adapters":
                alone = learner.wire_tensors(adapters_alone=True)
                parts = [*learner.held_rows(replace(plan_of(alone), adapters={"r": 2}))]
                found[f"{case} alone, {tied}"] = alone, parts, learner.policy.adapter_tensors()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    grid = Grid(torch.device("cpu"), mesh)
    others = {name: torch.randn(shape, generator=torch.Generator().manual_seed(1)) for name, shape, _ in OTHERS}
    sharded = [(name, distribute_tensor(others[name], mesh, placements)) for name, _, placements in OTHERS]
    found["others"] = (wire_tensors(sharded, {}, grid), list(held_rows(sharded, torch.float32)), others)
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models."""
    folder = tmp_path_factory.mktemp("ranks")
    for tied in TIED:
        save_model(folder / f"dense-{tied}", tied=tied)
        make_tiny_moe(folder / f"experts-{tied}", tied=tied, num_experts=6)
    return folder


@pytest.fixture(scope="module")
def by_four(folder: Path) -> list[dict[str, Found]]:
    """The results of each of four ranks, by case."""
    run_ranks(run_rank, NUM_RANKS, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(NUM_RANKS)]


def put_together(ranks: list[Found]) -> dict[str, Tensor]:
    """Join the tensors from the parts that the ranks send."""
    tensors, _, whole = ranks[0]
    assert all(found[0] == tensors for found in ranks), "every rank knows the same division"
    held = [{rows.name: rows for rows in found[1]} for found in ranks]
    result: dict[str, Tensor] = {}
    for tensor in tensors:
        if tensor.same_as is not None:
            assert not any(tensor.name in own for own in held)
            result[tensor.name] = result[tensor.same_as]
            continue
        result[tensor.name] = torch.full(tensor.shape, torch.nan)
        for part in tensor.parts:
            rows = held[part.sender][tensor.name]
            first = part.first_row - rows.first_row
            assert first >= 0
            target = result[tensor.name][part.first_row : part.first_row + part.num_rows]
            assert bool(target.isnan().all()), "a row is sent once"
            target.copy_(rows.rows[first : first + part.num_rows])
    assert result.keys() == whole.keys()
    return result


@pytest.mark.parametrize("tied", TIED)
@pytest.mark.parametrize("case", [*CASES, "adapters alone"])
def test_the_parts_of_all_ranks_are_the_model(by_four: list[dict[str, Found]], case: str, tied: bool) -> None:
    ranks = [found[f"{case}, {tied}"] for found in by_four]
    result, whole = put_together(ranks), ranks[0][2]
    assert all(torch.equal(result[name], tensor) for name, tensor in whole.items())
    travelling = [tensor for tensor in ranks[0][0] if tensor.same_as is None]
    is_whole = case != "adapters alone"
    assert ("lm_head.weight" in {tensor.name for tensor in travelling}) is (is_whole and not tied)
    assert all(".lora_" in tensor.name for tensor in travelling) is not is_whole
    num_sent = [0] * NUM_RANKS
    for tensor in travelling:
        for part in tensor.parts:
            num_sent[part.sender] += part.num_rows * whole[tensor.name].numel() // len(whole[tensor.name])
    # A of rank 2 has rows for two of four ranks, and the experts lie on three of them.
    is_even = is_whole and not case.startswith("experts")
    assert max(num_sent) < (1.1 if is_even else 1.6) * sum(num_sent) / NUM_RANKS, "all send alike"


@pytest.mark.parametrize("tied", TIED)
def test_the_rank_that_has_an_expert_sends_it(by_four: list[dict[str, Found]], folder: Path, tied: bool) -> None:
    tensors, _, whole = by_four[0][f"experts, {tied}"]
    stored = load_file(folder / f"experts-{tied}" / "model.safetensors")
    assert all(torch.equal(whole[name], tensor) for name, tensor in stored.items())
    senders = {
        int(tensor.name.split(".")[5]): {part.sender for part in tensor.parts}
        for tensor in tensors
        if ".experts." in tensor.name
    }
    assert senders == {expert: {expert // 2} for expert in range(6)}


@pytest.mark.parametrize("case", ["rows", "adapters"])
def test_a_rank_holds_only_its_rows(by_four: list[dict[str, Found]], case: str) -> None:
    for found in by_four:
        _, held, whole = found[f"{case}, True"]
        assert all(len(rows.rows) <= -(-len(whole[rows.name]) // NUM_RANKS) for rows in held)


def test_adapters_are_merged_into_the_rows(by_four: list[dict[str, Found]], tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", tied=True)
    learner = make_learner(str(model), config(lora=CASES["adapters"]["lora"]), build_algorithm("sft", {}), 0)
    own_heads(learner)
    result = put_together([found["adapters, True"] for found in by_four])
    for name, tensor in whole_weights(learner).items():
        torch.testing.assert_close(result[name], tensor, msg=name)


def test_other_placements_than_rows_are_gathered_and_copies_are_divided(by_four: list[dict[str, Found]]) -> None:
    ranks = [found["others"] for found in by_four]
    result = put_together(ranks)
    assert all(torch.equal(result[name], tensor) for name, tensor in ranks[0][2].items())
    senders = {tensor.name: [part.sender for part in tensor.parts] for tensor in ranks[0][0]}
    assert senders == {
        "copies of halves": [0, 2, 1, 3],
        "copies": [0, 1, 2],
        "columns": [0, 1, 2],
        "blocks": [0, 1, 2, 3],
        "fewer rows than ranks": [0],
    }
