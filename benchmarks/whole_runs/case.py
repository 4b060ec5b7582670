"""One comparison: the settings of our runs, and the same task, reward and numbers for TRL.

Both systems follow one configuration file. What TRL has no counterpart of is switched off (pipeline stages, test sets) or refused (another workflow than
`single_turn`, adapters, several passes over a batch). The algorithm is GRPO on both sides: advantages are (reward - mean) / (standard deviation + 1e-4) within
the group, the clip is 0.2 in both directions, all tokens of a batch have equal weight, and there is no KL term.
"""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rftcore.config.explorer import ExplorerConfig
from rftcore.config.run import RunConfig, load_config
from rftcore.config.taskset import RunTasksetConfig
from rftcore.model_folder import resolve_model
from rftcore.rewards import load_rewards
from rftcore.workflows.single_turn import chat_messages
from rftcore.workflows.task import Task
from rftdata.errors import ConfigError
from rftdata.tasks.rows import read_tasks

CLIP = 0.2
_SHARED = ("gpu_memory_utilization", "max_num_seqs")
STEPS_AHEAD = {"alternating": 0, "on_policy": 0, "one_step_off": 1, "asynchronous": 2}
"""Our variants, each with the number of steps that the explorer may be ahead of the trainer."""


@dataclass(frozen=True)
class Sizes:
    """What is the same in all runs.

    Attributes:
        steps: optimizer steps of a run.
        every: steps between two evaluations.
        target: held-out score at which a run ends; None trains all steps.
        limit_s: seconds after which a run is stopped.
    """

    steps: int
    every: int
    target: float | None
    limit_s: float


@dataclass(frozen=True)
class TrlSettings:
    """What differs between runs of TRL.

    Attributes:
        generation: colocate, server or transformers.
        micro_batch: sequences of one forward pass.
        corrects: weigh sequences by the ratio of trainer and engine (`vllm_importance_sampling_correction`), as TRL does by default.
        saves: write a checkpoint at each evaluation, as ours does, and keep the newest.
    """

    generation: str
    liger: bool
    micro_batch: int
    corrects: bool
    saves: bool = False


def settings(file: Path, sizes: Sizes, variant: str, seed: int, *, corrects: bool = False) -> list[str]:
    """Return the settings in which a run of ours differs from the configuration file."""
    ahead = STEPS_AHEAD[variant]
    found = [
        f"run.name={variant}-{seed}".replace("_", "-"),
        f"run.seed={seed}",
        f"steps={sizes.steps}",
        f"eval.every={sizes.every}",
        "eval.decodings=[greedy]",
        "eval.test=[]",
        "monitor=[]",
        "selector={type: shuffle}",
        "pipelines.experience=[]",
        "algorithm.advantage={name: group, eps: 1.0e-4}",
        f"algorithm.loss={{name: ppo, clip: {CLIP}}}",
        f"trainer.checkpoint_every={sizes.every}",
        "trainer.keep_checkpoints=1",
        "trainer.lr_schedule=constant",
        f"explorer.sleep={str(variant == 'alternating').lower()}",
        "sync.interval=1",
        f"sync.offset={ahead}",
        f"sampling.max_staleness={ahead}",
    ]
    # Truncated importance sampling where samples may come from older policies, else TRL's correction of the same policy in two programs.
    if ahead:
        found.append("algorithm.correction={name: truncate, high: 2.0}")
    elif corrects:
        found.append("algorithm.correction={name: mask, level: sequence, high: 3.0, keep_weight: true}")
    if variant == "alternating":
        explorer = load_config(file).explorer
        engine = _as_one_engine(explorer)
        found += ["explorer.num_explorers=1", f"explorer.claim_groups={explorer.claim_groups * explorer.num_explorers}"]
        found += [f"explorer.engine_args.{name}={engine[name]}" for name in _SHARED if name in engine]
    return found


def _as_one_engine(explorer: ExplorerConfig) -> dict[str, Any]:
    """Return the arguments of one engine that has the memory and the sequences of all explorers together."""
    engine = explorer.engine_args
    return engine | {name: engine[name] * explorer.num_explorers for name in _SHARED if name in engine}


