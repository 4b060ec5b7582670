"""TRL's GRPO trainer on stored rollouts, for `rft bench trainer`.

`GRPOTrainer.train()` is unchanged. Two things differ from a user's run: rollouts come from `rollout_func`, and ratios compare with the
log-probabilities of the stored rollouts. The time to turn rollouts into tensors and rewards into advantages is not counted, for either system.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.trainer.batches import NUM_FIRST_TOKENS, Batch
from benchmarks.trainer.case import CLIP, LADDER, LEARNING_RATE, Case, Recorder


class StoredRolloutTrainer(GRPOTrainer):
    """GRPO on stored rollouts.

    Args:
        recorder: records the steps.
        alone: keep the first sequence of a group only, with its reward as its advantage. TRL refuses groups of one.
    """

    def __init__(self, *args: Any, recorder: Recorder, alone: bool, **kwargs: Any) -> None:
        self.recorder = recorder
        self.alone = alone
        self.step_loss: torch.Tensor | float = 0.0
        super().__init__(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        started = self.recorder.now()
        found: dict[str, Any] = super()._generate_and_score_completions(inputs)
        found["old_per_token_logps"] = found["sampling_per_token_logps"]
        if self.alone:
            found |= {name: value[:1] for name, value in found.items() if value.ndim}
            found["num_items_in_batch"] = found["completion_mask"].sum()
            found["advantages"] = torch.ones_like(found["advantages"])
        self.recorder.pause(self.recorder.now() - started)
        return found

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        self.step_loss = self.step_loss + loss.detach()
        return loss


class StepTimer(TrainerCallback):
    """Records every step of a trainer; the norm of its gradient is only in what it logs after the step."""

    def __init__(self) -> None:
        self.trainer: StoredRolloutTrainer | None = None
        self._measured: dict[str, Any] = {}

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        assert self.trainer is not None
        self.trainer.step_loss = 0.0
        self.trainer.recorder.begin()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        assert self.trainer is not None
        self._measured = self.trainer.recorder.end()

    def on_log(self, *args: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        assert self.trainer is not None
        if "grad_norm" in logs:
            self.trainer.recorder.write(
                self._measured, loss=float(self.trainer.step_loss), grad_norm=float(logs["grad_norm"])
            )


def train(case: Case, model: str, batches: list[Batch], recorder: Recorder) -> None:
    """Train on every batch once."""
    alone = case.batch == LADDER
    rollouts, num_generations = _rollouts(batches, alone)

    def stored(prompts: list[str], _: GRPOTrainer) -> dict[str, Any]:
        # A prompt of the data set is repeated for its generations, which are taken in turn.
        chosen = [rollouts[prompt][index % num_generations] for index, prompt in enumerate(prompts)]
        return {name: [each[name] for each in chosen] for name in chosen[0]}

    timer = StepTimer()
    with tempfile.TemporaryDirectory() as folder:
        trainer = StoredRolloutTrainer(
            recorder=recorder,
            alone=alone,
            model=model,
            callbacks=[timer],
            rollout_func=stored,
            reward_funcs=_rewards,
            processing_class=_tokenizer(),
            train_dataset=Dataset.from_dict({"prompt": [f"{number}" for number in range(len(rollouts))]}),
            args=_arguments(case, folder, len(batches), len(batches[0].prompts), num_generations),
        )
        timer.trainer = trainer
        trainer.train()


def _arguments(case: Case, folder: str, num_steps: int, num_sequences: int, num_generations: int) -> GRPOConfig:
    # A single sequence is taken from a group of two.
    micro_batch, batch = (2, 2) if case.batch == LADDER else (case.micro_batch, num_sequences)
    dtype = "bfloat16" if case.dtype == "bfloat16" else "float32"
    return GRPOConfig(
        folder,
        loss_type="dapo",
        beta=0.0,
        epsilon=CLIP[0],
        epsilon_high=CLIP[1],
        num_iterations=1,
        temperature=1.0,
        num_generations=num_generations,
        per_device_train_batch_size=micro_batch,
        generation_batch_size=batch,
        gradient_accumulation_steps=batch // micro_batch,
        max_steps=num_steps,
        shuffle_dataset=False,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        bf16=case.dtype == "mixed",
        model_init_kwargs={"dtype": dtype, "attn_implementation": "sdpa"},
        gradient_checkpointing=case.checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        use_liger_kernel=case.system == "trl-liger",
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )


def _rollouts(batches: list[Batch], alone: bool) -> tuple[dict[str, list[dict[str, Any]]], int]:
    """Return rollouts by prompt of the data set (a number), and the number of rollouts of a prompt.

    The data set is one batch that every step trains on, or one sequence a step, to which a short one is added.
    """
    by_prompt: dict[str, list[dict[str, Any]]] = {}
    for number, batch in enumerate(batches if alone else batches[:1]):
        for index, group in enumerate(batch.group_ids):
            by_prompt.setdefault(str(number if alone else group), []).append(
                {
                    "prompt_ids": batch.prompts[index].tolist(),
                    "completion_ids": batch.responses[index].tolist(),
                    "logprobs": batch.logprobs[index].tolist(),
                    "reward": batch.rewards[index],
                }
            )
    if alone:
        for members in by_prompt.values():
            cut = {name: members[0][name][:1] for name in ("completion_ids", "logprobs")}
            members.append(members[0] | cut | {"reward": 0.0})
    return by_prompt, len(by_prompt["0"])


def _rewards(*, reward: list[float], **_: Any) -> list[float]:
    return reward


def _tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that TRL accepts. It does not know the tokens of rollouts, so their text is empty."""
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    words = {word: index for index, word in enumerate([*special, *map(str, range(NUM_FIRST_TOKENS - len(special)))])}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")),
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )
