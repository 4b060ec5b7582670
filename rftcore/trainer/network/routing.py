"""How evenly the routers of a mixture of experts spread tokens, and the loss that makes them do so.

    f_e = tokens routed to expert e / tokens,    P_e = mean probability of expert e,    loss = E Σ_e f_e P_e

over all layers together and E experts: eq. 4 to 6 of Switch Transformers (Fedus et al. 2021, arXiv 2101.03961) without their α, with several experts per
token as transformers' `load_balancing_loss_func` has it. It is the number of experts per token where routing is even. Only P has a gradient.

Every token that passes the model counts, those of prompts, too. A micro-batch has a loss of its own, and its weight in an update is its share of the tokens.
Hooks keep the scores that routers compute. They store without a condition of their own, so that compiled and recomputed layers are the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from rftdata.errors import ConfigError

ROUTING = "routing"
"""Among what a micro-batch adds to an update: tokens and probabilities of a `Routing`, [2, layers, experts]."""
_SCORES = "rft_router_scores"  # attribute of a router module


class Routing(NamedTuple):
    """What the routers did with the L tokens of a pass.

    Attributes:
        loss: the load-balancing loss, a number with its gradient.
        tokens_ME: float32; how many tokens each of M layers gave to each of E experts.
        probabilities_ME: float32; sum over tokens of the probability of each expert.
    """

    loss: Tensor
    tokens_ME: Tensor
    probabilities_ME: Tensor


class Routers:
    """The routers of a model; of a family without this loss there are none.

    Args:
        coef: weight of the loss; None for the model's own, which counts if its configuration asks for router logits (`output_router_logits`).

    Attributes:
        coef: weight of the loss; 0 measures only.

    Raises:
        ConfigError: a weight above 0 for a model without such routers.
    """

    def __init__(self, model: PreTrainedModel, coef: float | None) -> None:
        config = model.config.get_text_config()
        recorder = (getattr(model.base_model, "_can_record_outputs", None) or {}).get("router_logits")
        self._modules: list[nn.Module] = []
        if _has_loss(config) and isinstance(recorder, OutputRecorder) and recorder.layer_name is None:
            self._modules = [module for module in model.modules() if isinstance(module, recorder.target_class)]
            for module in self._modules:
                setattr(module, _SCORES, None)
                module.register_forward_hook(_keep_output(recorder.index))
        if coef and not self._modules:
            raise ConfigError(
                "trainer.router_aux_coef balances the routers of a mixture of experts, and this model has none that are known",
                value=f"{coef:g}, {config.model_type}",
                allowed="0, or models such as qwen3_moe, mixtral",
                todo="leave trainer.router_aux_coef out",
            )
        own = config.router_aux_loss_coef if self._modules and config.output_router_logits else 0.0
        self.coef: float = own if coef is None else coef
        self._chosen: int = config.num_experts_per_tok if self._modules else 0

    def take(self) -> Routing | None:
        """Return what the routers did in the last pass with gradient, and forget it; None for a model without routers, or without such a pass."""
        scores = [getattr(module, _SCORES) for module in self._modules]
        for module in self._modules:
            setattr(module, _SCORES, None)
        if not scores or scores[0] is None:
            return None
        with torch.set_grad_enabled(self.coef > 0):
            return measured(scores, self._chosen)


def measured(scores: Sequence[Tensor], chosen: int) -> Routing:
    """Return what routers with these scores do.

    Args:
        scores: of each layer, [L, E], before softmax.
        chosen: experts per token.
    """
    tokens, probabilities = [], []
    for scores_LE in scores:
        scores_LE = scores_LE.reshape(-1, scores_LE.shape[-1])
        p_LE = scores_LE.softmax(dim=-1, dtype=torch.float32)
        probabilities.append(p_LE.sum(dim=0))
        places = p_LE.detach().topk(chosen, dim=-1).indices.flatten()
        # Not `bincount`, for whose size the host would wait.
        tokens.append(p_LE.new_zeros(p_LE.shape[1]).index_add_(0, places, torch.ones_like(places, dtype=torch.float32)))
    tokens_ME, probabilities_ME = torch.stack(tokens), torch.stack(probabilities)
    rows = sum(each.numel() // each.shape[-1] for each in scores)
    loss = tokens_ME.shape[1] * (tokens_ME.sum(dim=0) / rows * (probabilities_ME.sum(dim=0) / rows)).sum()
    return Routing(loss, tokens_ME, probabilities_ME.detach())


def routing_metrics(tokens_ME: Tensor, probabilities_ME: Tensor) -> dict[str, float]:
    """Metrics of an update, from the sums over its micro-batches and ranks, on the CPU.

    Returns:
        router_max_violation: how far the expert with the most tokens is above the mean, as a share of the mean (arXiv 2408.15664, eq. 4); mean over layers.
        router_entropy: of the mean distribution over experts, nats; mean over layers. At most log E.
    """
    p_ME = probabilities_ME / probabilities_ME.sum(dim=1, keepdim=True)
    violation_M = tokens_ME.amax(dim=1) / tokens_ME.mean(dim=1) - 1.0
    return {
        "router_max_violation": violation_M.mean().item(),
        "router_entropy": torch.special.entr(p_ME).sum(dim=1).mean().item(),
    }


def _has_loss(config: PretrainedConfig) -> bool:
    """Whether transformers has this loss for the family: it is of routers that choose the largest of a softmax."""
    names = ("router_aux_loss_coef", "output_router_logits", "num_experts_per_tok")
    return all(getattr(config, name, None) is not None for name in names)


def _keep_output(index: int) -> Any:
    def keep(module: nn.Module, _: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            setattr(module, _SCORES, output[index] if isinstance(output, tuple) else output)

    return keep