def trl_case(
    file: Path, overrides: Sequence[str], sizes: Sizes, seed: int, chosen: TrlSettings, folder: Path
) -> dict[str, Any]:
    """Return what a run of TRL needs, as JSON; its questions are written to `folder`.

    Raises:
        ConfigError: TRL has no counterpart of the configuration.
    """
    config = load_config(file, [*settings(file, sizes, "on_policy", seed), *overrides])
    _refuse_what_differs(config)
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = folder / "train.jsonl", folder / "held_out.jsonl"
    _write_questions(train, config, _training_tasks(config, sizes.steps * config.trainer.batch_groups, seed))
    _write_questions(held_out, config, (task for each in config.eval.tasks for task in _tasks(each, config.base_dir)))
    trainer, explorer, optimizer = config.trainer, config.explorer, config.trainer.optimizer
    return {
        **asdict(sizes),
        **asdict(chosen),
        "seed": seed,
        "model": str(resolve_model(_path(config))),
        "train": str(train),
        "held_out": str(held_out),
        "rewards": [entry.model_dump(mode="json") for entry in explorer.reward],
        "reward_combination": explorer.reward_combination,
        "base_dir": str(config.base_dir),
        "batch_groups": trainer.batch_groups,
        "group_size": config.algorithm.group_size,
        "max_tokens": explorer.max_tokens,
        "temperature": explorer.temperature,
        "top_p": explorer.top_p,
        "top_k": explorer.top_k,
        "engine_args": _as_one_engine(explorer),
        "learning_rate": trainer.learning_rate,
        "warmup_steps": trainer.warmup_steps,
        "betas": list(optimizer.betas),
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": trainer.max_grad_norm,
        "autocast": trainer.autocast,
        "clip": CLIP,
    }


def _path(config: RunConfig) -> str:
    local = config.base_dir / Path(config.model.path).expanduser()
    return str(local) if local.is_dir() else config.model.path


def _refuse_what_differs(config: RunConfig) -> None:
    trainer, explorer = config.trainer, config.explorer
    rewards = load_rewards(explorer.reward, config.base_dir)
    for found, what, allowed in (
        (explorer.workflow != "single_turn", f"explorer.workflow is {explorer.workflow}", "single_turn"),
        (trainer.epochs * trainer.mini_batches != 1, "a batch is trained on in several updates", "one update"),
        (trainer.lora is not None, "adapters are trained", "whole weights"),
        (trainer.dtype != "float32", f"trainer.dtype is {trainer.dtype}", "float32"),
        (trainer.optimizer.name != "adamw", f"the optimizer is {trainer.optimizer.name}", "adamw"),
        (not config.eval.tasks, "eval.tasks is empty", "held-out tasks"),
        (
            any(inspect.iscoroutinefunction(reward.function) for reward in rewards.values()),
            "a reward is async",
            "plain functions",
        ),
        (any(reward.of_group for reward in rewards.values()), "a reward scores groups", "rewards of one answer"),
    ):
        if found:
            raise ConfigError(f"runs of TRL cannot be compared with this configuration: {what}", allowed=allowed)


def _training_tasks(config: RunConfig, num: int, seed: int) -> Iterator[Task]:
    """Yield tasks in random order, each taskset with its share; a taskset that is used up begins again."""
    generator = random.Random(seed)
    tasksets = [_tasks(taskset, config.base_dir) for taskset in config.tasks]
    weights = [taskset.weight for taskset in config.tasks]
    left: list[list[Task]] = [[] for _ in tasksets]
    for _ in range(num):
        place = generator.choices(range(len(tasksets)), [float(str(weight)) for weight in weights])[0]
        if not left[place]:
            left[place] = generator.sample(tasksets[place], len(tasksets[place]))
        yield left[place].pop()


def _tasks(taskset: RunTasksetConfig, base_dir: Path) -> list[Task]:
    return _read_tasks(taskset.model_dump_json(), base_dir)


@cache
def _read_tasks(taskset: str, base_dir: Path) -> list[Task]:
    """Read a taskset, given as JSON, once for all runs."""
    config = RunTasksetConfig.model_validate_json(taskset)
    rows = enumerate(read_tasks(config, base_dir))
    return [Task.from_row({"task_id": number, "taskset": config.name, **row}) for number, row in rows]


def _write_questions(file: Path, config: RunConfig, tasks: Iterator[Task]) -> None:
    """Write a line for each task: the chat that the workflow makes of it, and the task for the reward."""
    arguments = config.explorer.workflow_args
    with file.open("w") as lines:
        for task in tasks:
            chat = chat_messages(task, *(arguments.get(name) for name in ("system", "examples", "template")))
            lines.write(json.dumps({"prompt": chat, "task": json.dumps(asdict(task))}) + "\n")
