"""The placement of roles on GPUs, for configurations and machines of all kinds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rftcore.config.run import RunConfig
from rftcore.run.gpus import local_gpus
from rftcore.run.placement import Machine, Placement, place
from rftdata.errors import ConfigError

GIB = 2**30


def config(
    *, explorers: int = 1, parts: int = 1, ranks: int | None = None, workers: int = 1, sync: str = "checkpoint"
) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "r"},
            "model": {"path": "m"},
            "algorithm": {"name": "grpo"},
            "steps": 1,
            "tasks": [{"name": "t", "source": "t.jsonl"}],
            "explorer": {"num_explorers": explorers, "tensor_parallel_size": parts},
            "trainer": {"num_gpus": ranks},
            "pipelines": {"workers": workers},
            "sync": {"method": sync},
        }
    )


def machines(*gpus: int) -> list[Machine]:
    return [Machine(chr(ord("a") + index), num) for index, num in enumerate(gpus)]


def bundles(found: Placement) -> list[tuple[str, int, str]]:
    """Return (machine, GPUs, roles) of each bundle."""
    return [(found.machines[b.machine].name, b.num_gpus, " ".join(b.roles)) for b in found.bundles]


@pytest.mark.parametrize(
    ("settings", "gpus", "expected"),
    [
        # 1 + 1, 3 + 1 and 2 × 2 + 4 GPUs, each role with its own.
        ({}, [2], ["a 1 explorer", "a 1 trainer"]),
        ({"explorers": 3}, [4], ["a 1 explorer 0", "a 1 explorer 1", "a 1 explorer 2", "a 1 trainer"]),
        ({"explorers": 2, "parts": 2, "ranks": 4}, [8], ["a 2 explorer 0", "a 2 explorer 1", "a 4 trainer"]),
        # The largest bundle first, each on the first machine with room.
        ({"explorers": 2, "parts": 2, "ranks": 4}, [4, 4], ["b 2 explorer 0", "b 2 explorer 1", "a 4 trainer"]),
        (
            {"explorers": 3, "ranks": 4},
            [2, 4, 1],
            ["a 1 explorer 0", "a 1 explorer 1", "c 1 explorer 2", "b 4 trainer"],
        ),
        # Weights in memory: one machine, that with the most.
        ({"ranks": 2, "sync": "memory"}, [2, 4], ["b 1 explorer", "b 2 trainer"]),
        # Shared.
        ({}, [1], ["a 1 explorer trainer"]),
        ({"explorers": 4}, [3], ["a 1 explorer 0 explorer 3", "a 1 explorer 1 trainer", "a 1 explorer 2"]),
        ({"explorers": 4, "ranks": 2}, [4], ["a 1 explorer 0 explorer 2", "a 1 explorer 1 explorer 3", "a 2 trainer"]),
        # A CPU.
        ({"explorers": 2, "ranks": 2}, [0], []),
    ],
)
def test_roles_have_their_own_gpus_or_share_them(
    settings: dict[str, int], gpus: list[int], expected: list[str]
) -> None:
    found = place(config(**settings), machines(*gpus), engine_share=0.4)
    assert [f"{machine} {num} {roles}" for machine, num, roles in bundles(found)] == expected
    used = [sum(b.num_gpus for b in found.bundles if b.machine == index) for index in range(len(gpus))]
    assert all(num <= there for num, there in zip(used, gpus, strict=True))
    shares = {
        role: found.bundles[number].gpus_of_role
        for role in ("explorer 0", "trainer")
        if (number := found.bundle_of(role)) is not None
    }
    assert all(share >= 1 or share == pytest.approx(1 / round(1 / share)) for share in shares.values())


@pytest.mark.parametrize(
    ("settings", "gpus", "words"),
    [
        ({"ranks": 4}, [4], "leaves no GPU to the explorers (got 4); allowed: 1 to 3 of what a has"),
        (
            {"ranks": 8},
            [2, 4],
            "trainer.num_gpus is more than there are GPUs (got 8); allowed: 1 to 5 of what the machines have (a 2, b 4)",
        ),
        (
            {"explorers": 2, "parts": 2},
            [4],
            "the explorers need 2 × 2 GPUs (explorer.num_explorers × explorer.tensor_parallel_size) and the trainer 1",
        ),
        (
            {"ranks": 3},
            [2, 2],
            "no machine has room for the trainer, whose GPUs must be on one machine (got 3); allowed: the machines have a 2, b 2",
        ),
        (
            {"ranks": 3, "sync": "memory"},
            [2, 2],
            "weights in memory reach the engines of one machine only (sync.method or",
        ),
        ({"explorers": 2}, [1], "gpu_memory_utilization of its memory (got 0.85); allowed: up to 0.50, less"),
    ],
)
def test_too_few_gpus_are_refused(settings: dict[str, int], gpus: list[int], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        place(config(**settings), machines(*gpus), engine_share=0.85)
    assert words in str(refused.value) and refused.value.todo


def test_pipeline_workers_take_turns_on_the_machines_and_roles_without_gpus_stay_where_weights_are() -> None:
    found = place(config(explorers=2, workers=3), machines(4, 0))
    assert found.without_gpu == {"pipeline 0": 0, "pipeline 1": 1, "pipeline 2": 0}
    assert place(config(), machines(0, 0)).without_gpu == {"explorer": None, "trainer": None, "pipeline": 0}
    assert place(config(sync="memory"), machines(0, 0)).without_gpu == {"explorer": 0, "trainer": 0, "pipeline": 0}


@pytest.mark.parametrize(
    ("visible", "sizes"),
    [(None, [80, 40, 80]), ("1", [40]), ("2,1", [80, 40]), ("GPU-b", [40]), ("", [])],
)
def test_gpus_of_this_machine_are_those_that_the_driver_lists_and_the_environment_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, sizes: list[int]
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '0, GPU-a1, 81920\\n1, GPU-b2, 40960\\n2, GPU-c3, 81920\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert local_gpus() == [size * GIB for size in sizes]
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed' && exit 9\n")
    assert local_gpus() == []


def test_the_driver_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, asked = tmp_path / "nvidia-smi", tmp_path / "asked"
    program.write_text(f"#!/bin/sh\necho asked >> {asked}\necho '0, GPU-a1, 81920'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert local_gpus() == local_gpus() == [80 * GIB]
    assert asked.read_text().split() == ["asked"]
