"""Configuration of the buffer, of task sources and selectors: what `rftdata` itself reads from a YAML file."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_serializer, field_validator

from rftdata.user_code.time_limits import DEFAULT_S


class Section(BaseModel):
    """A section of a configuration file: unknown keys are errors, values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RetentionRule(Section):
    """Limits of what is kept; where several are set, each holds."""

    max_age_days: float | None = Field(None, gt=0, description="Purge experiences that are older.")
    max_experiences: int | None = Field(None, ge=0, description="Keep the newest so many.")
    max_bytes: int | None = Field(None, ge=0, description="Keep the newest that fit, texts and arrays together.")


class RetentionConfig(RetentionRule):
    keep_labelled: bool = Field(True, description="Groups of which one is labelled stay, whatever the limits say.")
    tasksets: dict[str, RetentionRule] = Field(
        default_factory=dict, description="Limits of single tasksets, beside those of all together."
    )

    @property
    def has_limits(self) -> bool:
        rules = [self, *self.tasksets.values()]
        return any(v is not None for r in rules for v in (r.max_age_days, r.max_experiences, r.max_bytes))


class BufferConfig(Section):
    uri: str = Field("./buffer", description="Folder of an embedded PostgreSQL, or a postgresql:// URL.")
    segments: str | None = Field(
        None, description="Folder of the Arrow segments; beside the embedded database by default."
    )
    min_free_bytes: int = Field(256 * 2**20, ge=0, description="Writers refuse to go below this much free disk.")
    compaction_grace_s: float = Field(
        3600.0,
        ge=0,
        description="How long a segment file must be silent before its writer is taken for dead, and how long a file stays"
        " whose segments were moved; longer than a reader on another machine uses an address (10 minutes).",
    )
    listen: str | None = Field(
        None,
        description="HOST:PORT on which the embedded server also accepts TCP. Such a server does not stop by itself.",
    )
    idle_stop_s: float | None = Field(
        60.0,
        ge=0,
        allow_inf_nan=False,
        description="The embedded server stops this many seconds after the last process has closed the buffer and the last session has"
        " ended; the next command starts it again. 0 or null: only `rft db stop` stops it.",
    )
    retention: RetentionConfig | None = Field(
        None,
        description="What `rft retention` purges; a run applies it when it starts. Everything is kept by default.",
    )


