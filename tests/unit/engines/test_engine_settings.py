"""Settings of engines: what is passed to them, and what is refused by name before anything starts."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from pathlib import Path

import pytest

from rftcore.checks.devices import check_gpus
from rftcore.checks.models import describe_adapters, refuse_adapters_beside_experts, refuse_indivisible_engine
from rftcore.engines.base import EngineConfig
from rftcore.engines.vllm_arguments import graph_sizes, slot_rank, vllm_arguments
from rftcore.resolved import ResolvedRun
from rftdata.errors import ConfigError
from tests.unit.config.test_config import config


def test_settings_of_other_sections_reach_the_engine() -> None:
    engine = ResolvedRun(config(explorer={"tensor_parallel_size": 2}, sync={"kv_cache": "keep"})).engine(0)
    assert (engine.tensor_parallel_size, engine.kv_cache) == (2, "keep")


@pytest.mark.parametrize(
    ("name", "value", "place"),
    [
        ("tensor_parallel_size", 2, "explorer.tensor_parallel_size"),
        ("kv_cache", "keep", "sync.kv_cache"),
        ("adapter_rank", 8, "sync.adapters"),
    ],
)
def test_a_setting_of_another_section_is_refused_among_the_engine_s_arguments(
    name: str, value: object, place: str
) -> None:
    resolved = ResolvedRun(config(explorer={"engine_args": {name: value}}))
    with pytest.raises(ConfigError, match=re.escape(f"set {place}")):
        resolved.engine(0)


@pytest.mark.parametrize("engine", ["transformers", "none"])
def test_only_vllm_divides_a_model(engine: str) -> None:
    with pytest.raises(ConfigError, match="does not divide a model over 2 GPUs"):
        config(explorer={"tensor_parallel_size": 2, "engine": engine})


@pytest.mark.parametrize(("heads", "kv_heads", "fitting"), [(9, 3, {1, 3, 9}), (8, 2, {1, 2, 4, 8}), (4, 4, {1, 2, 4})])
def test_a_size_that_does_not_divide_the_heads_is_refused_with_those_that_do(
    heads: int, kv_heads: int, fitting: set[int], tmp_path: Path
) -> None:
    values = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    (tmp_path / "config.json").write_text(json.dumps(values))
    for size in range(1, heads + 2):
        if size in fitting:
            refuse_indivisible_engine(tmp_path, size)
            continue
        with pytest.raises(ConfigError, match="does not divide") as caught:
            refuse_indivisible_engine(tmp_path, size)
        assert caught.value.allowed == ", ".join(map(str, sorted(fitting)))


def engine_args(**values: object) -> EngineConfig:
    return ResolvedRun(config(explorer={"engine_args": values})).engine(0)


def test_arguments_of_vllm_and_quantisation_are_passed_on() -> None:
    found = engine_args(quantization="fp8", vllm={"block_size": 32})
    assert (found.quantization, found.vllm) == ("fp8", {"block_size": 32})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("blok_size", "vLLM has no argument 'blok_size' .*; did you mean 'block_size'"),
        ("max_model_len", "set explorer.engine_args.context_length"),
        ("data_parallel_size", "set explorer.num_explorers"),
        ("enable_lora", "set sync.adapters"),
        ("logprobs_mode", "cannot be changed .*processed_logprobs"),
    ],
)
def test_arguments_that_vllm_lacks_or_the_run_sets_are_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_args(vllm={name: 1})


def test_a_misspelt_setting_of_the_engine_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'quantization'"):
        engine_args(quantisation="fp8")


@pytest.mark.parametrize("values", [{"quantization": "fp8"}, {"vllm": {"block_size": 32}}])
def test_settings_of_vllm_are_refused_for_transformers(values: dict[str, object]) -> None:
    resolved = ResolvedRun(config(explorer={"engine": "transformers", "engine_args": values}))
    with pytest.raises(ConfigError, match="has no effect in the engine 'transformers'"):
        resolved.engine(0)


def test_the_names_of_arguments_are_those_of_the_installed_vllm() -> None:
    found = vllm_arguments()
    assert {"model", "block_size", "quantization", "tensor_parallel_size"} <= found
    assert len(found) > 100


def with_adapters(**changes: dict[str, object]) -> ResolvedRun:
    sections = {"trainer": {"lora": {"rank": 12}}, "sync": {"adapters": "alone"}}
    return ResolvedRun(
        config(**{name: {**sections.get(name, {}), **changes.get(name, {})} for name in {*sections, *changes}})
    )


def test_engines_have_room_for_adapters_where_they_get_them_alone() -> None:
    assert with_adapters().engine(0).adapter_rank == 12
    assert with_adapters(sync={"adapters": "merged"}).engine(0).adapter_rank is None


@pytest.mark.parametrize(
    ("engine", "model_type", "rank", "reason"),
    [
        ("vllm", "llama", 12, None),
        ("vllm", "gpt2", 12, "every layer of a gpt2"),
        ("vllm", None, 12, "not on this machine"),
        ("vllm", "llama", 600, "up to rank 512"),
        ("transformers", "gpt2", 600, None),
        ("./mine.py:Engine", "llama", 12, "not known to compute adapters"),
    ],
)
def test_engines_get_adapters_alone_by_default_if_they_compute_them(
    tmp_path: Path, engine: str, model_type: str | None, rank: int, reason: str | None
) -> None:
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "dtype": "bfloat16"}))
    changes: dict[str, dict[str, object]] = {
        "trainer": {"lora": {"rank": rank}},
        "sync": {"adapters": "auto"},
        "explorer": {"engine": engine},
        "model": {"path": str(tmp_path)},
    }
    resolved = with_adapters(**changes)
    sentences = " ".join(describe_adapters(resolved))
    assert resolved.engine(0).adapter_rank == (rank if reason is None else None)
    if reason is None:
        assert "alone" in sentences
    else:
        assert reason in sentences and "which loses most of a small update" in sentences
    exact = with_adapters(**changes | {"explorer": {"engine": engine, "engine_args": {"dtype": "float32"}}})
    assert "loses" not in " ".join(describe_adapters(exact)), "float32 keeps the update"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer": {"lora": None}}, "no adapters are trained; set trainer.lora"),
        ({"trainer": {"lora": {"rank": 600}}}, r"\(got 600\); allowed: up to 512"),
    ],
)
def test_adapters_that_cannot_be_sent_alone_are_refused(changes: dict[str, dict[str, object]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_adapters(**changes).engine(0)


def test_adapters_get_the_next_rank_for_which_vllm_has_kernels() -> None:
    assert [slot_rank(rank) for rank in (None, 1, 2, 8, 12, 512)] == [None, 1, 8, 8, 16, 512]


def test_vllm_keeps_no_adapters_beside_experts(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "qwen3"}))
    refuse_adapters_beside_experts(tmp_path)
    file.write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": 4}))
    with pytest.raises(ConfigError, match=r"beside a mixture of experts .*qwen3_moe.*sync\.adapters: merged"):
        refuse_adapters_beside_experts(tmp_path)


def test_a_step_is_scheduled_ahead_only_in_a_process_of_the_engine_s_own() -> None:
    resolved = ResolvedRun(config(explorer={"engine_args": {"own_process": False, "async_scheduling": True}}))
    with pytest.raises(ConfigError, match="async_scheduling needs own_process"):
        resolved.engine(0)


@pytest.mark.parametrize(
    ("max_num_seqs", "largest", "num"),
    [(513, 1024, 67), (1000, 1024, 67), (1024, 1024, 67), (1100, 1100, 69), (9000, 2048, 83)],
)
def test_cuda_graphs_cover_many_sequences_with_little_padding(max_num_seqs: int, largest: int, num: int) -> None:
    sizes = graph_sizes(max_num_seqs, {"compilation_config": {"cudagraph_mode": "PIECEWISE"}})
    assert sizes is not None
    assert (sizes[0], sizes[-1], len(sizes)) == (1, largest, num)
    assert sizes == sorted(set(sizes))
    above_128 = [size for size in sizes if size >= 128]
    assert all(b - a <= a / 16 for a, b in itertools.pairwise(above_128))


@pytest.mark.parametrize(
    "arguments",
    [
        {"compilation_config": {"max_cudagraph_capture_size": 2048}},
        {"compilation_config": {"cudagraph_capture_sizes": [1, 1024]}},
        {"max_cudagraph_capture_size": 512},
        {"cudagraph_capture_sizes": [1]},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ],
)
def test_sizes_of_cuda_graphs_that_a_user_names_stay(arguments: dict[str, object]) -> None:
    assert graph_sizes(1024, arguments) is None
    assert graph_sizes(1024, {"compilation_config": 2}) is not None


def test_up_to_512_sequences_vllm_chooses_the_cuda_graphs() -> None:
    assert graph_sizes(512, {}) is None


def test_an_engine_that_cannot_sleep_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho '0, GPU-a1, 81920'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    sleeping = ResolvedRun(config(explorer={"sleep": True}))
    with pytest.raises(ConfigError, match=r"explorer\.sleep needs the library cumem_allocator"):
        check_gpus(sleeping)
    (package / "cumem_allocator.abi3.so").touch()
    check_gpus(sleeping)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (package / "cumem_allocator.abi3.so").unlink()
    check_gpus(sleeping)
