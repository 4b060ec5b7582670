"""What a vLLM engine of bfloat16 keeps in float32, the router of a mixture of experts, comes in float32, everything else in bfloat16."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from rftcore.engines.base import EngineConfig
from rftcore.engines.vllm_engine import VllmEngine
from rftcore.sync.addresses import LOOPBACK
from rftcore.sync.files.weights_file import iterate_weights
from rftcore.sync.transfer.group import open_store
from rftcore.sync.transfer.plan import TransferPlan
from rftcore.sync.transfer.sender import TransferSender
from rftdata.errors import RftError
from tests.support.models import make_character_tokenizer, make_tiny_model
from tests.support.sending import held, wire
from tests.support.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CONFIG = EngineConfig(dtype="bfloat16", context_length=128, max_num_seqs=4, kv_cache_gib=0.0625)
ROUTER = ["model.layers.1.mlp.gate.weight", "model.layers.1.mlp.gate.e_score_correction_bias"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layer is dense, the second has four experts."""
    folder, tokenizer = tmp_path_factory.mktemp("model"), make_character_tokenizer(())
    config = Glm4MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        max_position_embeddings=256,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Glm4MoeForCausalLM(config).bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[VllmEngine]:
    os.environ.update(VllmEngine.process_environment(CONFIG))
    engine = VllmEngine(model, CONFIG)
    yield engine
    engine.close()


def parameters(worker: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in worker.model_runner.get_model().named_parameters()}


def test_an_engine_finds_out_what_it_keeps_in_float32_and_gets_it_so(
    engine: VllmEngine, model: Path, tmp_path: Path
) -> None:
    # Query, key and value are one parameter of vLLM's, and so are the experts: a name that the loader did not report would be among them.
    assert sorted(engine.reception.in_float32) == sorted(ROUTER)
    checkpoint = dict(iterate_weights(model / "model.safetensors"))
    before = engine._llm.llm_engine.collective_rpc(parameters)[0]
    assert torch.equal(before["model.norm.weight"], checkpoint["model.norm.weight"]), "asking loads nothing"
    state = {name: tensor.float() + torch.rand(tensor.shape) for name, tensor in checkpoint.items()}
    store, sender = open_store(LOOPBACK, PATIENCE_S), TransferSender()
    plan = TransferPlan(
        transfer_id=1,
        group_id=1,
        backend="gloo",
        host=LOOPBACK,
        port=store.port,
        num_ranks=2,
        first_rank=0,
        tensors=wire(list(state.items())),
        dtype="bfloat16",
        bucket_bytes=1 << 17,
        timeout_s=PATIENCE_S,
    )
    with pytest.raises(RftError, match="transfer 1 rounds tensors that the engine keeps in float32"):
        engine.receive_weights(replace(plan, first_rank=1), 1)
    plan = replace(plan, in_float32=tuple(name for name in state if name in ROUTER))
    with ThreadPoolExecutor() as pool:
        taken = pool.submit(engine.receive_weights, replace(plan, first_rank=1), 1)
        sent = sender.send(plan, held(state.items()), store)
        assert taken.result(timeout=PATIENCE_S) == sent.checksum
    sender.leave()
    assert sent.num_bytes == sum(t.numel() * (4 if name in ROUTER else 2) for name, t in state.items())
    found = engine._llm.llm_engine.collective_rpc(parameters)[0]
    bias = found[ROUTER[1]]
    assert torch.equal(bias, state[ROUTER[1]]) and not torch.equal(bias, bias.bfloat16().float())
    for name in ("model.norm.weight", "model.layers.1.input_layernorm.weight"):
        assert torch.equal(found[name], state[name].bfloat16()), name
    # Prepacked matrices cannot be read on a CPU: they are compared with a model that vLLM loads from a file in float32.
    file = tmp_path / "weights.safetensors"
    for router, expected in (state[ROUTER[0]], []), (state[ROUTER[0]].bfloat16().float(), [f"{ROUTER[0]}, prepacked"]):
        save_file({**state, ROUTER[0]: router}, file, metadata={"format": "pt"})
        assert engine.differing_weights(str(file)) == expected


# In a process of its own, which the system would end.
SHORT_PROMPT = """
import asyncio, sys
from rftcore.engines.base import Decoding, EngineConfig
from rftcore.engines.vllm_engine import VllmEngine

engine = VllmEngine(sys.argv[1], EngineConfig(dtype="bfloat16", context_length=64, kv_cache_gib=0.0625))
print(len(asyncio.run(engine.generate([5, 6, 7], Decoding(max_tokens=2))).token_ids))
engine.close()
"""


def test_an_engine_begins_with_a_short_prompt_on_a_processor_with_a_matrix_unit(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model")
    command = [sys.executable, "-c", SHORT_PROMPT, str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0 and int(done.stdout.split()[-1]) >= 1, done.stderr
