"""Loading a model takes the memory that the estimate says: the files are mapped, and a rank has no more of its own than its share and one layer."""

from __future__ import annotations

import ctypes
import gc
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from rftcore.config.trainer import LoraConfig, TrainerConfig
from rftcore.trainer.estimates.loading_memory import PROCESS_BYTES, loading_memory, refuse_too_little_for_loading
from rftcore.trainer.estimates.memory import GIB, Trained
from rftcore.trainer.model_shape import read_model_shape
from rftcore.trainer.network.network import Network
from rftcore.trainer.network.sharding import make_grid
from rftdata.errors import ConfigError, ModelError
from tests.support.learning import config, save_model
from tests.support.models import make_tiny_moe
from tests.support.ranks import run_ranks

NUM_RANKS = 2
MIB = 2**20
_M_MMAP_THRESHOLD = -3  # malloc.h
CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "lora": {"lora": {"rank": 8, "alpha": 8}, "dtype": "bfloat16"},
    "experts": {},
}


def own_bytes() -> int:
    """Return the memory of this process that is no mapped file."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None
    return 1024 * int(found[1])


class MostMemory:
    """Measures the most memory that this process takes within the block, beyond what it had before, as `grown`."""

    def __init__(self) -> None:
        self.before = self.most = own_bytes()
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> MostMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._has_ended.wait(0.001):
            self.most = max(self.most, own_bytes())


def load_and_measure(rank: int, folder: Path, case: str) -> None:
    """Be one rank: write the most memory that loading took, and what is kept of it."""
    # By default glibc keeps freed blocks of less than 32 MiB, which are larger in models that matter.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MIB)
    store = f"file://{folder}/store-{case}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=NUM_RANKS)
    grid, trained = make_grid(torch.device("cpu")), {"learning_rate": 1e-4, "adapters": True} if case == "lora" else {}
    settings = config(num_gpus=NUM_RANKS, **CASES[case])
    kind = "experts" if case == "experts" else "dense"
    Network(str(folder / f"small-{kind}"), settings, grid, **trained)  # imports what loading needs
    gc.collect()
    with MostMemory() as memory:
        network = Network(str(folder / kind), settings, grid, **trained)
    kept = own_bytes() - memory.before
    del network
    (folder / f"{case}-{rank}.json").write_text(json.dumps([memory.most - memory.before, kept]))


def save_filled(folder: Path, model_config: PreTrainedConfig) -> None:
    """Write a model in bfloat16, without the time that random weights take."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 70 million weights, 140 MB in bfloat16, and a small one; and a mixture of 32 experts of nearly that size, and a small one."""
    folder, heads = tmp_path_factory.mktemp("loading"), {"num_attention_heads": 8, "tie_word_embeddings": False}
    large = {"vocab_size": 8192, "num_hidden_layers": 8} | heads
    small = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1} | heads
    experts = {"num_experts": 32, "num_experts_per_tok": 4, "head_dim": 32}
    save_filled(folder / "dense", LlamaConfig(hidden_size=768, intermediate_size=2048, **large))
    save_filled(folder / "small-dense", LlamaConfig(**small))
    save_filled(folder / "experts", Qwen3MoeConfig(hidden_size=256, moe_intermediate_size=256, **large | experts))
    save_filled(folder / "small-experts", Qwen3MoeConfig(moe_intermediate_size=64, **small | experts))
    return folder


@pytest.mark.parametrize("case", [*CASES])
def test_ranks_take_what_the_estimate_says(case: str, folder: Path) -> None:
    run_ranks(load_and_measure, NUM_RANKS, folder, case)
    measured = [json.loads((folder / f"{case}-{rank}.json").read_text()) for rank in range(NUM_RANKS)]
    shape = read_model_shape(folder / ("experts" if case == "experts" else "dense"))
    settings = TrainerConfig(num_gpus=NUM_RANKS, autocast="none", max_tokens_per_microbatch=4096, **CASES[case])
    found = loading_memory(settings, Trained(policy=shape), on_gpus=False)
    expected = found.size_bytes - found.part("files") - found.part("processes")
    together, kept = (sum(column) for column in zip(*measured, strict=True))
    assert together < 1.15 * expected + NUM_RANKS * 16 * MIB, (together / MIB, kept / MIB, found)
    assert kept > 0.8 * found.part("shares"), "the measurement must see the weights"


WHOLE = {"tied": save_model, "untied": save_model, "experts": make_tiny_moe}


@pytest.mark.parametrize("kind", WHOLE)
def test_a_model_whose_files_are_incomplete_is_not_trained(kind: str, tmp_path: Path) -> None:
    WHOLE[kind](tmp_path, tied=kind == "tied")
    file, grid = tmp_path / "model.safetensors", make_grid(torch.device("cpu"))
    whole = load_file(file)
    for name in whole:
        save_file({other: tensor for other, tensor in whole.items() if other != name}, file, metadata={"format": "pt"})
        with pytest.raises(ModelError, match=rf"lack \d of its weights \(got '.*{re.escape(name)}'\)"):  # 2 if tied
            Network(str(tmp_path), config(), grid)
    save_file(whole, file, metadata={"format": "pt"})
    Network(str(tmp_path), config(), grid, head="value")  # whose own head is new
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot be opened"):
        Network(str(tmp_path), config(), grid)


