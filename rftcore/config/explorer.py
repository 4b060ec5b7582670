"""Configuration of the explorer: engine, workflow, rewards, decoding and pacing."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from rftcore.config.reward import Combination, RewardConfig, check_rewards, listed_rewards
from rftcore.other_models.config import OtherModelConfig
from rftcore.teachers.config import TeacherConfig
from rftdata.config import Section


class ExplorerConfig(Section):
    engine: str = Field(
        "vllm", description="vllm, transformers, none (for workflows that do not sample), or the path of your own."
    )
    engine_args: dict[str, Any] = Field(default_factory=dict, description="The engine's own settings.")
    workflow: str = Field(
        "single_turn",
        description="single_turn, demonstration, environment, tools, multi_agent, agent (any program), or the path of your own.",
    )
    workflow_args: dict[str, Any] = Field(default_factory=dict, description="The workflow's own settings.")
    reward: list[RewardConfig] = Field(
        default_factory=list,
        description="Reward functions; each a name, or {name: …} with its weight and its arguments.",
    )
    reward_combination: Combination = Field(
        "sum",
        description="How the values of several rewards become one: sum (each times its weight), product (each to the power of its weight, no value below 0), or"
        " first_failure (the sum up to the first reward that is 0 or less, or below its threshold; the rewards after it are not called).",
    )
    models: dict[str, OtherModelConfig] = Field(
        default_factory=dict,
        description="Models that workflows ask besides the policy, by name: a user simulator, a judge, an opponent. They are not trained.",
    )
    teacher: TeacherConfig | None = Field(
        None,
        description="Model whose log-probabilities of the sampled tokens are stored with the rollouts, as the array teacher_logprobs.",
    )
    num_explorers: int = Field(1, ge=1, description="Number of explorer processes.")
    tensor_parallel_size: int = Field(
        1, ge=1, description="GPUs over which the engine of each explorer divides its model (vllm only)."
    )
    sleep: bool = Field(
        False,
        description="Let explorer and trainer use one GPU alternately: the engine frees its memory while the trainer trains (vllm only).",
    )
    temperature: float = Field(1.0, ge=0, description="Sampling temperature of training rollouts.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus of training rollouts.")
    top_k: int = Field(0, ge=0, description="Number of most likely tokens to sample from; 0 for all.")
    max_tokens: int = Field(
        256,
        ge=1,
        description="Longest response, in tokens; by default 2048 on a GPU, 256 on a CPU, less than the context.",
    )
    stop: list[str] = Field(default_factory=list, description="Strings that end a response.")
    thoughts: Literal["template", "tool_cycle", "all"] = Field(
        "template",
        description="Which thoughts of earlier answers (up to </think>) stay in a chat: those that the model's chat template writes; also those since the"
        " last message of a user, while only tools answer (tool_cycle); or all. Where thoughts are taken out, the turn begins an experience of its own.",
    )
    greedy_baseline: bool | None = Field(
        None,
        description="Sample one more rollout per group greedily, not to be trained on: its reward is the group's baseline. By default if"
        " the algorithm needs one (remax). A group whose greedy rollout fails is dropped.",
    )
    max_refill: int = Field(
        64, ge=0, description="Number of groups planned per step to replace dropped ones, beyond trainer.batch_groups."
    )
    claim_groups: int = Field(
        16,
        ge=1,
        description="Number of groups that one explorer claims at a time; by default those that fill its engine, or its share of a batch.",
    )
    max_rollouts: int | None = Field(
        None,
        ge=1,
        description="Largest number of rollouts that one explorer runs at a time; by default 8 for each of the engine's max_num_seqs. The number follows the"
        " engine's load: a rollout begins when fewer requests are open than twice max_num_seqs, so that environments, tools and rewards that take long leave"
        " no engine idle.",
    )
    rollout_timeout_s: float = Field(
        600.0,
        gt=0,
        description="Seconds after which a rollout ends, without the time that its requests wait in the engine. It is kept if it waits for the model's next"
        " answer then and has one, and else recorded as timed out. By default more for more than 6,000 max_tokens: a second for every 10. Calls of plain"
        " reward functions have their own limit.",
    )
    close_timeout_s: float = Field(
        60.0, gt=0, description="Further seconds in which the workflow of a rollout that is kept may return its score."
    )
    max_turns: int | None = Field(
        None, ge=1, description="Answers of the model after which a rollout ends and is kept; no limit by default."
    )
    max_rollout_tokens: int | None = Field(
        None,
        ge=1,
        description="Sampled tokens of all answers together after which a rollout ends and is kept; no limit by default.",
    )
    step_timeout_s: float = Field(
        30.0,
        gt=0,
        description="Seconds after which a step of an environment is ended, with its process; its rollout counts as timed out. This time"
        " and that of its reset do not count as time of the rollout.",
    )
    reset_timeout_s: float = Field(
        120.0, gt=0, description="Seconds after which the constructor or the reset of an environment is ended."
    )
    max_environments: int | None = Field(
        None,
        ge=1,
        description="Processes of environments, and programs of agents, that one explorer runs at a time; rollouts wait for a free one."
        " By default 64 for each core, and at most one for each 64 MiB of memory.",
    )
    reward_timeout_s: float = Field(
        60.0,
        gt=0,
        description="Seconds after which a call of a reward function is ended; its rollout counts as timed out.",
    )
    reward_processes: int = Field(
        8,
        ge=1,
        description="Maximum number of processes for plain (not async) reward functions; they start while calls wait.",
    )
    block_timeout_s: float = Field(
        30.0,
        gt=0,
        description="Seconds for which an async workflow or reward may block its event loop (a call that does not await) before it is stopped.",
    )
    hang_s: float = Field(
        600.0,
        gt=0,
        description="Seconds for which the engine may be at one step, or at one change of its weights, where time in which a weights file arrives from a"
        " slow disk does not count. Then the process ends with its stack, and"
        " `rft run` starts the explorer again, with the newest weights. Above sync.acknowledge_s + sync.timeout_s.",
    )
    keep_partial_s: float = Field(
        10.0,
        gt=0,
        description="Seconds between two times at which the tokens of unfinished groups are kept in the buffer, so that after a crash another explorer"
        " continues them; an orderly stop keeps all. Groups that take less time are not kept meanwhile.",
    )
    max_failed_steps: int = Field(
        1,
        ge=1,
        description="Number of consecutive explorer steps without a good rollout that end the run with an error, while none has succeeded yet.",
    )
    patience_s: float = Field(
        1800.0,
        ge=0,
        description="Seconds for which all rollouts may fail after some have succeeded, as while a judge or a sandbox is gone, before the run ends with"
        " their error. Meanwhile explorers pause, and try one group at a time.",
    )
    lease_s: float = Field(60.0, gt=0, description="Seconds of silence after which an explorer's groups are released.")

    @property
    def reward_limit(self) -> tuple[float, str]:
        """Seconds that a call of a plain reward may take, and the setting with that value."""
        name = "reward_timeout_s" if self.reward_timeout_s <= self.rollout_timeout_s else "rollout_timeout_s"
        return getattr(self, name), f"explorer.{name} = {getattr(self, name):g} s"

    @field_validator("reward", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return listed_rewards(value)

    @model_validator(mode="after")
    def _rewards_fit_together(self) -> ExplorerConfig:
        check_rewards(self.reward, self.reward_combination)
        return self

    @model_validator(mode="after")
    def _only_vllm_divides_a_model(self) -> ExplorerConfig:
        if self.tensor_parallel_size > 1 and self.engine in ("transformers", "none"):
            raise ValueError(
                f"explorer.engine {self.engine} does not divide a model over {self.tensor_parallel_size} GPUs; set explorer.engine: vllm, or "
                "tensor_parallel_size: 1 and more explorers (num_explorers)"
            )
        return self

    @model_validator(mode="after")
    def _engine_can_sleep(self) -> ExplorerConfig:
        if self.sleep and self.engine in ("transformers", "none"):
            raise ValueError(
                f"explorer.engine {self.engine} does not sleep; set explorer.engine: vllm, or explorer.sleep: false"
            )
        if self.sleep and self.tensor_parallel_size > 1:
            raise ValueError(
                "explorer.sleep is for an engine that shares its GPU with the trainer, and a tensor-parallel engine shares none; set explorer.sleep: false, or "
                "tensor_parallel_size: 1"
            )
        return self

    @model_validator(mode="after")
    def _server_has_the_sampled_distribution(self) -> ExplorerConfig:
        if self.teacher is not None and self.teacher.endpoint is not None and self.temperature not in (0, 1):
            raise ValueError(
                f"explorer.teacher.endpoint gives log-probabilities at temperature 1, and explorer.temperature is {self.temperature:g}; set it "
                "to 1, or name the teacher's folder (explorer.teacher.path), which is computed at the rollouts' temperature"
            )
        return self
