"""The forward pass of a transformer over a packed row, and its output layer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from rftcore.trainer.batches.micro_batches import MicroBatch
from rftcore.trainer.model_shape import KEPT_LOGITS_BYTES
from rftcore.trainer.network import packable
from rftcore.trainer.network.head import Output


class Computation(nn.Module):
    """The forward pass from tokens to the result of a head, at the places that count; the root module that is sharded.

    The head is called within the forward pass, because the gathered weights exist only there.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.longest = packable.length_limit(model.config)

    def forward(
        self, micro_batch: MicroBatch, autocast: AbstractContextManager[Any], head: Callable[[Tensor], Any]
    ) -> Any:
        if self.longest is not None:
            packable.refuse_longer(micro_batch.longest, self.longest, self.model.config)
        with autocast:
            hidden_1LH = self.model.base_model(
                input_ids=micro_batch.token_ids_L[None],
                position_ids=micro_batch.position_ids_L[None],
                packing=micro_batch.packing,
                use_cache=False,
            ).last_hidden_state
        return head(hidden_1LH[0].index_select(0, micro_batch.source_N))


def output_layer(model: PreTrainedModel, temperature: float, kept_bytes: int = KEPT_LOGITS_BYTES) -> Output:
    """Return the output layer of a causal language model, for distributions at this temperature; see `Output`."""
    layer = model.get_output_embeddings()
    assert isinstance(layer, nn.Linear)
    config = model.config.get_text_config()
    return Output(
        weight_VH=layer.weight,
        bias_V=layer.bias,
        temperature=temperature,
        scale=getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0),
        soft_cap=getattr(config, "final_logit_softcapping", None),
        kept_bytes=kept_bytes,
    )
