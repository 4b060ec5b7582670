"""Adapters alone (`sync.adapters: alone`): an engine that gets them computes what the merged model does, beside the model's weights."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import AutoModelForCausalLM

from rftcore.config.run import parse_config
from rftcore.config.trainer import LoraConfig
from rftcore.engines.base import Decoding, EngineConfig, Generation
from rftcore.engines.transformers_engine import TransformersEngine
from rftcore.engines.vllm_arguments import SLOT_RANKS
from rftcore.engines.vllm_engine import VllmEngine
from rftcore.resolved import ResolvedRun
from rftcore.sync.addresses import LOOPBACK
from rftcore.sync.base import Publication
from rftcore.sync.files.adapters_file import PREFIX, write_adapters
from rftcore.sync.files.weights_file import write_atomically
from rftcore.sync.transfer.group import open_store
from rftcore.sync.transfer.plan import TransferPlan
from rftcore.trainer.learner_arguments import LearnerArguments
from rftcore.trainer.network.lora import adapters_json
from rftcore.trainer.processes.learner_group import LearnerGroup
from rftcore.trainer.processes.rank_arguments import RankArguments
from rftcore.trainer.publish import Export, Exports
from rftdata.errors import EngineStoppedError, ModelError
from rftdata.postgres.embedded import EmbeddedServer
from tests.support.command_line import rows
from tests.support.learning import config, make_batch
from tests.support.models import make_tiny_model
from tests.support.small_runs import settings, start
from tests.support.waiting import PATIENCE_S, printed_by, until_it_happens
from tests.support.warm_up import Warm
from tests.support.weights import write_weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ENGINE = EngineConfig(dtype="float32", context_length=128, max_num_seqs=4, kv_cache_gib=0.0625)
PROMPT = list(range(5, 35))


class Trained:
    """A learner with adapters, and files of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = make_tiny_model(folder / "model")
        settings = config(lora={"rank": 4, "alpha": 16}, learning_rate=0.05)
        assert settings.lora is not None
        self.adapters = adapters_json(settings.lora)
        learner = LearnerArguments(model_path=str(self.model), config=settings, seed=0)
        arguments = RankArguments(learner=learner, algorithm="sft", algorithm_settings={})
        self.learner = LearnerGroup(arguments, arguments.build_algorithm())
        self.alone, self.merged = Exports(self.learner, settings.lora), Exports(self.learner, None)

    def train(self, step: int) -> None:
        self.learner.update(make_batch(step), step)

    def publish(self, name: str, export: Export) -> Publication:
        return write_atomically(self.folder / f"{name}.safetensors", export)

    def send(self, engine: VllmEngine | TransformersEngine, version: int) -> None:
        """Send the adapters into a live engine."""
        number, store = next(_transfers), open_store(LOOPBACK, PATIENCE_S)
        plan = TransferPlan(
            transfer_id=number,
            group_id=number,
            backend="gloo",
            host=LOOPBACK,
            port=store.port,
            num_ranks=1 + engine.reception.num_ranks,
            first_rank=0,
            tensors=self.learner.weight_tensors(adapters_alone=True),
            dtype="float32",
            bucket_bytes=1 << 14,
            timeout_s=PATIENCE_S,
            adapters=self.adapters,
        )
        assert len(plan.buckets()) > 2
        with ThreadPoolExecutor() as pool:
            taken = pool.submit(engine.receive_weights, replace(plan, first_rank=1), version)
            sent = self.learner.send_weights(plan, store)
            assert taken.result(timeout=PATIENCE_S) == sent.checksum
        self.learner.leave_weight_group()

    def checkpoint(self, name: str) -> Path:
        self.learner.save_pretrained(self.folder / name)
        return self.folder / name


_transfers = itertools.count(1)


def differences(generation: Generation, model: Path) -> list[float]:
    """Differences of log-probabilities between sampled tokens and the model in a folder."""
    with torch.no_grad():
        logprobs = opened(model)(torch.tensor([PROMPT + generation.token_ids])).logits[0].log_softmax(-1)
    expected = [logprobs[len(PROMPT) - 1 + k, token].item() for k, token in enumerate(generation.token_ids)]
    return [abs(a - b) for a, b in zip(generation.logprobs, expected, strict=True)]


@cache
def opened(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model)


def worst_difference(engine: VllmEngine | TransformersEngine, model: Path) -> float:
    return max(differences(asyncio.run(engine.generate(PROMPT, Decoding(max_tokens=12))), model))


async def sample_and_load(engine: VllmEngine, load: Callable[[], object]) -> list[Generation]:
    """Change the adapters while four requests run and others wait: when the first has ended."""
    tasks = [asyncio.create_task(engine.generate(PROMPT, Decoding(max_tokens=95))) for _ in range(16)]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    try:
        await asyncio.to_thread(load)
    finally:
        await asyncio.gather(*tasks, return_exceptions=True)
    return [task.result() for task in tasks]


