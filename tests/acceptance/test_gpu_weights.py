"""On two CUDA devices: weights go from a trainer's process into vLLM by NCCL. `pytest -m gpu`; RFT_TEST_MODEL names a model."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

# The trainer: float32 weights, changed by seeded noise, sent twice in one group.
_TRAINER = """
import pickle, sys, time
import torch
from transformers import AutoModelForCausalLM
from rftcore.sync.devices import choose_backend, device_id
from rftcore.sync.transfer import TransferSender
from rftcore.sync.transfer_group import LOOPBACK, open_store
from rftcore.sync.transfer_plan import TransferPlan
from rftcore.sync.weights_file import OUTPUT_HEAD
from tests.acceptance.test_gpu_weights import add_noise
from tests.support.sending import held, wire

folder, engine_device = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
add_noise(model)
model.cuda()
state = dict(model.state_dict())
state.setdefault(OUTPUT_HEAD, model.get_output_embeddings().weight)
store, sender = open_store(LOOPBACK, 120), TransferSender()
backend, reason = choose_backend(device_id("cuda:0"), [engine_device])
print(f"{backend}: {reason}", file=sys.stderr)
for number in (1, 2, 3):
    plan = TransferPlan(
        transfer_id=number, group_id=1, backend=backend, host=LOOPBACK, port=store.port, num_ranks=2, first_rank=1,
        tensors=wire(list(state.items())), dtype="bfloat16", bucket_bytes=256 << 20, timeout_s=120,
    )
    sys.stdout.buffer.write(pickle.dumps(plan))
    sys.stdout.buffer.flush()
    print(sender.send(plan, held(state.items()), store), file=sys.stderr)
    sys.stdin.readline()
sender.leave()
"""


def add_noise(model: object) -> None:
    import torch

    assert isinstance(model, torch.nn.Module)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_((noise * parameter.float().std() * 0.05).to(parameter.dtype))


def test_weights_go_by_nccl_into_an_engine_on_another_gpu() -> None:
    import pickle
    import time

    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("fewer than two CUDA devices")
    from transformers import AutoModelForCausalLM

    from rftcore.engines.base import Decoding, EngineConfig, Generation
    from rftcore.engines.vllm_engine import VllmEngine
    from rftcore.models import resolve_model

    folder = resolve_model(os.environ.get("RFT_TEST_MODEL", "HuggingFaceTB/SmolLM2-135M-Instruct"))
    config = EngineConfig(dtype="bfloat16", context_length=256, max_num_seqs=64, gpu_memory_utilization=0.3)
    os.environ.update(VllmEngine.process_environment(config))
    engine = VllmEngine(folder, config)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    add_noise(reference)
    reference = reference.to(torch.bfloat16).cuda()
    ids = engine.tokenizer.encode("The capital of France is")

    def mean_difference() -> float:
        async def sample() -> list[Generation]:
            return await asyncio.gather(*(engine.generate(ids, Decoding(max_tokens=32)) for _ in range(64)))

        differences = []
        for generation in asyncio.run(sample()):
            with torch.no_grad():
                logits = reference(torch.tensor([ids + generation.token_ids]).cuda()).logits[0].float().log_softmax(-1)
            expected = [logits[len(ids) - 1 + k, token].item() for k, token in enumerate(generation.token_ids)]
            differences += [abs(a - b) for a, b in zip(generation.logprobs, expected, strict=True)]
        return sum(differences) / len(differences)

    assert mean_difference() > 0.15, "stale weights must look different"
    checkout = Path(__file__).resolve().parents[2]
    trainer = subprocess.Popen(
        [sys.executable, "-c", _TRAINER, str(folder), engine.reception.device], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "1", "PYTHONPATH": str(checkout)}, cwd=checkout,
    )  # fmt: skip
    assert trainer.stdin is not None and trainer.stdout is not None
    for version in (1, 2, 3):
        plan = pickle.load(trainer.stdout)
        assert plan.backend == "nccl"
        started = time.perf_counter()
        engine.receive_weights(plan, version)
        print(f"version {version}: {1e3 * (time.perf_counter() - started):.0f} ms for {plan.num_bytes / 1e9:.2f} GB")
        trainer.stdin.write(b"\n")
        trainer.stdin.flush()
    after = mean_difference()
    print(f"mean |difference| {after:.3f} nats")
    assert after < 0.1
    assert trainer.wait(timeout=60) == 0
    engine.close()