class SelectorConfig(Section):
    model_config = ConfigDict(extra="allow", frozen=True)

    type: str = Field(
        "shuffle",
        description="sequential, shuffle, random, easy_to_hard, difficulty, speed, greso, plr, or your own by path; other keys are its"
        " arguments (`rft docs choose-tasks`).",
    )

    @property
    def args(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class MixingConfig(Section):
    temperature: float | None = Field(
        None,
        gt=0,
        description="The weight of each taskset is multiplied by the number of its active tasks to the power 1 / temperature: 1 mixes in"
        " proportion to size, larger values more evenly. Size does not matter by default.",
    )


WeightSchedule = tuple[tuple[int, float], ...]


class TasksetConfig(Section):
    name: str = Field(description="Name of the taskset, unique in a buffer.")
    source: str = Field(
        description="`reasoning_gym:NAME`, a .jsonl, .csv or .parquet file, a folder of such files or of Dataset.save_to_disk, `hf:OWNER/NAME`,"
        " `sql: SELECT …`, or a generator `./file.py:function`."
    )
    args: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of the source: a generator's own; split, files of a folder; config, split, revision of hf; url, url_env of sql.",
    )
    split: Literal["train", "validation", "test"] | None = Field(
        None, description="Take this share of the source only; shares are disjoint by a hash of each task's split key."
    )
    split_key: str | None = Field(
        None,
        description="Column whose value says which tasks `split` keeps together, or numbers:COLUMN for the sorted numbers in it. By default the"
        " column `split_key` where the source has one, else each task's key.",
    )
    split_shares: tuple[float, float, float] = Field(
        (0.8, 0.1, 0.1), description="Shares of train, validation and test in the hash space; they must add up to 1."
    )
    limit: int | None = Field(None, gt=0, description="At most this many tasks.")
    timeout_s: float = Field(
        DEFAULT_S, gt=0, allow_inf_nan=False, description="Longest wait for the source's next row, in seconds."
    )
    prompt: str | None = Field(
        None,
        description="Column with the prompt, a text or a chat; by default `question`, or `messages` where the source has no `question`.",
    )
    answer: str | None = Field(
        None,
        description="Column with the answer. A column that is named must exist; by default it is `answer`, which the source may lack.",
    )
    weight: float | WeightSchedule = Field(
        1.0,
        description="Share of this taskset among those a run trains on: above 0, or [[step, weight], …] over explorer steps, with straight"
        " lines between them and the first and last weight before and after; 0 is none.",
    )
    selector: SelectorConfig | None = Field(
        None, description="Chooses among these tasks instead of the run's selector."
    )
    group_size: int | None = Field(
        None, ge=1, description="Rollouts of each of these tasks; algorithm.group_size by default."
    )
    max_repeats: int | None = Field(None, ge=1, description="Groups planned on one of these tasks in a run, at most.")

    @field_validator("weight", mode="before")
    @classmethod
    def _weight_is_a_share(cls, weight: Any) -> Any:
        if _is_number(weight):
            if not 0 < weight < math.inf:
                raise ValueError("a weight must be above 0; leave the taskset out, or let a schedule go to 0")
            return weight
        points = weight if isinstance(weight, list | tuple) else []
        pairs = [tuple(point) for point in points if isinstance(point, list | tuple) and len(point) == 2]
        good = pairs and len(pairs) == len(points) and all(_is_number(value) for pair in pairs for value in pair)
        if not good or any(step != int(step) or step < 0 or not 0 <= value < math.inf for step, value in pairs):
            raise ValueError(
                "a weight is a number above 0, or [[step, weight], …] with whole steps and weights of 0 or more"
            )
        if any(after[0] <= before[0] for before, after in pairwise(pairs)):
            raise ValueError("the steps of a weight's schedule must grow")
        return tuple((int(step), float(value)) for step, value in pairs)

    @field_serializer("args", when_used="json")
    def _without_password(self, args: dict[str, Any]) -> dict[str, Any]:
        # What is stored and shown never holds a password: a database's own password file brings it, or url_env.
        return {**args, "url": _address(str(args["url"]))} if "url" in args else args

    @field_validator("split_shares")
    @classmethod
    def _shares_add_up(cls, shares: tuple[float, float, float]) -> tuple[float, float, float]:
        if min(shares) < 0 or abs(sum(shares) - 1) > 1e-9:
            raise ValueError(
                f"shares of train, validation and test must not be negative and must add up to 1, not {sum(shares):g}"
            )
        return shares


class SyncConfig(Section):
    method: Literal["memory", "checkpoint"] = Field(
        "memory",
        description="How weights travel: memory (file in shared memory, one host) or checkpoint (file on disk).",
    )
    interval: int = Field(1, ge=1, description="Explorer steps that share one policy.")
    offset: int = Field(0, ge=0, description="Explorer steps that may run ahead of the trainer.")


class EvalConfig(Section):
    every: int = Field(10, ge=1, description="Trainer steps between evaluations.")
    tasks: list[TasksetConfig] = Field(
        default_factory=list, description="Validation tasksets: choices (best checkpoint) are made on them."
    )
    test: list[TasksetConfig] = Field(
        default_factory=list,
        description="Test tasksets, answered once after training by the first and the best policy.",
    )
    decodings: list[Literal["greedy", "sampled"]] = Field(
        ["greedy"], min_length=1, description="Of the validation tasksets."
    )

    @field_validator("tasks", "test")
    @classmethod
    def _answered_once(cls, tasksets: list[TasksetConfig]) -> list[TasksetConfig]:
        for taskset in tasksets:
            for key in ("weight", "selector", "group_size", "max_repeats"):
                if key in taskset.model_fields_set and getattr(taskset, key) not in (None, 1.0):
                    raise ValueError(
                        f"{key} of the taskset {taskset.name!r} has no effect in evaluations, which answer every task once per decoding; "
                        "remove it"
                    )
        return tasksets


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _address(url: str) -> str:
    """A connection string without its password."""
    from rftdata.postgres.database import redacted
    from rftdata.postgres.programs import without_password

    try:
        return without_password(url)[0]
    except Exception:  # noqa: BLE001 - whatever it is, it is no connection string; who connects will say so
        return redacted(url)