def load(engine: VllmEngine, publication: Publication, version: int) -> None:
    engine.load_weights(publication.uri, version, publication.checksum)


def switches(generation: Generation, models: dict[int, Path]) -> bool:
    """Whether a response has tokens of both versions; every token must be of the version that it names."""
    found = differences(generation, models[min(models)]), differences(generation, models[max(models)])
    starts = {version: start for start, version in generation.version_spans}
    switch = starts.get(max(models), len(generation.token_ids))
    assert max(found[0][:switch], default=0) < 1e-3
    assert max(found[1][switch:], default=0) < 1e-3
    return starts.keys() == models.keys()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("adapters"))


def test_vllm_samples_with_the_newest_adapters(trained: Trained) -> None:
    os.environ.update(VllmEngine.process_environment(ENGINE))
    engine = VllmEngine(trained.model, ENGINE.model_copy(update={"adapter_rank": 4}))
    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks) == SLOT_RANKS
    try:
        assert worst_difference(engine, trained.model) < 1e-3
        before = trained.publish("0", trained.alone.of_learner())
        engine.load_weights(before.uri, 1, before.checksum)
        assert worst_difference(engine, trained.model) < 1e-3, "adapters begin as nothing"
        for version in (2, 3):
            trained.train(version)
            found = trained.publish(str(version), trained.alone.of_learner())
            merged = trained.checkpoint(f"merged-{version}")
            assert worst_difference(engine, merged) > 0.05, "the check must be able to fail"
            engine.load_weights(found.uri, version, found.checksum)
            assert worst_difference(engine, merged) < 1e-3
            assert engine.policy_version_id == version
        versions = itertools.count(4)

        def switched() -> bool | None:
            version = next(versions)
            trained.train(version)
            newest = trained.publish(str(version), trained.alone.of_learner())
            both = {
                version - 1: trained.folder / f"merged-{version - 1}",
                version: trained.checkpoint(f"merged-{version}"),
            }
            found = asyncio.run(sample_and_load(engine, lambda: load(engine, newest, version)))
            return sum(switches(generation, both) for generation in found) > 0 or None

        until_it_happens(switched, "a request runs while the adapters change")
        # A checkpoint's folder, as for the test sets, and the model without adapters.
        again = trained.publish("again", trained.alone.of_folder(trained.folder / "merged-2"))
        engine.load_weights(again.uri, 1005, again.checksum)
        assert worst_difference(engine, trained.folder / "merged-2") < 1e-3
        first = trained.publish("first", trained.alone.of_folder(trained.model))
        engine.load_weights(first.uri, 1006, first.checksum)
        assert worst_difference(engine, trained.model) < 1e-3
        whole = trained.publish("whole", trained.merged.of_learner())
        with pytest.raises(ModelError, match="was started for adapters only"):
            engine.load_weights(whole.uri, 1007, whole.checksum)
        assert found.num_bytes < whole.num_bytes / 5
        with pytest.raises(EngineStoppedError, match="adapters cannot be added to running requests"):
            asyncio.run(sample_and_load(engine, lambda: load(engine, found, 1007)))
    finally:
        engine.close()


