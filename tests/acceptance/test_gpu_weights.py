"""Weights go from ranks of a trainer by NCCL into vLLM engines on other GPUs, which then compute with them. `pytest -m gpu`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.harness.layout import layouts
from rftcore.sync.transfer.hashes import hashes_of
from tests.support.command_line import CHECKOUT

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


@pytest.mark.parametrize("layout", ["1+1", "1+2", "2+2", "1x2+2", "1x2+1", "4+4", "2x2+4"])
def test_engines_compute_with_the_weights_of_the_trainer(layout: str, tmp_path: Path) -> None:
    (asked,) = layouts(layout)
    if torch.cuda.device_count() < asked.num_gpus:
        pytest.skip(f"needs {asked.num_gpus} GPUs")
    options = ["--shapes", "0.5B", "--layouts", layout, "--receivers", "engines"]
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks", "weights", *options, "--folder", str(tmp_path)],
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        text=True,
    )
    (row,) = json.loads(ended.stdout)["rows"]
    assert row["backend"] == "nccl"
    assert row["hashes_agree"]
    assert row["probes_differ"], "an engine with other weights must answer otherwise"
    assert row["weights_agree"]
    assert ended.returncode == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_hashes_are_the_same_on_gpu_and_cpu() -> None:
    packed = torch.randint(0, 256, (40_000 * 1024,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    spans = [(0, 1024 * 7), (5 * 1024, 1024 * 39_000), (1024, 1024 * 993)]
    assert hashes_of(packed.cuda(), spans).tolist() == hashes_of(packed, spans).tolist()
