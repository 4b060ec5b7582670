"""What a vLLM engine of bfloat16 keeps in float32 comes in float32, everything else in bfloat16."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rftcore.engines.base import EngineConfig
from rftcore.engines.vllm_engine import VllmEngine
from rftcore.sync.transfer import TransferSender
from rftcore.sync.transfer_group import LOOPBACK, open_store
from rftcore.sync.transfer_plan import TransferPlan
from rftcore.sync.weights_file import complete_state
from rftdata.errors import RftError
from tests.support.models import make_tiny_model
from tests.support.sending import held, wire

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CONFIG = EngineConfig(dtype="bfloat16", context_length=128, max_num_seqs=4, kv_cache_gib=0.0625)
NORM = "model.layers.1.input_layernorm.weight"
FUSED = [f"model.layers.2.self_attn.{part}_proj.weight" for part in "qkv"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "model", tied=True)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[VllmEngine]:
    os.environ.update(VllmEngine.process_environment(CONFIG))
    engine = VllmEngine(model, CONFIG)
    yield engine
    engine.close()


def widen(worker: Any) -> None:
    """Let a worker keep a norm in float32, and load the fused matrix of queries, keys and values so, as models of other families do."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    layers = worker.model_runner.get_model().model.layers
    layers[1].input_layernorm.weight.data = layers[1].input_layernorm.weight.data.float()
    for layer in (layers[1].input_layernorm, layers[2].self_attn.qkv_proj):
        as_loaded = get_layerwise_info(layer).restore_metadata[0]["weight"]
        as_loaded.data = as_loaded.data.float()


def parameters(worker: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in worker.model_runner.get_model().named_parameters()}


def test_the_loader_tells_which_tensors_are_kept_in_float32(engine: VllmEngine, model: Path) -> None:
    call = engine._llm.llm_engine.collective_rpc
    assert engine.reception.in_float32 == ()
    before = call(parameters)[0]
    call(widen)
    # The engine's thread is idle; a new engine of such a model would ask at its start.
    engine._reception = engine._look_up_reception()
    assert sorted(engine.reception.in_float32) == sorted([NORM, *FUSED])
    after = call(parameters)[0]
    assert all(torch.equal(tensor, after[name].to(tensor.dtype)) for name, tensor in before.items()), (
        "nothing is loaded"
    )

    state = complete_state(AutoModelForCausalLM.from_pretrained(model).named_parameters())
    state = {name: tensor + torch.rand_like(tensor) for name, tensor in state.items()}
    store, sender = open_store(LOOPBACK, 20), TransferSender()
    plan = TransferPlan(
        transfer_id=1, group_id=1, backend="gloo", host=LOOPBACK, port=store.port, num_ranks=2, first_rank=0,
        tensors=wire(list(state.items())), dtype="bfloat16", bucket_bytes=1 << 19, timeout_s=20,
    )  # fmt: skip
    with pytest.raises(RftError, match="transfer 1 rounds tensors that the engine keeps in float32"):
        engine.receive_weights(replace(plan, first_rank=1), 1)
    plan = replace(plan, in_float32=tuple(name for name in state if name in {NORM, *FUSED}))
    with ThreadPoolExecutor() as pool:
        taken = pool.submit(engine.receive_weights, replace(plan, first_rank=1), 1)
        sent = sender.send(plan, held(state.items()), store)
        assert taken.result(timeout=60) == sent.checksum
    sender.leave()
    assert sent.num_bytes == sum(t.numel() * (4 if name in plan.in_float32 else 2) for name, t in state.items())
    found = call(parameters)[0]
    assert torch.equal(found[NORM], state[NORM]) and not torch.equal(state[NORM], state[NORM].bfloat16().float())
    other = "model.layers.0.input_layernorm.weight"
    assert torch.equal(found[other], state[other].bfloat16())