# Two more processes that import vLLM take half a minute of processor time.
@pytest.mark.parametrize("num_processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_live_engine_takes_adapters_from_the_trainer(trained: Trained, num_processes: int) -> None:
    settings = ENGINE.model_copy(update={"adapter_rank": 4, "tensor_parallel_size": num_processes})
    os.environ.update(VllmEngine.process_environment(settings))
    engine, folders = VllmEngine(trained.model, settings), dict[int, Path]()
    try:
        versions = itertools.count(10)

        def train() -> int:
            version = next(versions)
            trained.train(version)
            folders[version] = trained.checkpoint(f"live-{num_processes}-{version}")
            assert worst_difference(engine, folders[version]) > 0.05, "the check must be able to fail"
            return version

        def switched() -> bool | None:
            version = train()
            spread = asyncio.run(sample_and_load(engine, lambda: trained.send(engine, version)))
            both = {number: folders[number] for number in (version - 1, version)}
            return sum(switches(generation, both) for generation in spread) > 0 or None

        for _ in range(2):
            trained.send(engine, version := train())
            assert worst_difference(engine, folders[version]) < 1e-3
        until_it_happens(switched, "a request runs while the adapters change")
        # What vLLM's kernels read is, bit by bit, what vLLM reads from a file.
        file = trained.publish(f"live-{num_processes}", trained.alone.of_learner())
        assert engine.differing_weights(file.uri, file.checksum) == []
        trained.train(last := next(versions))
        other = trained.publish(f"other-{num_processes}", trained.alone.of_learner())
        differing = engine.differing_weights(other.uri, other.checksum)
        assert {name.split(".")[-2] for name in differing} == {"lora_a_stacked", "lora_b_stacked"}
        base = trained.publish(f"base-{num_processes}", trained.alone.of_folder(trained.model))
        assert engine.differing_weights(base.uri, base.checksum) == ["all adapters"]
        trained.send(engine, last)
        assert worst_difference(engine, trained.checkpoint(f"live-{num_processes}-{last}")) < 1e-3
        with pytest.raises(
            ModelError,
            match="the trainer sends consists of whole weights, and this engine was started for adapters only",
        ):
            engine.refuse_unfit(())
        with pytest.raises(
            ModelError, match=r"adapters of a rank that this engine has no room for \(got 8\); allowed: up to 4"
        ):
            engine.refuse_unfit((), {**trained.adapters, "r": 8})
    finally:
        engine.close()


class SmallUpdate:
    """A model and adapters along its gradient with |BA| of 1e-5, the size of the first steps of a run, where the weights are about 0.02."""

    def __init__(self, folder: Path) -> None:
        self.model = make_tiny_model(folder / "model", hidden_size=512, num_layers=2)
        self.rank = 4
        network = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.mul_(0.25 if parameter.ndim == 2 else 1.0).copy_(
                    parameter.bfloat16()
                )  # initialised at 0.02, times 4
        network.save_pretrained(self.model)
        self.prompts = torch.randint(4, network.config.vocab_size, (64, 24), generator=torch.Generator().manual_seed(1))
        found = network(self.prompts).logits[:, -1].log_softmax(-1)
        self.tokens = found.argmax(-1)
        found.gather(1, self.tokens[:, None]).mean().backward()
        self.adapters: dict[str, torch.Tensor] = {}
        before = self._logprobs(network)
        for name, layer in network.model.named_modules():
            if isinstance(layer, torch.nn.Linear):
                u, s, vh = torch.linalg.svd(layer.weight.grad)
                delta = u[:, : self.rank] * s[: self.rank] @ vh[: self.rank]
                scale = 1e-5 / delta.square().mean().sqrt()
                self.adapters[f"{PREFIX}model.{name}.lora_A.weight"] = vh[: self.rank].contiguous()
                self.adapters[f"{PREFIX}model.{name}.lora_B.weight"] = (
                    scale * u[:, : self.rank] * s[: self.rank]
                ).contiguous()
                layer.weight.data += scale * delta
        self.change = self._logprobs(network) - before
        merged, self.whole = network.state_dict(), folder / "merged.safetensors"
        write_weights(merged.items(), self.whole)
        self.alone = folder / "alone.safetensors"
        config = adapters_json(LoraConfig(rank=self.rank, alpha=self.rank))
        write_adapters(self.adapters, config, self.alone)

    def _logprobs(self, network: Any) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = network(self.prompts).logits[:, -1].log_softmax(-1)
        return found.gather(1, self.tokens[:, None])[:, 0]

    def arrived(self, engine: VllmEngine | TransformersEngine, file: Path) -> float:
        """Share of the change of log-probabilities that an engine shows when it has loaded a file: the slope through the origin."""

        async def logprobs() -> list[tuple[int, float]]:
            greedy = Decoding(max_tokens=1, temperature=0.0)
            found = await asyncio.gather(*(engine.generate(prompt, greedy) for prompt in self.prompts.tolist()))
            return [(one.token_ids[0], one.logprobs[0]) for one in found]

        before = asyncio.run(logprobs())
        engine.load_weights(str(file), engine.policy_version_id + 1)
        after = asyncio.run(logprobs())
        triples = zip(before, after, self.change.tolist(), strict=True)
        pairs = [(new - old, change) for (token, old), (other, new), change in triples if token == other]
        assert len(pairs) > len(before) / 2
        return sum(found * change for found, change in pairs) / sum(change * change for _, change in pairs)


@pytest.fixture(scope="module")
def small_update(tmp_path_factory: pytest.TempPathFactory) -> SmallUpdate:
    return SmallUpdate(tmp_path_factory.mktemp("small"))


def engine_by_default(update: SmallUpdate, name: str) -> EngineConfig:
    """Settings of an engine of a run with LoRA that says nothing about `sync.adapters`."""
    sections: dict[str, Any] = {
        "run": {"name": "r"},
        "model": {"path": str(update.model)},
        "tasks": [{"name": "t", "source": "./t.py:t"}],
        "algorithm": {"name": "grpo"},
        "trainer": {"batch_groups": 1, "lora": {"rank": update.rank}},
        "steps": 1,
        "explorer": {
            "engine": name,
            "workflow": "single_turn",
            "reward": "exact_match",
            "engine_args": {"dtype": "bfloat16", "context_length": 64, "max_num_seqs": 64, "kv_cache_gib": 0.0625},
        },
    }
    return ResolvedRun(parse_config(sections, update.model, "a test")).engine(0)


@pytest.mark.parametrize("name", ["transformers", "vllm"])
def test_a_small_update_reaches_a_bfloat16_engine(small_update: SmallUpdate, name: str) -> None:
    settings = engine_by_default(small_update, name)
    kind = VllmEngine if name == "vllm" else TransformersEngine
    os.environ.update(kind.process_environment(settings))
    engine = kind(small_update.model, settings)
    try:
        assert small_update.arrived(engine, small_update.alone) > 0.85
    finally:
        engine.close()


def test_merged_weights_lose_most_of_a_small_update_in_bfloat16(small_update: SmallUpdate) -> None:
    engine = TransformersEngine(small_update.model, EngineConfig(dtype="bfloat16", max_num_seqs=64))
    try:
        assert small_update.arrived(engine, small_update.whole) < 0.6, "the check above must be able to fail"
    finally:
        engine.close()


def test_vllm_computes_adapters_of_the_families_for_which_that_is_the_default() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm.model_executor.models import ModelRegistry

    from rftcore.engines.adapters import VLLM_FAMILIES

    names = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family] for family in VLLM_FAMILIES]
    assert all(ModelRegistry._try_load_model_cls(name).supports_lora for name in names)


