"""On a CUDA device: the engine samples in bfloat16, and follows weight updates. `pytest -m gpu`; RFT_TEST_MODEL names a model."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def test_the_engine_on_a_gpu_follows_weight_updates(tmp_path: Path) -> None:
    from rftcore.engines.base import Decoding, EngineConfig, Generation
    from rftcore.engines.vllm_engine import VllmEngine

    config = EngineConfig(dtype="bfloat16", context_length=256, max_num_seqs=64, gpu_memory_utilization=0.3)
    os.environ.update(VllmEngine.process_environment(config))
    import torch
    from transformers import AutoModelForCausalLM

    from rftcore.model_folder import resolve_model
    from rftcore.sync.files.weights_file import write_atomically
    from tests.support.weights import write_weights

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    folder = resolve_model(os.environ.get("RFT_TEST_MODEL", "HuggingFaceTB/SmolLM2-135M-Instruct"))
    engine = VllmEngine(folder, config)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda()
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

    assert mean_difference() < 0.1  # the noise of bfloat16
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn_like(parameter) * parameter.float().std() * 0.05)
    assert mean_difference() > 0.15, "stale weights must look different"
    publication = write_atomically(
        tmp_path / "weights.safetensors", lambda draft: write_weights(reference.named_parameters(), draft)
    )
    seconds = engine.load_weights(publication.uri, 1, publication.checksum)
    after = mean_difference()
    print(f"weights loaded in {seconds:.2f} s; mean |difference| {after:.3f} nats")
    assert after < 0.1
    engine.close()