@pytest.mark.parametrize("kind", WHOLE)
def test_a_model_with_two_values_of_a_weight_is_not_trained(kind: str, tmp_path: Path) -> None:
    WHOLE[kind](tmp_path, tied=kind == "tied")
    whole, grid = load_file(tmp_path / "model.safetensors"), make_grid(torch.device("cpu"))
    (tmp_path / "model.safetensors").unlink()
    first, *names = sorted(whole)
    index = {"metadata": {}, "weight_map": {first: "1.safetensors", **dict.fromkeys(names, "2.safetensors")}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({name: whole[name] for name in names}, tmp_path / "2.safetensors", metadata={"format": "pt"})
    again = whole[names[0]].clone()
    save_file({first: whole[first], names[0]: again}, tmp_path / "1.safetensors", metadata={"format": "pt"})
    Network(str(tmp_path), config(), grid)  # stored twice, and the same
    save_file({first: whole[first], names[0]: again + 1}, tmp_path / "1.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=rf"different values of one weight \(got '{re.escape(names[0])} in 1.safetensors and 2.safe"
    ):
        Network(str(tmp_path), config(), grid)


def test_a_critic_without_its_head_is_refused(tmp_path: Path) -> None:
    grid = make_grid(torch.device("cpu"))
    network = Network(str(save_model(tmp_path / "model", tied=True)), config(), grid, head="value")
    network.model.save_pretrained(tmp_path / "critic")
    Network(str(tmp_path / "critic"), config(), grid, head="value")
    file = tmp_path / "critic" / "model.safetensors"
    save_file(
        {name: tensor for name, tensor in load_file(file).items() if "score" not in name},
        file,
        metadata={"format": "pt"},
    )
    with pytest.raises(ModelError, match=r"lack 2 of its weights .*score\.bias, score\.weight"):
        Network(str(tmp_path / "critic"), config(), grid, head="value")


EXPERT = "model.layers.1.mlp.experts.2.gate_proj.weight"
OTHER_EXPERTS: dict[str, Callable[[dict[str, Tensor]], object]] = {
    f"{EXPERT} has the shape (1, 64), and by config.json it has (48, 64)": lambda found: found.update(
        {EXPERT: torch.ones(1, 64)}
    ),
    f"{EXPERT} has the shape (24, 64), and by config.json": lambda found: found.update({EXPERT: torch.ones(24, 64)}),
    "by config.json there is no model.layers.0.mlp.experts.4.": lambda found: found.update(
        {name.replace("experts.3.", "experts.4."): tensor.clone() for name, tensor in found.items()}
    ),
}


@pytest.mark.parametrize("said", OTHER_EXPERTS)
def test_experts_that_differ_from_the_configuration_are_refused(said: str, tmp_path: Path) -> None:
    file = make_tiny_moe(tmp_path) / "model.safetensors"
    found = load_file(file)
    OTHER_EXPERTS[said](found)
    save_file(found, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=re.escape(said)):
        Network(str(tmp_path), config(), make_grid(torch.device("cpu")))


def test_a_mixture_of_experts_reads_the_same_weights_as_transformers(tmp_path: Path) -> None:
    file = make_tiny_moe(tmp_path) / "model.safetensors"
    whole = load_file(file)
    save_file(
        {name: tensor + 1 for name, tensor in whole.items()}, tmp_path / "part.safetensors", metadata={"format": "pt"}
    )
    index = {"metadata": {}, "weight_map": dict.fromkeys(whole, "part.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for remove, added in ((False, 0), (True, 1)):
        if remove:
            file.unlink()
        network = Network(str(tmp_path), config(), make_grid(torch.device("cpu")))
        weight = network.model.get_parameter("model.layers.1.mlp.experts.down_proj")[2]
        assert torch.equal(weight, whole["model.layers.1.mlp.experts.2.down_proj.weight"] + added)
        assert torch.equal(
            weight,
            AutoModelForCausalLM.from_pretrained(tmp_path).get_parameter("model.layers.1.mlp.experts.down_proj")[2],
        )


def test_a_host_with_too_little_memory_for_loading_is_refused(folder: Path) -> None:
    models = Trained(policy=read_model_shape(folder / "dense"))
    found = loading_memory(TrainerConfig(num_gpus=8), models)
    assert found.part("largest matrix") == 8 * 4 * 8192 * 768 and found.part("files") == 2 * models.policy.parameters
    frozen = loading_memory(TrainerConfig(num_gpus=8, lora=LoraConfig()), models)
    assert frozen.part("largest matrix") == 0, "frozen weights keep their type"
    refuse_too_little_for_loading(TrainerConfig(num_gpus=8), models, 8 * PROCESS_BYTES + GIB)
    with pytest.raises(ConfigError, match=r"loading the models needs about 16\.\d GiB"):
        refuse_too_little_for_loading(TrainerConfig(num_gpus=8), models, 8 * PROCESS_BYTES)
