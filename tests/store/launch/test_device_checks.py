"""`rft check` estimates the memory of GPUs, and refuses models that cannot be divided or read by their tokenizer."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml

from rftcore.checks.devices import available_bytes
from rftcore.cli import run_command
from rftcore.config.run import load_config
from rftcore.resolved import ResolvedRun
from rftdata.errors import ConfigError
from tests.support.models import make_tiny_model

GIB = 2**30


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), context_length=64)


@pytest.fixture(autouse=True)
def no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without a GPU, whatever this one has; the folder of its programs."""
    programs = tmp_path / "programs"
    programs.mkdir()
    others = [folder for folder in os.environ["PATH"].split(os.pathsep) if not Path(folder, "nvidia-smi").exists()]
    monkeypatch.setenv("PATH", os.pathsep.join([str(programs), *others]))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name in ("CUDA_VISIBLE_DEVICES", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    return programs


@pytest.fixture
def file(tmp_path: Path, tiny: Path) -> str:
    rows = [{"question": f"{i} + {i} =", "answer": str(2 * i)} for i in range(4)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw = {
        "run": {"name": "r"},
        "model": {"path": str(tiny)},
        "algorithm": {"name": "grpo"},
        "steps": 1,
        "explorer": {"reward": ["exact_match"], "max_tokens": 8},
        "trainer": {"batch_groups": 2},
        "buffer": {"uri": str(tmp_path / "buffer")},
        "tasks": [{"name": "sums", "source": "sums.jsonl"}],
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(raw))
    return str(tmp_path / "run.yaml")


def check(file: str, *changes: str, deep: bool = False) -> int:
    options = [part for change in changes for part in ("--set", change)]
    return run_command(["check", *(["--deep"] if deep else []), file, *options])


def test_what_fits_and_still_surprises_is_noted(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(file, "algorithm.loss={level: product, clip: 0.001}", "trainer.lora={dropout: 0.1}") == 0
    said = capsys.readouterr().err
    assert "aggregation: token-mean averages over tokens once more" in said and "trainer.lora.dropout 0.1" in said


@pytest.mark.parametrize("deep", [False, True])
def test_the_estimate_names_its_parts(file: str, capsys: pytest.CaptureFixture[str], deep: bool) -> None:
    size = "explorer.engine_args={context_length: 64, max_num_seqs: 8}"
    assert check(file, "trainer.num_gpus=2", "algorithm.kl={type: k3, coef: 0.1}", size, deep=deep) == 0
    said = capsys.readouterr().err
    assert "memory of the trainer on each of 2 GPUs" in said and "8 sequences of 64 tokens" in said
    assert all(f"rft:   {part} " in said for part in ("weights", "optimizer", "activations", "reference", "together"))


def test_the_plan_names_the_gpus_of_each_role_and_their_memory(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    size = "explorer.engine_args={context_length: 64, max_num_seqs: 8}"
    assert check(file, "trainer.num_gpus=2", "explorer.num_explorers=2", size) == 0
    said = [line.removeprefix("rft: ") for line in capsys.readouterr().err.splitlines()]
    place = next(index for index, line in enumerate(said) if line.startswith("plan for"))
    plan = said[place : place + 5]
    assert plan[0] == "plan for a machine with as many GPUs as asked for, 4 GPUs:"
    assert [line.split()[:4] for line in plan[1:4]] == [
        ["explorer", "0", "1", "GPU"],
        ["explorer", "1", "1", "GPU"],
        ["trainer", "2", "GPUs,", plan[3].split()[3]],
    ]
    assert "gpu_memory_utilization 0.85" in plan[1] and "GiB of each (estimated)" in plan[3]
    assert plan[4].split() == [
        "pipeline",
        "CPU",
        "of",
        "a",
        "machine",
        "with",
        "as",
        "many",
        "GPUs",
        "as",
        "asked",
        "for",
    ]


def test_the_plan_shows_what_roles_that_share_a_gpu_take_together(
    file: str, capsys: pytest.CaptureFixture[str], no_gpu: Path
) -> None:
    program = no_gpu / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, GPU-a1, 81920'\n")
    program.chmod(0o755)
    assert check(file, "explorer.engine_args={context_length: 64, gpu_memory_utilization: 0.5}") == 0
    said = capsys.readouterr().err
    assert "plan for this machine, 1 GPU of 80.0 GiB:" in said
    shared = [line for line in said.splitlines() if "share a GPU" in line]
    assert [line.split()[1] for line in shared] == ["explorer", "trainer"]
    assert "40.0 GiB (gpu_memory_utilization 0.5: weights 0.0 GiB, and the cache of" in shared[0]
    assert f"together     {40 + float(shared[1].split()[5]):.1f} GiB of 80.0 GiB" in said
    for deep in (False, True):  # the configuration may be for another machine
        assert check(file, "trainer.num_gpus=2", "explorer.engine_args={context_length: 64}", deep=deep) == (
            2 if deep else 0
        )
        said = capsys.readouterr().err
        assert "trainer.num_gpus is more than there are GPUs (got 2); allowed: 1 to 1 of what this machine has" in said
        assert ("plan for a machine with as many GPUs as asked for, 3 GPUs:" in said) == (not deep)


def test_models_beside_the_policy_are_counted(file: str, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(file, "trainer.num_gpus=1", "algorithm={name: ppo, kl: {type: none, coef: 0}}") == 0
    said = capsys.readouterr().err
    assert "  critic " in said and "  reference " not in said
    assert check(file, "trainer.num_gpus=1", f"algorithm={{name: jsd, teacher: '{tiny}'}}") == 0
    assert "  teacher " in capsys.readouterr().err


def test_nothing_is_estimated_for_a_run_on_a_cpu(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(file) == 0
    assert "memory" not in capsys.readouterr().err


def test_a_model_that_is_not_here_is_not_fetched(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(file, "trainer.num_gpus=1", "model.path=nowhere/no-such-model") == 0
    assert "not estimated: nowhere/no-such-model is not on this machine" in capsys.readouterr().err


@pytest.mark.parametrize("deep", [False, True])
def test_tensor_parallelism_must_divide_the_heads(file: str, capsys: pytest.CaptureFixture[str], deep: bool) -> None:
    assert check(file, "trainer.num_gpus=4", "trainer.tensor_parallel=2", deep=deep) == 0
    assert check(file, "trainer.num_gpus=4", "trainer.tensor_parallel=4", deep=deep) == 2
    said = capsys.readouterr().err
    assert "does not divide 2 (key heads) (got 4)" in said and "allowed: 1, 2" in said


def test_tensor_parallelism_of_another_family_is_refused(
    file: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import PhiConfig, PhiForCausalLM

    model = shutil.copytree(tiny, tmp_path / "model")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    PhiForCausalLM(PhiConfig(vocab_size=64, max_position_embeddings=64, **sizes)).save_pretrained(model)
    settings = [f"model.path={model}", "trainer.num_gpus=2", "explorer.engine_args={context_length: 64}"]
    assert check(file, *settings, deep=True) == 0
    assert check(file, *settings, "trainer.tensor_parallel=2", deep=True) == 2
    assert "trainer.tensor_parallel cannot split this model (got 'phi')" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_adapters_outside_the_layers_are_refused(file: str, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert check(file, f"trainer.lora={{target_modules: [q_proj, {name}]}}") == 2
    assert f"{name}: embeddings and the output layer can have no adapter" in capsys.readouterr().err


def test_adapters_of_layers_that_the_model_lacks_are_refused(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(file, "trainer.num_gpus=1", "trainer.lora={target_modules: [query_key_value]}") == 2
    assert "names no linear layer" in capsys.readouterr().err


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(
    file: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    model = shutil.copytree(tiny, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(model)
    assert check(file, f"model.path={model}", deep=True) == 2
    assert "'<new>' is number 51, and the model's embedding has 51 rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "gpus", "available"),
    [
        (["trainer.num_gpus=4", "explorer.num_explorers=4"], 8, 80 * GIB),
        (
            ["trainer.num_gpus=4", "explorer.num_explorers=4", "explorer.engine_args={gpu_memory_utilization: 0.25}"],
            5,
            80 * GIB,
        ),
        (["explorer.num_explorers=4"], 4, 0.15 * 80 * GIB),  # the engine takes 85 % by default
        (["explorer.engine_args={gpu_memory_utilization: 0.4}"], 1, 0.6 * 80 * GIB),
        (["explorer.engine=transformers"], 1, 80 * GIB),  # it takes no share in advance
    ],
)
def test_what_the_trainer_may_use_of_a_gpu(file: str, settings: list[str], gpus: int, available: float) -> None:
    resolved = ResolvedRun(load_config(Path(file), settings))
    assert available_bytes(resolved, [80 * GIB] * gpus) == pytest.approx(available)


@pytest.mark.parametrize(
    ("gpus", "words"),
    [(4, r"is more than there are GPUs \(got 4\); allowed: 1 to 2"), (3, "leaves no GPU to the explorers")],
)
def test_gpus_that_are_not_there_are_refused(file: str, gpus: int, words: str) -> None:
    resolved = ResolvedRun(load_config(Path(file), [f"trainer.num_gpus={gpus}"]))
    with pytest.raises(ConfigError, match=words):
        available_bytes(resolved, [80 * GIB] * 3)
