"""vLLM opens the adapters of a checkpoint beside the model that a run began with, and computes what the merged model does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rftcore.algorithms import build_algorithm
from rftcore.engines.base import EngineConfig
from rftcore.engines.vllm_engine import VllmEngine
from rftcore.trainer.learner import Learner
from tests.support.learning import config, make_batch
from tests.support.models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOKENS = list(range(5, 35))


def test_vllm_opens_the_adapters_of_a_checkpoint(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    settings = config(lora={"rank": 4, "alpha": 16}, learning_rate=0.05)
    learner = Learner(str(model), settings, build_algorithm("sft"), 0)
    for step in (1, 2, 3):
        learner.update(make_batch(step), step)
    learner.save_checkpoint(tmp_path / "checkpoint")

    os.environ.update(VllmEngine.process_environment(EngineConfig()))
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    engine = LLM(
        model=str(model), dtype="float32", max_model_len=128, max_num_seqs=4, enforce_eager=True, enable_lora=True, max_lora_rank=8,
        kv_cache_memory_bytes=2**26, use_tqdm_on_load=False,
    )  # fmt: skip

    def logprobs(adapters: LoRARequest | None) -> torch.Tensor:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        [output] = engine.generate([{"prompt_token_ids": TOKENS}], params, lora_request=adapters, use_tqdm=False)
        return torch.tensor(
            [found[token].logprob for found, token in zip(output.prompt_logprobs[1:], TOKENS[1:], strict=True)]
        )

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    with torch.no_grad():
        expected = (
            merged(torch.tensor([TOKENS]))
            .logits[0, :-1]
            .log_softmax(-1)
            .gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
        )
    found = logprobs(LoRARequest("trained", 1, str(tmp_path / "checkpoint" / "adapters")))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
    assert (logprobs(None) - expected).abs().max() > 0.5, (
        "the check must be able to fail: the adapters make a difference"
    )
    engine.llm_engine.engine_core.shutdown()
