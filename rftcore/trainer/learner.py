"""The learner: one model, its optimizer, and the step from a batch to new weights.

Invariants:
- One `update` is one optimizer step; its gradient does not depend on how the batch is cut into micro-batches.
- Log-probabilities are float32 whatever the type of the matrix products, and computed only at tokens that count: with a
  vocabulary of 49,152 the output layer costs a quarter of the model, and responses are a few percent of the tokens.
  They are under the distribution that was sampled from (logits divided by `temperature`) where the algorithm compares
  them with those the engine recorded, and the model's own (temperature 1) where it does not.
- After `load_checkpoint` the learner goes on as if it had never stopped: bit-equal on a CPU.
- Learning rate is a function of the step alone, so there is no scheduler state to lose.

It knows nothing of the buffer, of engines or of other processes, and trains on one device.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from rftcore.algorithms.algorithm import Algorithm, Plan
from rftcore.algorithms.base import Signals
from rftcore.algorithms.kl import estimate
from rftcore.trainer.batches import MicroBatch, TrainBatch, split_batch
from rftcore.trainer.checkpoints import copy_tokenizer, read_training_state, write_folder, write_training_state
from rftcore.trainer.config import TrainerConfig
from rftdata.errors import ConfigError, ModelError, RftError

logger = logging.getLogger(__name__)

# Attention of these is plain softmax over a mask that we may give, so prompts can be shared; others compute every row.
_MODEL_TYPES_SHARING_PROMPTS = frozenset({"llama", "qwen2", "qwen3"})
_MAX_SKIPPED_IN_A_ROW = 5
_ENTROPY_ROWS = 1024


class Learner:
    """Trains one causal language model with one algorithm.

    Args:
        model_path: folder of a model or a checkpoint, or a Hugging Face id.
        config: the trainer's section.
        algorithm: gives advantages and losses.
        seed: of torch's generators.
        temperature: the rollouts' sampling temperature; behaviour log-probabilities are after it, so ours must be. Of
            no effect with an algorithm that does not use them.
        total_steps: length of the run; `lr_schedule: cosine` needs it.
        device: CUDA where there is one, else the CPU.

    Raises:
        ModelError: the model cannot be opened.
        ConfigError: cosine without `total_steps`, or a temperature that has no distribution.
    """

    def __init__(
        self,
        model_path: str,
        config: TrainerConfig,
        algorithm: Algorithm,
        seed: int,
        *,
        temperature: float = 1.0,
        total_steps: int | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        if temperature <= 0 and algorithm.uses_behavior_logprobs:
            raise ConfigError("training needs sampled rollouts", value=temperature, allowed="a temperature above 0")
        if config.lr_schedule == "cosine" and total_steps is None:
            raise ConfigError(
                "lr_schedule: cosine needs the number of steps", todo="set steps, or lr_schedule: constant"
            )
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        torch.manual_seed(seed)
        self.config = config
        self.algorithm = algorithm
        self.temperature = temperature if algorithm.uses_behavior_logprobs else 1.0
        self.total_steps = total_steps
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.step = 0
        self._model_path = model_path
        self._skipped_in_a_row = 0
        self.reference: PreTrainedModel | None = None
        if "reference" in algorithm.signals:
            self.reference = self._open_model(model_path).eval().requires_grad_(False)
        self._set_model(self._open_model(model_path))

    def update(self, batch: TrainBatch, step: int) -> dict[str, float]:
        """One optimizer step; returns metrics.

        Args:
            batch: whole groups, or whole pairs for an algorithm that compares two.
            step: number of this step, from 1; sets the learning rate.

        Returns:
            loss, grad_norm (before clipping), learning_rate, num_tokens (that count), num_experiences,
            computed_tokens, tokens_per_second (tokens of the experiences, prompts included), seconds, entropy (nats
            per token), skipped (1 when the weights were left as they are), the algorithm's own metrics and, where it
            uses behaviour log-probabilities, logprob_diff (mean |log π - log π_behaviour| before the step) and
            kl_behavior (k3). All but counts are means over tokens that count; a pair algorithm's own over pairs.

        A batch without a token that counts, or with a gradient that is not finite, changes nothing and reports
        `skipped`: one overflow must not end a long run, and the optimizer's moments would never recover from it.

        Raises:
            RftError: a reward that is not a number, an experience that needs behaviour log-probabilities and has none, or
                the fifth gradient in a row that is not finite.
        """
        started = time.perf_counter()
        if self.algorithm.uses_behavior_logprobs:
            _refuse_missing_behavior(batch)
        micro_batches = [
            micro_batch.to(self.device)
            for micro_batch in split_batch(
                batch, self.config.max_tokens_per_microbatch, share_prompts=self._shares_prompts
            )
        ]
        flat = batch.for_algorithm(step)
        num_tokens = len(flat.sequence_N)
        plan = self.algorithm.plan(flat, self._signals(micro_batches, num_tokens))
        sums: dict[str, Tensor] = {}
        for micro_batch in micro_batches:
            for name, value in self._accumulate(micro_batch, plan).items():
                sums[name] = sums.get(name, torch.zeros_like(value)) + value
        metrics = plan.metrics | {name: value.item() for name, value in sums.items()}
        metrics["learning_rate"] = self.learning_rate(step)
        metrics |= self._step_optimizer(metrics["learning_rate"]) if micro_batches else {"skipped": 1.0}
        self.algorithm.observe(plan, metrics)
        self.step = step
        seconds = time.perf_counter() - started
        return metrics | {
            "num_tokens": float(num_tokens),
            "num_experiences": float(batch.num_experiences),
            "computed_tokens": float(sum(micro_batch.num_tokens for micro_batch in micro_batches)),
            "tokens_per_second": float(batch.attention_mask_BT.sum()) / seconds,
            "seconds": seconds,
        }

    def learning_rate(self, step: int) -> float:
        """Linear warm-up to the peak at step `warmup_steps`, then constant or a half cosine to the end of the run."""
        config = self.config
        if step < config.warmup_steps:
            return config.learning_rate * step / config.warmup_steps
        if config.lr_schedule == "constant" or self.total_steps is None:
            return config.learning_rate
        progress = min(1.0, (step - config.warmup_steps) / max(1, self.total_steps - config.warmup_steps))
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
        return config.learning_rate * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share)

    def export_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and a tensor of every weight an engine needs, `lm_head.weight` always among them, none shared."""
        seen: set[int] = set()
        for name, tensor in self.model.state_dict().items():
            exported = tensor.detach()
            # Tied weights are one storage under two names; an engine that prepacks its output layer needs both.
            if exported.data_ptr() in seen:
                exported = exported.clone()
            seen.add(exported.data_ptr())
            yield name, exported

    def save_pretrained(self, folder: Path) -> None:
        """Write model and tokenizer as a Hugging Face folder."""
        self.model.save_pretrained(folder)
        copy_tokenizer(self._model_path, folder)

    def save_checkpoint(self, folder: Path) -> None:
        """Write everything needed to go on; the folder exists afterwards whole, or not at all.

        Raises:
            DiskFullError: no room.
        """
        names = self._parameter_names()
        tensors = {"random/cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            tensors["random/cuda"] = torch.cuda.get_rng_state(self.device)
        for parameter, state in self.optimizer.state.items():
            tensors |= {f"optimizer/{names[parameter]}/{key}": value for key, value in state.items()}
        scalars = {
            "step": self.step, "algorithm": self.algorithm.name, "skipped_in_a_row": self._skipped_in_a_row,
            "algorithm_state": self.algorithm.state_dict(),
        }  # fmt: skip

        def fill(draft: Path) -> None:
            self.save_pretrained(draft)
            write_training_state(draft, tensors, scalars)

        write_folder(folder, fill)

    def load_checkpoint(self, folder: Path) -> None:
        """Go back to a checkpoint: weights, optimizer, random state, `step`. The reference model stays as it was.

        Raises:
            ModelError: not a checkpoint, or one of another model.
        """
        tensors, scalars = read_training_state(folder)
        del self.model, self.optimizer  # before the new ones are made, so that memory holds one of each
        self._set_model(self._open_model(str(folder)))
        parameters = {name: parameter for parameter, name in self._parameter_names().items()}
        torch.set_rng_state(tensors.pop("random/cpu"))
        cuda_state = tensors.pop("random/cuda", None)
        if cuda_state is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(cuda_state, self.device)
        for key, tensor in tensors.items():
            name, _, part = key.removeprefix("optimizer/").rpartition("/")
            if name not in parameters:
                raise ModelError(f"the checkpoint {folder} has optimizer state for {name!r}, which its model lacks")
            # A copy: safetensors may hand out the file itself, mapped, and the optimizer writes in place.
            self.optimizer.state[parameters[name]][part] = tensor.to(self.device, copy=True)
        self.step = scalars["step"]
        self._skipped_in_a_row = scalars["skipped_in_a_row"]
        self.algorithm.load_state_dict(scalars["algorithm_state"])

    def _open_model(self, path: str) -> PreTrainedModel:
        dtype = getattr(torch, self.config.dtype)
        try:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
        except (OSError, ValueError) as error:
            first_line = str(error).strip().partition("\n")[0]
            raise ModelError(
                f"the model {path} cannot be opened: {first_line}",
                allowed="a folder with config.json and safetensors, or a Hugging Face id",
                todo="correct model.path",
            ) from error
        # Dropout is off for good: the ratio has to compare two policies, not two draws of noise.
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.0  # type: ignore[assignment]  # torch takes every attribute for a tensor
        model.to(self.device)  # type: ignore[arg-type]  # transformers' wrapper of the method hides that it is bound
        return model

    def _set_model(self, model: PreTrainedModel) -> None:
        self.model = model.train()
        if self.config.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._shares_prompts = self.config.share_prompts and _can_share_prompts(model.config)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": self.config.weight_decay},
                {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=self.config.learning_rate,
            betas=self.config.betas,
            eps=self.config.eps,
            fused=True,
        )

    def _parameter_names(self) -> dict[Tensor, str]:
        return {parameter: name for name, parameter in self.model.named_parameters()}

    @torch.no_grad()
    def _signals(self, micro_batches: list[MicroBatch], num_tokens: int) -> Signals:
        """What the algorithm has to know of every token before the step."""
        wanted = self.algorithm.signals
        found: dict[str, Tensor] = {
            f"{name}_N": torch.zeros(num_tokens) for name in ("old", "entropy", "reference") if name in wanted
        }
        for micro_batch in micro_batches if found else ():
            place_N = micro_batch.index_N.cpu()
            if "old" in wanted or "entropy" in wanted:
                logprobs_NV = self._logprobs(self.model, micro_batch)
                if "old" in wanted:
                    found["old_N"][place_N] = _pick(logprobs_NV, micro_batch.target_N).cpu()
                if "entropy" in wanted:
                    found["entropy_N"][place_N] = _entropy(logprobs_NV).cpu()
                del logprobs_NV
            if self.reference is not None:
                reference_NV = self._logprobs(self.reference, micro_batch)
                found["reference_N"][place_N] = _pick(reference_NV, micro_batch.target_N).cpu()
        return Signals(**found)

    def _accumulate(self, micro_batch: MicroBatch, plan: Plan) -> dict[str, Tensor]:
        """Forward and backward of one micro-batch; returns what it adds to the batch's loss and mean metrics."""
        all_logprobs_NV = self._logprobs(self.model, micro_batch)
        logprobs_N = _pick(all_logprobs_NV, micro_batch.target_N)
        has_bonus = self.algorithm.config.entropy.coef > 0
        entropy_N = _entropy(all_logprobs_NV if has_bonus else all_logprobs_NV.detach())
        index_N = micro_batch.index_N.cpu()
        view = plan.view(index_N, logprobs_N, entropy_N=entropy_N if has_bonus else None)
        loss, metrics = self.algorithm.objective(plan, index_N, view)
        share = 1.0 / len(plan.anchor_N)
        sums = {"loss": loss.detach(), "entropy": entropy_N.detach().sum() * share}
        del all_logprobs_NV
        loss.backward()
        if self.algorithm.uses_behavior_logprobs:
            behavior_N = plan.batch.behavior_N[index_N].to(self.device)
            sums["logprob_diff"] = (logprobs_N.detach() - behavior_N).abs().sum() * share
            # Samples come from the behaviour policy, so it is the `p` of the estimator.
            sums["kl_behavior"] = estimate("k3", behavior_N, logprobs_N.detach()).sum() * share
        return sums | metrics

    def _logprobs(self, model: PreTrainedModel, micro_batch: MicroBatch) -> Tensor:
        """Log-probabilities of the whole vocabulary where a token that counts is predicted, float32 [N, V]."""
        shared = micro_batch.attention_R1LL is not None
        with self._autocast(), _output_only_at(model, micro_batch.source_N):
            # Positions are given only where they are not 0, 1, 2, …: transformers looks for packed sequences in them.
            logits_1NV: Tensor = model(
                input_ids=micro_batch.token_ids_RL,
                attention_mask=micro_batch.attention_R1LL,
                position_ids=micro_batch.position_ids_RL if shared else None,
                use_cache=False,
            ).logits
        return (logits_1NV[0].float() / self.temperature).log_softmax(dim=-1)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.config.autocast == "none":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def _step_optimizer(self, learning_rate: float) -> dict[str, float]:
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        limit = math.inf if self.config.max_grad_norm is None else self.config.max_grad_norm
        grad_norm = nn.utils.clip_grad_norm_(parameters, limit).item()
        skipped = not math.isfinite(grad_norm)
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if skipped:
            logger.warning("step skipped: the gradient's norm is %s; the weights are unchanged", grad_norm)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self._skipped_in_a_row >= _MAX_SKIPPED_IN_A_ROW:
            raise RftError(
                f"training has diverged: {_MAX_SKIPPED_IN_A_ROW} gradients in a row were not finite",
                value=grad_norm,
                todo="go back to an earlier checkpoint with a smaller trainer.learning_rate or a longer warm-up",
            )
        return {"grad_norm": grad_norm, "skipped": float(skipped)}


@contextmanager
def _output_only_at(model: PreTrainedModel, source_N: Tensor) -> Iterator[None]:
    """Within it, the output layer sees [1, N, hidden]: the rows `source_N` of its flattened input.

    A hook on the layer, and not the hidden states and the layer called by hand, because what some models do to logits
    afterwards (scaling, soft-capping) then stays theirs to do.
    """

    def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0].flatten(0, 1).index_select(0, source_N)[None],)

    handle = model.get_output_embeddings().register_forward_pre_hook(keep)
    try:
        yield
    finally:
        handle.remove()


