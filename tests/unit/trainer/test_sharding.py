"""Two processes train one model over gloo: the same losses, weights and checkpoints as one process alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PhiConfig, PhiForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rftcore.algorithms import build_algorithm
from rftcore.sync.checkpoint_layout import CheckpointLayout
from rftcore.trainer.batches.train_batch import TrainBatch
from rftcore.trainer.learner import Learner
from rftcore.trainer.model_shape import refuse_indivisible
from rftcore.trainer.network.network import Network
from rftcore.trainer.network.sharding import full, keep_gathered, make_grid, reshard, shard
from rftdata.errors import ConfigError
from tests.support.learning import VOCABULARY, config, make_batch, make_learner
from tests.support.models import make_tiny_moe
from tests.support.ranks import run_ranks
from tests.support.weights import weights_of

NUM_RANKS = 2
NUM_STEPS = 2
# Preset, changes to it, and whether the batch is pairs.
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "grpo": ("grpo", {"kl": {"type": "k3", "coef": 0.1}, "entropy": {"coef": 0.01}}, False),
    "ppo": ("ppo", {}, False),
    "clip_v": ("clip_v", {"mask": {"mu": 0.5, "max_share": 0.5}}, False),
    "dpo": ("dpo", {}, True),
    "kto": ("kto", {}, False),
    "jsd": ("jsd", {}, False),
    "reward_model": ("reward_model", {}, True),
}

DROPOUT = "lora with dropout"
ONE_ROW = "one experience for two ranks"
EXPERTS = "experts"
Job = tuple[str, str, str, dict[str, Any]]  # name, case, folder of the model, settings of the trainer
Trained = tuple[list[dict[str, float]], dict[str, Tensor], dict[str, Tensor]]
LORA = {"lora": {"rank": 4, "alpha": 8}}


def batch_of(case: str, step: int) -> TrainBatch:
    if case == ONE_ROW:
        return make_batch(step, groups=1, size=1)
    return replace(make_batch(step), paired=CASES[case][2])


def learner_of(case: str, model: str, teacher: str, **changes: Any) -> Learner:
    name, parts, _ = CASES.get(case, ("sft", {}, False))
    algorithm = build_algorithm(name, parts | ({"teacher": {"path": teacher}} if name == "jsd" else {}))
    return make_learner(model, config(**({"max_tokens_per_microbatch": 40} | changes)), algorithm, 0)


def trained(learner: Learner, case: str, first: int = 1) -> Trained:
    """Metrics of each step, the whole weights after the last step, and the whole gradients of the first."""
    seen = gradients(learner)
    metrics = [learner.update(batch_of(case, step), step) for step in range(first, first + NUM_STEPS)]
    return metrics, weights_of(learner), seen


def gradients(learner: Learner) -> dict[str, Tensor]:
    """The whole gradient of every weight of the checkpoint, filled in when the optimizer takes its next step."""
    seen: dict[str, Tensor] = {}

    def look(*_: Any) -> None:
        handle.remove()
        layout = CheckpointLayout(learner.policy.model)
        for name, parameter in learner.policy.model.named_parameters():
            if parameter.grad is not None:
                seen.update(layout.tensors(name, full(parameter.grad).clone()))

    handle = learner.policy.optimizers.members[0].register_step_pre_hook(look)
    return seen


def run_rank(rank: int, folder: Path, teacher: str, phi: str, jobs: list[Job]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=NUM_RANKS)
    results = {}
    for job, case, model, changes in jobs:
        learner = learner_of(case, model, teacher, **changes)
        results[job] = trained(learner, case)
        if job == DROPOUT:
            (folder / f"seed-of-{rank}").write_text(str(torch.initial_seed()))
        if job == "grpo":
            learner.save_checkpoint(folder / "by-two")
            learner.load_checkpoint(folder / "by-one")
            results["resumed by two"] = trained(learner, case, 1 + NUM_STEPS)
    with pytest.raises(ConfigError, match=r"cannot split this model \(got 'phi'\)"):
        learner_of(ONE_ROW, phi, teacher, num_gpus=NUM_RANKS, tensor_parallel=NUM_RANKS)
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


def saved(model: PreTrainedModel, folder: Path) -> str:
    """Save a model with parameters that are all far from 0 and from each other."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.25 + float(parameter.ndim == 1))
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return str(folder)


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def qwen3_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with norms over the size of a head."""
    torch.manual_seed(0)
    return saved(Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)), tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def phi_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose output layer has a bias."""
    torch.manual_seed(0)
    return saved(PhiForCausalLM(PhiConfig(**SIZES)), tmp_path_factory.mktemp("phi"))


@pytest.fixture(scope="module")
def moe_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A mixture of three experts, of which the second rank has one."""
    return str(make_tiny_moe(tmp_path_factory.mktemp("moe"), num_experts=3))


@pytest.fixture(scope="module")
def by_two(
    model_path: str,
    moved_path: str,
    qwen3_path: str,
    phi_path: str,
    moe_path: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, dict[str, Trained]]:
    """The results of two ranks, and the folder with their checkpoint and that of one rank."""
    folder = tmp_path_factory.mktemp("ranks")
    one = learner_of("grpo", model_path, moved_path)
    trained(one, "grpo")
    one.save_checkpoint(folder / "by-one")
    jobs: list[Job] = [(case, case, model_path, {}) for case in CASES]
    split = {"num_gpus": NUM_RANKS, "tensor_parallel": NUM_RANKS}
    jobs += [
        ("lora", "grpo", model_path, LORA),
        ("split heads", "grpo", model_path, split),
        ("split heads, teacher", "jsd", model_path, split),
        ("recomputed activations", "grpo", model_path, {"gradient_checkpointing": True}),
        ("one pass", "grpo", model_path, {"max_tokens_per_microbatch": 10_000}),
        (DROPOUT, "grpo", model_path, {"lora": {"rank": 4, "alpha": 8, "dropout": 0.5}}),
        ("split heads, qwen3", "grpo", qwen3_path, split),
        (ONE_ROW, ONE_ROW, phi_path, {}),
        (EXPERTS, "grpo", moe_path, {}),
    ]
    run_ranks(run_rank, NUM_RANKS, folder, moved_path, phi_path, jobs)
    first, second = (torch.load(folder / f"{rank}.pt") for rank in range(NUM_RANKS))
    for job, (metrics, weights, _) in first.items():
        other_metrics, other_weights, _ = second[job]
        assert all(torch.equal(weights[name], other_weights[name]) for name in weights), job
        for ours, theirs in zip(metrics, other_metrics, strict=True):
            assert _without_times(ours) == _without_times(theirs), job
    return folder, first


def _without_times(metrics: dict[str, float]) -> dict[str, float]:
    """Drop times, and the loss of routers, which is computed per micro-batch and so depends on how the batch is cut."""
    return {
        name: value
        for name, value in metrics.items()
        if name not in ("seconds", "tokens_per_second", "router_aux_loss")
    }


def same(found: Trained, expected: Trained) -> None:
    for ours, theirs in zip(found[0], expected[0], strict=True):
        assert _without_times(ours) == pytest.approx(_without_times(theirs), rel=1e-3, abs=1e-5)
    num_compared = num_all = 0
    for ours_by_name, theirs_by_name in zip(found[1:], expected[1:], strict=True):
        assert ours_by_name.keys() == theirs_by_name.keys()
        for name, tensor in theirs_by_name.items():
            compared = torch.ones_like(tensor, dtype=torch.bool)
            if theirs_by_name is expected[1]:
                compared = certain(name, found[2], expected[2], tensor)
            num_compared, num_all = num_compared + int(compared.sum()), num_all + compared.numel()
            torch.testing.assert_close(
                ours_by_name[name][compared],
                tensor[compared],
                rtol=1e-3,
                atol=2e-4,
                msg=lambda text, name=name: f"{name}: {text}",
            )
    assert num_compared > 0.95 * num_all


def certain(name: str, ours: dict[str, Tensor], theirs: dict[str, Tensor], weight: Tensor) -> Tensor:
    """Return where the gradient of a weight is 0, or more than rounding errors, from which AdamW would make whole steps of either sign."""
    name = "model.embed_tokens.weight" if name == "lm_head.weight" and name not in theirs else name
    if name not in theirs:  # adapters are trained, and the weights are those with the adapters in them
        return torch.ones_like(weight, dtype=torch.bool)
    return (theirs[name].abs() > 1e-5) | ((theirs[name] == 0) & (ours[name] == 0))


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_like_one(
    case: str, by_two: tuple[Path, dict[str, Trained]], model_path: str, moved_path: str
) -> None:
    same(by_two[1][case], trained(learner_of(case, model_path, moved_path), case))


@pytest.mark.parametrize(
    ("job", "case"),
    [
        ("split heads", "grpo"),
        ("split heads, teacher", "jsd"),
        ("recomputed activations", "grpo"),
        ("one pass", "grpo"),
    ],
)
def test_other_ways_to_compute_give_the_same_result(
    job: str, case: str, by_two: tuple[Path, dict[str, Trained]]
) -> None:
    same(by_two[1][job], by_two[1][case])


@pytest.mark.parametrize("job", ["split heads, qwen3", ONE_ROW, EXPERTS])
def test_two_ranks_train_models_of_other_families_like_one(
    job: str, by_two: tuple[Path, dict[str, Trained]], qwen3_path: str, phi_path: str, moe_path: str, moved_path: str
) -> None:
    case = ONE_ROW if job == ONE_ROW else "grpo"
    path = {ONE_ROW: phi_path, EXPERTS: moe_path}.get(job, qwen3_path)
    same(by_two[1][job], trained(learner_of(case, path, moved_path), case))


def test_two_ranks_train_adapters_like_one(
    by_two: tuple[Path, dict[str, Trained]], model_path: str, moved_path: str
) -> None:
    same(by_two[1]["lora"], trained(learner_of("grpo", model_path, moved_path, **LORA), "grpo"))


def test_adapters_of_two_ranks_drop_different_inputs(by_two: tuple[Path, dict[str, Trained]]) -> None:
    assert len({(by_two[0] / f"seed-of-{rank}").read_text() for rank in range(NUM_RANKS)}) == NUM_RANKS


def test_one_rank_resumes_a_checkpoint_of_two_and_two_resume_that_of_one(
    by_two: tuple[Path, dict[str, Trained]], model_path: str, moved_path: str
) -> None:
    folder, results = by_two
    through = learner_of("grpo", model_path, moved_path)
    trained(through, "grpo")
    expected = trained(through, "grpo", 1 + NUM_STEPS)
    same(results["resumed by two"], expected)
    resumed = learner_of("grpo", model_path, moved_path)
    resumed.load_checkpoint(folder / "by-two")
    assert resumed.step == NUM_STEPS
    same(trained(resumed, "grpo", 1 + NUM_STEPS), expected)
    assert {path.suffix for path in (folder / "by-two").rglob("*") if path.is_file()} == {".json", ".safetensors"}


@pytest.fixture
def mesh_of_one(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone: models are sharded, as on one GPU."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def gathered_weights(network: Network) -> list[str]:
    return [name for name, parameter in network.model.named_parameters() if not isinstance(parameter, DTensor)]


@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_sharded_model_is_called_unpacked_between_updates(
    model_path: str, moved_path: str, tmp_path: Path, steps_before: int
) -> None:
    alone = learner_of("grpo", model_path, moved_path)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        sharded = learner_of("grpo", model_path, moved_path)
        for step in range(1, 1 + steps_before):
            sharded.update(make_batch(step), step)
            alone.update(make_batch(step), step)
        logits = []
        for learner in (alone, sharded):
            with torch.no_grad(), learner.policy.unpacked() as model:
                logits.append(model(torch.tensor([[3, 4, 5]])).logits)
                assert model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=2, do_sample=False).shape == (1, 5)
        torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-5)
        assert gathered_weights(sharded.policy) == []
        found, expected = (learner.update(make_batch(7), 1 + steps_before) for learner in (sharded, alone))
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4, abs=1e-6)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("mesh_of_one")
@pytest.mark.parametrize("case", ["grpo", "jsd", "kto"])
def test_no_model_stays_gathered_after_an_update(model_path: str, moved_path: str, case: str) -> None:
    learner = learner_of(case, model_path, moved_path)
    learner.update(batch_of(case, 1), 1)
    for network in (learner.policy, learner.models.reference, learner.models.teacher):
        assert network is None or gathered_weights(network) == []


@pytest.mark.usefixtures("mesh_of_one")
def test_weights_can_stay_gathered_between_the_micro_batches_of_an_update() -> None:
    batch = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    gradients = []
    for keeps in (False, True):
        torch.manual_seed(1)
        layer = nn.Linear(4, 4)
        root = nn.Sequential(layer, nn.Linear(4, 2))
        shard(
            root,
            [layer],
            make_grid(torch.device("cpu")),
            master=torch.float32,
            compute=torch.bfloat16,
            keeps_gathered=keeps,
        )
        for number, micro_batch in enumerate(batch):
            stay = keeps and number < 2
            keep_gathered(root, keep=stay)
            root(micro_batch.bfloat16()).float().square().sum().backward()
            assert isinstance(layer.weight, DTensor) is not stay
        with torch.no_grad():
            root(batch[0].bfloat16())
        assert isinstance(layer.weight, DTensor) is not keeps
        reshard(root)
        gradients.append([full(parameter.grad) for parameter in root.parameters() if parameter.grad is not None])
        assert all(
            isinstance(parameter, DTensor) and parameter.dtype == torch.float32 for parameter in root.parameters()
        )
    assert len(gradients[0]) == 4
    assert all(map(torch.equal, *gradients))


@pytest.mark.usefixtures("mesh_of_one")
def test_a_run_resumed_into_the_warm_up_of_its_critic_can_be_saved(model_path: str, tmp_path: Path) -> None:
    first = make_learner(model_path, config(), build_algorithm("ppo"), 0)
    first.update(make_batch(1), 1)
    first.save_checkpoint(tmp_path / "first")
    resumed = make_learner(model_path, config(), build_algorithm("ppo", {"critic": {"warmup_steps": 5}}), 0)
    resumed.load_checkpoint(tmp_path / "first")
    expected = {name: full(value).clone() for name, value in resumed.policy.optimizers.state().items()}
    resumed.update(make_batch(2), 2)
    resumed.save_checkpoint(tmp_path / "second")
    resumed.load_checkpoint(tmp_path / "second")
    found = {name: full(value) for name, value in resumed.policy.optimizers.state().items()}
    assert expected and found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items()), "the policy was not updated"


def test_a_model_that_tensor_parallelism_cannot_split_is_refused(phi_path: str, model_path: str) -> None:
    refuse_indivisible(AutoConfig.from_pretrained(model_path).to_dict(), 2)
    with pytest.raises(ConfigError, match=r"does not divide 2 \(key heads\) \(got 4\); allowed: 1, 2"):
        refuse_indivisible(AutoConfig.from_pretrained(model_path).to_dict(), 4)
    with pytest.raises(ConfigError, match=r"cannot split this model \(got 'phi'\)"):
        refuse_indivisible(AutoConfig.from_pretrained(phi_path).to_dict(), 2)
