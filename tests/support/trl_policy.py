"""GRPO and RLOO of TRL on responses of the test: its advantages from rewards, then its loss from log-probabilities.

TRL is imported by the test that calls it: with vLLM, which it imports, that takes seconds, and every process of a session imports all tests.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from tests.support.trl_trainers import bare

_COMMON: dict[str, Any] = {
    "mask_truncated_completions": False,
    "pad_to_multiple_of": None,
    "environment_factories": None,
    "environments": None,
    "tools": [],
    "_standalone_tools": [],
    "_is_vlm": False,
    "log_multimodal": False,
    "chat_template_kwargs": {},
    "reward_func_names": ["test"],
    "reward_funcs": [None],
    "_tokenizer": SimpleNamespace(pad_token_id=0),
    "num_iterations": 1,
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "beta": 0.0,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "multi_objective_aggregation": "sum_then_normalize",
    "importance_sampling_level": "token",
    "loss_type": "dapo",
    "scale_rewards": "group",
    "normalize_advantages": False,
    "reward_clip_range": None,
    "use_vllm": False,
    "vllm_importance_sampling_correction": False,
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_min": None,
    "vllm_importance_sampling_clip_max": 3.0,
    "_entropy_bonus_enabled": False,
    "use_adaptive_entropy": False,
    "entropy_coef": 0.0,
    "current_gradient_accumulation_steps": 1,
    "max_completion_length": 256,
}
_ARGS: dict[str, Any] = {
    "per_device_train_batch_size": 64,
    "gradient_checkpointing_kwargs": None,
    "steps_per_generation": 1,
    "gradient_accumulation_steps": 1,
    "use_bias_correction_kl": False,
    "delta": None,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
}


def trl_loss(
    kind: Literal["GRPOTrainer", "RLOOTrainer", "GMPOTrainer"],
    rewards: list[float] | list[list[float]],
    group_size: int,
    *,
    mask_BT: Tensor,
    logprobs_BT: Tensor,
    old_BT: Tensor,
    reference_BT: Tensor | None = None,
    sampled_BT: Tensor | None = None,
    entropy_BT: Tensor | None = None,
    **settings: Any,
) -> tuple[Tensor, Tensor]:
    """The loss, and the advantage of each response.

    Args:
        rewards: one of each response, or one of each of several functions.
        mask_BT: which tokens there are; other entries of the tensors mean nothing.
        old_BT: log-probabilities before the step, which ratios compare with.
        sampled_BT: those of the engine.
        settings: attributes of the trainer, or of its `args`.
    """
    import trl
    from trl.experimental.gmpo import GMPOTrainer

    num, rewards_BK = len(rewards), torch.tensor(rewards).view(len(rewards), -1)
    num_functions = rewards_BK.shape[1]
    model, reference = SimpleNamespace(training=True, is_gradient_checkpointing=False), object()

    def logprobs(of: Any, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        # Without a gradient it is asked for the policy before the step.
        found = reference_BT if of is reference else logprobs_BT if torch.is_grad_enabled() else old_BT
        assert found is not None
        return found, torch.zeros_like(found) if entropy_BT is None else entropy_BT, None

    lengths = mask_BT.sum(1).tolist()
    completions = [[1] * length for length in lengths]
    sampled = None if sampled_BT is None else [row[:n].tolist() for row, n in zip(sampled_BT, lengths, strict=True)]
    generated = [[1]] * num, completions, ["…"] * num
    if kind != "RLOOTrainer":
        generated = (*generated[:2], None, generated[2], sampled, {}, None, None)
    attributes = _COMMON | {
        "model": model,
        "ref_model": reference,
        "num_generations": group_size,
        "args": SimpleNamespace(**_ARGS),
        "reward_weights": torch.ones(num_functions),
        "reward_func_names": [str(k) for k in range(num_functions)],
        "reward_funcs": [None] * num_functions,
        "_generate": lambda *_: generated,
        "_calculate_rewards": lambda *_: rewards_BK,
        "_get_per_token_logps_and_entropies": logprobs,
        "_logs": defaultdict(list) | {"rewards": defaultdict(list)},
        "_pending_extra_logs": {},
        "_pending_metrics": {},
    }
    for name, value in settings.items():
        if name in _ARGS:
            setattr(attributes["args"], name, value)
        else:
            assert name in attributes, name
            attributes[name] = value
    trainer = bare(GMPOTrainer if kind == "GMPOTrainer" else getattr(trl, kind), **attributes)
    trainer.accelerator.process_index = 0
    trainer.accelerator.reduce = lambda x, reduction: x
    trainer.accelerator.pad_across_processes = lambda x, dim, pad_index: x
    trainer.accelerator.sync_gradients = True
    inputs = trainer._generate_and_score_completions([{"prompt": "…"} for _ in rewards])
    if kind != "RLOOTrainer":
        inputs["old_per_token_logps"] = old_BT
    return trainer._compute_loss(model, inputs), inputs["advantages"]