def test_the_engine_transformers_computes_adapters_beside_its_weights(trained: Trained) -> None:
    trained.train(5)
    found = trained.publish("merging", trained.alone.of_learner())
    engine = TransformersEngine(trained.model, ENGINE.model_copy(update={"adapter_rank": 4}))
    try:
        engine.load_weights(found.uri, 1, found.checksum)
        assert worst_difference(engine, trained.checkpoint("merged-5")) < 1e-4
        assert worst_difference(engine, trained.model) > 0.05
        trained.train(6)
        trained.send(engine, 2)
        assert worst_difference(engine, trained.checkpoint("merged-6")) < 1e-4
        differing = engine.differing_weights(found.uri, found.checksum)
        assert differing and all(".lora_" in name for name in differing)
        [(metric, lost)] = Exports(trained.learner, None, "bfloat16", merges=True).metrics().items()
        assert metric == "merged_update_error" and 0 < lost < 0.5, "this update is large"
        assert Exports(trained.learner, None, "float32", merges=True).metrics() == {}
        newest = trained.publish("sent", trained.alone.of_learner())
        assert engine.differing_weights(newest.uri, newest.checksum) == []
        first = trained.publish("first", trained.alone.of_folder(trained.model))
        engine.load_weights(first.uri, 3, first.checksum)
        assert worst_difference(engine, trained.model) < 1e-4
    finally:
        engine.close()


def test_adapters_of_another_model_are_refused(trained: Trained, tmp_path: Path) -> None:
    found = trained.publish("other", trained.alone.of_learner())
    settings = ENGINE.model_copy(update={"adapter_rank": 4})
    other = TransformersEngine(make_tiny_model(tmp_path / "other", hidden_size=64), settings)
    try:
        with pytest.raises(ModelError, match="does not fit the model in the engine"):
            other.load_weights(found.uri, 1, found.checksum)
    finally:
        other.close()


def test_a_run_sends_adapters_alone_to_an_engine_that_sleeps_meanwhile(server_folders: Path, warm: Warm) -> None:
    buffer = server_folders / "adapters" / "buffer"
    options = settings(
        warm,
        "explorer.engine=vllm",
        "explorer.engine_args={dtype: float32, context_length: 64, kv_cache_gib: 0.0625}",
        "trainer.lora={rank: 4}",
        "trainer.learning_rate=0.01",
        "sync={adapters: alone, method: nccl}",
        "explorer.sleep=true",
    )
    process = start("run", "--plain", "--buffer", buffer, *options)
    try:
        output = printed_by(process)
        assert process.returncode == 0, output
        sizes = [row["num_bytes"] for row in rows(buffer, "select num_bytes from rft.policy_version order by 1 desc")]
        assert sizes[0] < (warm.model / "model.safetensors").stat().st_size / 5
        steps = rows(buffer, "select metrics->>'logprob_diff' as difference from rft.train_step order by trainer_step")
        found = [float(row["difference"]) for row in steps if row["difference"] is not None]
        assert found and max(found) < 1e-3, output
        receipts = rows(
            buffer,
            "select r.status::text as status, t.dtype from rft.weight_receipt r join rft.weight_transfer t using (transfer_id)",
        )
        assert receipts and {(row["status"], row["dtype"]) for row in receipts} == {("applied", "float32")}, output
        choice = rows(buffer, "select progress->>'weights' as weights from rft.worker where role = 'trainer'")[0][
            "weights"
        ]
        assert choice.startswith("adapters alone, into 1 live engines by gloo"), output
    finally:
        EmbeddedServer(buffer).stop()
