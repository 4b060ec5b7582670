"""The configuration of `rft eval`: a model or a checkpoint, tasksets, and how often each question is answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rftcore.config.run import RunConfig, parse_config
from rftcore.model_folder import names_folder
from rftdata.attempts.evaluations import best_step, validation_scores
from rftdata.buffer import Buffer
from rftdata.config_errors import did_you_mean
from rftdata.errors import ConfigError
from rftdata.reports.results import RunResults
from rftdata.run import Run

Decodings = Literal["greedy", "sampled"]
# Sections of a configuration that say how answers are sampled and scored, and where they are stored. Those of training are left out.
_KEPT = ("buffer", "explorer")


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """What is evaluated.

    Attributes:
        model: folder or Hugging Face id; relative paths start from the working folder. None for that of the configuration.
        tasks: names of tasksets of the configuration, or sources of tasks; none for the held-out tasksets of the configuration.
        num_answers: to each question.
        decoding: None for sampled with several answers, greedy with one.
        name: of the run that stores the answers; None for one after the configuration's.
    """

    model: str | None
    tasks: Sequence[str]
    num_answers: int
    decoding: Decodings | None
    name: str | None

    def configuration(self, config: RunConfig) -> RunConfig:
        """Return the configuration of a run that only evaluates.

        Raises:
            ConfigError: the request contradicts itself, or there is nothing to evaluate.
        """
        decoding = self.decoding or ("sampled" if self.num_answers > 1 else "greedy")
        if decoding == "greedy" and self.num_answers > 1:
            raise ConfigError(
                "greedy answers to a question are all equal",
                value=f"--answers {self.num_answers} --decoding greedy",
                todo="omit --answers, or use --decoding sampled",
            )
        given = config.model_dump(exclude_unset=True)
        raw: dict[str, Any] = {section: given[section] for section in _KEPT if section in given}
        raw["explorer"] = {**raw.get("explorer", {}), "sleep": False, "teacher": None}
        kept = {key: given["eval"][key] for key in ("pass_reward", "max_failed") if key in given.get("eval", {})}
        raw |= {
            "run": {**given["run"], "name": self.name or f"{config.run.name}-eval", "mode": "eval"},
            "model": {"path": self._model(config)},
            "algorithm": {"name": "grpo"},
            "trainer": {"batch_groups": 1},
            "eval": {
                **kept,
                "test": [_taskset(config, name) for name in self.tasks or _held_out(config)],
                "decodings": [decoding],
                "num_answers": self.num_answers,
            },
        }
        return parse_config(raw, config.base_dir, "the configuration of the evaluation")

    def _model(self, config: RunConfig) -> str:
        if self.model is None:
            return config.model.path
        return str(Path(self.model).expanduser().resolve()) if _is_folder(self.model) else self.model


def _is_folder(model: str) -> bool:
    return names_folder(model) or Path(model).is_dir()


def _held_out(config: RunConfig) -> list[str]:
    names = [taskset.name for taskset in (*config.eval.test, *config.eval.tasks)]
    if not names:
        raise ConfigError(
            "the configuration has no held-out tasksets, and none are named",
            allowed=", ".join(taskset.name for taskset in config.tasks) or "a source of tasks",
            todo="name tasks (--tasks NAME or --tasks FILE), or add tasksets to eval.test",
        )
    return names


def _taskset(config: RunConfig, name: str) -> dict[str, Any]:
    """Return a taskset of the configuration as one of an evaluation, or a new one for a source of tasks.

    Raises:
        ConfigError: it is neither.
    """
    known = {taskset.name: taskset for taskset in config.tasksets}
    if name in known:
        found = known[name].model_dump(exclude_unset=True)
        return {
            key: value for key, value in found.items() if key not in ("weight", "selector", "group_size", "max_repeats")
        }
    path = Path(name)
    if path.exists():
        return {"name": path.stem, "source": str(path.resolve())}
    if ":" in name:
        return {"name": name.rpartition(":")[2], "source": name}
    raise ConfigError(
        "unknown taskset",
        value=name,
        allowed=f"{', '.join(known) or 'none in the configuration'}, a file, a folder, or a source such as hf:OWNER/NAME",
        todo=did_you_mean(name, [*known], "correct the name or the path"),
    )


def checkpoint_folder(buffer: Buffer, named: str) -> str:
    """Return the folder of a checkpoint.

    Args:
        named: RUN, RUN@STEP, RUN@best or RUN@last; RUN is its best checkpoint, or its last one without evaluations.

    Raises:
        QueryError: the run does not exist.
        ConfigError: it has no such checkpoint.
    """
    name, _, step = named.partition("@")
    run = buffer.find_run(name)
    folders = {checkpoint.trainer_step: checkpoint.uri for checkpoint in RunResults(run).checkpoints()}
    allowed = ", ".join(map(str, folders)) or "none: it has no checkpoint whose files exist"
    best = _best(run)
    if step in ("", "best"):
        wanted = best if best in folders or step == "best" else max(folders, default=None)
    elif step == "last":
        wanted = max(folders, default=None)
    else:
        wanted = int(step) if step.isdigit() else None
    if wanted is None or wanted not in folders:
        raise ConfigError(
            f"run {run.name!r} has no such checkpoint", value=named, allowed=allowed, todo=f"name one: {run.name}@STEP"
        )
    return folders[wanted]


def _best(run: Run) -> int | None:
    settings = run.config.get("eval", {})
    tasksets = [taskset["name"] for taskset in settings.get("tasks", [])]
    decoding = settings.get("decodings", ["greedy"])[0]
    return best_step(validation_scores(run, tasksets, decoding, max_failed=settings.get("max_failed", 1.0)))
