"""The profile of a step names the part of the trainer that each kernel belongs to; on a CPU operators take the place of kernels."""

from __future__ import annotations

import time

import pytest
import torch

from benchmarks.trainer.case import Case
from benchmarks.trainer.kernels import StepProfile, class_of, table
from benchmarks.trainer.speed import row_of
from rftcore.trainer.network.head import Output, logprobs_and_entropy


def test_a_profile_tells_the_output_layer_from_other_products() -> None:
    torch.manual_seed(0)
    hidden, layer = torch.randn(40, 16), torch.randn(16, 16, requires_grad=True)
    output = Output(torch.randn(300, 16, requires_grad=True), chunk=8, kept_bytes=0)
    profile, started = StepProfile(), time.perf_counter()
    profile.start()
    logprobs, _ = logprobs_and_entropy(hidden @ layer, output, torch.arange(40))
    logprobs.sum().backward()
    found = profile.stop(time.perf_counter() - started)
    assert {"head", "matmul"} <= set(found["class_ms"]) and "idle" not in found["class_ms"]
    assert sum(found["class_ms"].values()) <= 1e3 * found["seconds"]
    calls = {each["shapes"]: each["calls"] for each in found["products"]}
    assert calls["[40, 16] × [16, 16]"] == 1
    assert calls["[8, 16] × [16, 300]"] == 10, "five chunks, computed again in the backward pass"
    assert "head" in table(found)


def test_classes_follow_the_names_of_kernels() -> None:
    names = {
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_kernel<...>": "attention",
        "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT": "matmul",
        "triton_poi_fused_mul_silu_3": "compiled",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>": "optimizer",
        "Memcpy DtoD (Device -> Device)": "copies",
    }
    assert {name: class_of(name) for name in names} == names


@pytest.mark.parametrize("profiles", [False, True])
def test_a_profiled_step_is_not_timed(profiles: bool) -> None:
    case = Case("tiny", "A", "ours", "float32", False, 512, steps=2, warm_up=1, profiles=profiles)
    assert len(case.batches()) == 3 + profiles
    line = {"num_tokens": 100, "computed_tokens": 80, "loss": 0.5, "grad_norm": 1.0, "seconds": 2.0, "peak_gib": 1.0}
    lines = [dict(line) for _ in range(3)] + profiles * [line | {"seconds": 9.0, "profile": {"seconds": 9.0}}]
    row = row_of(case, lines, None)
    assert (row["seconds"], len(row["step_records"])) == (2.0, 3)
    assert row["profile"] == ({"seconds": 9.0} if profiles else None)
