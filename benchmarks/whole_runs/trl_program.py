"""A run of TRL's `GRPOTrainer.train()`: `python -m benchmarks.whole_runs.trl_program CASE.json EVENTS.jsonl`.

The trainer and its generation are TRL's. Added are a clock around its parts, the evaluation on held-out questions (by the engine or the model that samples,
greedily), and a warm-up of the learning rate whose first step is not 0, as ours. Every event is a line with the time at which it ended.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoTokenizer, GenerationConfig, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rftcore.reporting.equal_score import to_target
from rftcore.rewards import load_rewards
from rftcore.rewards.combination import RewardTotal
from rftcore.workflows.chat_encoding import chat_encoder
from rftcore.workflows.task import Task, Turn
from rftdata.experience import Sequence


class Events:
    """Writes events, and adds up the seconds of parts since the last one."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("a")
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def write(self, name: str, **figures: Any) -> None:
        self._file.write(json.dumps({"event": name, "at": time.time(), **figures}) + "\n")
        self._file.flush()

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        started = time.time()
        yield
        self.seconds[part] += time.time() - started

    def take(self) -> dict[str, float]:
        """Return the seconds of each part, which begin again at 0."""
        found, self.seconds = dict(self.seconds), defaultdict(float)
        return found


class TimedTrainer(GRPOTrainer):
    """TRL's trainer with a clock."""

    def __init__(self, *args: Any, case: dict[str, Any], events: Events, **kwargs: Any) -> None:
        self.case, self.events = case, events
        self.num_sampled = self.num_trained = 0
        super().__init__(*args, **kwargs)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        steps = max(1, self.case["warmup_steps"])
        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, lambda done: min(1.0, (done + 1) / steps))
        return self.lr_scheduler

    def push_weights(self) -> None:
        """Bring the engine to the current weights, as TRL does before it samples."""
        if self.use_vllm and self.state.global_step != self._last_loaded_step:
            with self.events.time("weights"):
                self.vllm_generation.sync_weights()
            self._last_loaded_step = self.state.global_step

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        self.push_weights()
        with self.events.time("sampling"):
            return super()._generate_single_turn(*args, **kwargs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        with self.events.time("rewards"):
            return super()._calculate_rewards(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        with self.events.time("sampling and scoring"):
            found = super()._generate_and_score_completions(inputs)
        num_sampled = int(found["completion_mask"].sum())
        self.num_sampled += num_sampled
        self.num_trained += num_sampled + int(found["prompt_mask"].sum())
        return found

    def answers(self, prompts: list[list[int]]) -> list[list[int]]:
        """Return the greedy answers to prompts by what samples for the training."""
        limit = self.case["max_tokens"]
        if not self.use_vllm:
            return self._answers_of_model(prompts, limit)
        self.push_weights()
        generation = self.vllm_generation
        if generation.mode == "server":
            return generation.vllm_client.generate(prompts, n=1, temperature=0.0, max_tokens=limit)["completion_ids"]
        from vllm import SamplingParams

        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = generation.llm.generate(requests, SamplingParams(temperature=0.0, max_tokens=limit), use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in found]

    def _answers_of_model(self, prompts: list[list[int]], limit: int) -> list[list[int]]:
        fill = self._tokenizer.pad_token_id
        longest = max(map(len, prompts))
        inputs = torch.tensor([[fill] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        model = self.accelerator.unwrap_model(self.model_wrapped)
        was_training = model.training
        config = GenerationConfig(
            max_new_tokens=limit,
            do_sample=False,
            pad_token_id=fill,
            eos_token_id=self.eos_token_ids,
            disable_compile=True,
        )
        device = self.accelerator.device
        model.eval()
        with torch.no_grad(), self.accelerator.autocast():
            found = model.generate(
                input_ids=inputs.to(device), attention_mask=mask.to(device), generation_config=config
            )
        model.train(was_training)
        return [_until_end(answer, self.eos_token_ids) for answer in found[:, longest:].tolist()]


class Evaluation(TrainerCallback):
    """Scores greedy answers to the held-out questions before the training and every few steps; ends the training at the target.

    Args:
        case: of the run.
        questions: rows with prompt and task.
        rewards: scores answers.
    """

    def __init__(self, case: dict[str, Any], events: Events, questions: list[dict[str, Any]], rewards: Any) -> None:
        self.case, self.events, self.questions, self.rewards = case, events, questions, rewards
        self.trainer: TimedTrainer | None = None
        self.points: list[dict[str, Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._evaluate(0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self.events.take()
            self.events.write("first sampling")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.trainer is not None
        step = state.global_step
        tokens = {"num_sampled": self.trainer.num_sampled, "num_trained": self.trainer.num_trained}
        self.events.write("step", step=step, **tokens, seconds=self.events.take())
        if step % self.case["every"] == 0 or step == self.case["steps"]:
            self._evaluate(step)
            target = self.case["target"]
            control.should_training_stop |= target is not None and to_target(self.points, target) is not None

    def _evaluate(self, step: int) -> None:
        assert self.trainer is not None
        trained, started = time.time(), time.time()
        tokenizer = self.trainer.processing_class
        answers = self.trainer.answers(
            [chat_encoder(tokenizer).prompt(each["prompt"]).token_ids for each in self.questions]
        )
        scores = self.rewards(completion_ids=answers, task=[each["task"] for each in self.questions])
        score = sum(scores) / len(scores)
        self.points.append({"step": step, "seconds": trained, "score": score})
        parts = self.events.take()
        self.events.write("evaluation", step=step, trained_at=trained, score=score, took=time.time() - started, **parts)


class Rewards:
    """The configuration's rewards as TRL calls them."""

    __name__ = "rewards"

    def __init__(self, case: dict[str, Any], tokenizer: Any, end_tokens: set[int]) -> None:
        self._rewards = load_rewards(case["rewards"], Path(case["base_dir"])).values()
        self._combination = case["reward_combination"]
        self._tokenizer, self._end_tokens = tokenizer, end_tokens

    def __call__(self, *, completion_ids: list[list[int]], task: list[str], **_: Any) -> list[float]:
        texts = self._tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        return [
            self._score(ids, text, Task(**json.loads(each)))
            for ids, text, each in zip(completion_ids, texts, task, strict=True)
        ]

    def _score(self, ids: list[int], text: str, task: Task) -> float:
        reason = "stop" if ids and ids[-1] in self._end_tokens else "length"
        turn = Turn([], text, reason, Sequence("", text, ids, 0, reason))
        total = RewardTotal(self._combination)
        for reward in self._rewards:
            value = reward(turn, task)
            total.add(reward.config, float(sum(value.values()) if isinstance(value, dict) else value))
            if total.has_failed:
                break
        return total.value


def main(case_file: str, events_file: str) -> None:
    case = json.loads(Path(case_file).read_text())
    events = Events(Path(events_file))
    events.write("imported")
    train, held_out = (
        [json.loads(line) for line in Path(case[name]).read_text().splitlines()] for name in ("train", "held_out")
    )
    tokenizer = AutoTokenizer.from_pretrained(case["model"], padding_side="left")
    rewards = Rewards(case, tokenizer, _end_tokens(case, tokenizer))
    evaluation = Evaluation(case, events, held_out, rewards)
    if case["generation"] == "colocate" and not torch.cuda.is_available():
        _keep_weights_unpacked()
    trainer = TimedTrainer(
        case=case,
        events=events,
        model=case["model"],
        processing_class=tokenizer,
        reward_funcs=rewards,
        train_dataset=Dataset.from_list(train),
        callbacks=[evaluation],
        args=arguments(case, Path(events_file).with_suffix("")),
    )
    evaluation.trainer = trainer
    _refuse_other_prompts(trainer, train[:8])
    events.write("ready")
    trainer.train()
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    events.write("end", allocated_gib=peak)


def arguments(case: dict[str, Any], folder: Path) -> GRPOConfig:
    """Return TRL's arguments: those of the case, and what a user would choose for a small model on one device."""
    batch = case["batch_groups"] * case["group_size"]
    micro_batch = min(case["micro_batch"], batch)
    is_cuda = torch.cuda.is_available()
    vllm: dict[str, Any] = {}
    if case["generation"] != "transformers":
        engine = case["engine_args"]
        vllm = {
            "use_vllm": True,
            "vllm_mode": case["generation"],
            "vllm_gpu_memory_utilization": engine.get("gpu_memory_utilization", 0.4),
            "vllm_max_model_length": engine.get("context_length"),
            "vllm_enable_sleep_mode": False,
            "vllm_server_base_url": case.get("server"),
            "vllm_importance_sampling_correction": case["corrects"],
        }
    return GRPOConfig(
        str(folder),
        loss_type="dapo",
        scale_rewards="group",
        beta=0.0,
        epsilon=case["clip"],
        num_iterations=1,
        num_generations=case["group_size"],
        max_completion_length=case["max_tokens"],
        temperature=case["temperature"],
        top_p=case["top_p"],
        top_k=case["top_k"],
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=batch // micro_batch,
        generation_batch_size=batch,
        max_steps=case["steps"],
        shuffle_dataset=False,
        learning_rate=case["learning_rate"],
        adam_beta1=case["betas"][0],
        adam_beta2=case["betas"][1],
        adam_epsilon=case["eps"],
        weight_decay=case["weight_decay"],
        max_grad_norm=case["max_grad_norm"],
        optim="adamw_torch_fused",
        bf16=case["autocast"] == "bfloat16" or (case["autocast"] == "auto" and is_cuda),
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        gradient_checkpointing=False,
        use_liger_kernel=case["liger"],
        use_cpu=not is_cuda,
        logging_steps=1000,
        save_strategy="steps" if case["saves"] else "no",
        save_steps=case["every"],
        save_total_limit=1,
        report_to=[],
        disable_tqdm=True,
        seed=case["seed"],
        **vllm,
    )


def _refuse_other_prompts(trainer: TimedTrainer, rows: list[dict[str, Any]]) -> None:
    """Raise if TRL would give the model other tokens than ours."""
    chats = [row["prompt"] for row in rows]
    theirs, *_ = trainer._tokenize_prompts(chats)
    ours = [chat_encoder(trainer.processing_class).prompt(chat).token_ids for chat in chats]
    if [list(ids) for ids in theirs] != ours:
        raise RuntimeError(f"TRL's prompts differ from ours: {theirs[0]} and {ours[0]}")


def _keep_weights_unpacked() -> None:
    """On a CPU, vLLM packs weights and removes those that TRL writes into; keep these, with torch's matrix product."""
    from vllm.model_executor.layers import utils

    def keep(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = keep


def _end_tokens(case: dict[str, Any], tokenizer: Any) -> set[int]:
    found = {tokenizer.eos_token_id}
    if (Path(case["model"]) / "generation_config.json").exists():
        stored = GenerationConfig.from_pretrained(case["model"]).eos_token_id
        found |= {stored} if isinstance(stored, int) else set(stored or ())
    return {token for token in found if token is not None}


def _until_end(answer: list[int], end_tokens: list[int]) -> list[int]:
    ends = [place for place, token in enumerate(answer) if token in end_tokens]
    return answer[: ends[0] + 1] if ends else answer


if __name__ == "__main__":
    main(*sys.argv[1:])