def _pick(logprobs_NV: Tensor, target_N: Tensor) -> Tensor:
    return logprobs_NV.gather(1, target_N[:, None])[:, 0]


def _refuse_missing_behavior(batch: TrainBatch) -> None:
    """Stop before tokens that nobody sampled are weighed by who sampled them."""
    wrong = batch.behavior_logprobs_BT.isnan().any(dim=1).nonzero().flatten().tolist()
    if wrong:
        raise RftError(
            f"{len(wrong)} of {batch.num_experiences} experiences of the batch have no behaviour log-probabilities, which this "
            f"algorithm needs; the first is experience {wrong[0]} of the batch",
            todo="give behavior_logprobs when experiences are written, or train with an algorithm that needs none, like sft",
        )


def _entropy(logprobs_NV: Tensor) -> Tensor:
    """-Σ p log p of each row, some rows at a time: a metric should not cost another [N, V]."""
    return torch.cat([-(rows.exp() * rows).sum(dim=-1) for rows in logprobs_NV.split(_ENTROPY_ROWS)])


def _can_share_prompts(model_config: Any) -> bool:
    layer_types = set(getattr(model_config, "layer_types", None) or ["full_attention"])
    return model_config.model_type in _MODEL_TYPES_SHARING_PROMPTS and layer_types == {"full_attention"}
