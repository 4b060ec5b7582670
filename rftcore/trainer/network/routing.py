"""Routers of a mixture of experts: how evenly they spread tokens, and the loss that balances them.

    f_e = tokens routed to expert e / tokens,    P_e = mean probability of expert e,    loss = E Σ_e f_e P_e

over all layers together and E experts: eq. 4 to 6 of Switch Transformers (Fedus et al. 2021, arXiv 2101.03961) without their α, with several experts per
token as transformers' `load_balancing_loss_func` has it. It is the number of experts per token where routing is even. Only P has a gradient.

Every computed token counts, prompts included. Each micro-batch has its own loss, and its weight in an update is its share of the tokens.
Hooks keep the scores that routers compute. While gradients are enabled they store unconditionally, so compiled and recomputed layers run the same code.
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
"""Name of the tokens and probabilities of a `Routing`, [2, layers, experts], among the sums of an update."""
_SCORES = "rft_router_scores"  # attribute of a router module


class Routing(NamedTuple):
    """The routing of the L tokens of a pass.

    Attributes:
        loss: the load-balancing loss, a number with its gradient.
        tokens_ME: float32; number of tokens that each of M layers routed to each of E experts.
        probabilities_ME: float32; sum over tokens of the probability of each expert.
    """

    loss: Tensor
    tokens_ME: Tensor
    probabilities_ME: Tensor


class Routers:
    """The routers of a mixture of experts.

    Args:
        modules: the routers, layer by layer.
        score_index: place of the scores in what a router returns.
        chosen: experts per token.

    Attributes:
        coef: weight of the loss; 0 measures only.
    """

    def __init__(self, modules: Sequence[nn.Module], score_index: int, chosen: int, coef: float) -> None:
        self._modules, self._chosen, self.coef = modules, chosen, coef
        for module in modules:
            setattr(module, _SCORES, None)
            module.register_forward_hook(_keep_output(score_index))

    def take(self) -> Routing | None:
        """Return the routing of the last pass with gradient, once; None without such a pass."""
        scores = [getattr(module, _SCORES) for module in self._modules]
        for module in self._modules:
            setattr(module, _SCORES, None)
        if scores[0] is None:
            return None
        with torch.set_grad_enabled(self.coef > 0):
            return measured(scores, self._chosen)


def find_routers(model: PreTrainedModel, coef: float | None) -> Routers | None:
    """Return the routers of a model; None for a family without this loss.

    Args:
        coef: weight of the loss; None for the model's own, which counts if its configuration asks for router logits (`output_router_logits`).

    Raises:
        ConfigError: a weight above 0 for a model without such routers.
    """
    config = model.config.get_text_config()
    recorder = (getattr(model.base_model, "_can_record_outputs", None) or {}).get("router_logits")
    if _has_loss(config) and isinstance(recorder, OutputRecorder) and recorder.layer_name is None:
        modules = [module for module in model.modules() if isinstance(module, recorder.target_class)]
        if modules:
            own = config.router_aux_loss_coef if config.output_router_logits else 0.0
            return Routers(modules, recorder.index, config.num_experts_per_tok, own if coef is None else coef)
    if coef:
        raise ConfigError(
            "trainer.router_aux_coef balances the routers of a mixture of experts, and this model has none that are known",
            value=f"{coef:g}, {config.model_type}",
            allowed="0, or models such as qwen3_moe, mixtral",
            todo="leave trainer.router_aux_coef out",
        )
    return None


def measured(scores: Sequence[Tensor], chosen: int) -> Routing:
    """Return the routing that follows from scores.

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
        # Not `bincount`: the host would wait for its size.
        tokens.append(p_LE.new_zeros(p_LE.shape[1]).index_add_(0, places, torch.ones_like(places, dtype=torch.float32)))
    tokens_ME, probabilities_ME = torch.stack(tokens), torch.stack(probabilities)
    rows = sum(each.numel() // each.shape[-1] for each in scores)
    loss = tokens_ME.shape[1] * (tokens_ME.sum(dim=0) / rows * (probabilities_ME.sum(dim=0) / rows)).sum()
    return Routing(loss, tokens_ME, probabilities_ME.detach())


def routing_metrics(tokens_ME: Tensor, probabilities_ME: Tensor) -> dict[str, float]:
    """Return the metrics of an update, from the sums over its micro-batches and ranks, on the CPU.

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
    """Return whether transformers has this loss for the family: its routers choose the largest entries of a softmax."""
    names = ("router_aux_loss_coef", "output_router_logits", "num_experts_per_tok")
    return all(getattr(config, name, None) is not None for name in names)


def _keep_output(index: int) -> Any:
    def keep(module: nn.Module, _: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            setattr(module, _SCORES, output[index] if isinstance(output, tuple) else output)

    return keep
