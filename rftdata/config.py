"""Configuration sections of the buffer, of task sources and of selectors: the part of a YAML file that `rftdata` reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_serializer, field_validator, model_validator

from rftdata.errors import QueryError
from rftdata.limits import INT8, MAX_COUNT, check_name
from rftdata.uri import is_server, redacted
from rftdata.user_code.time_limits import DEFAULT_S


class Section(BaseModel):
    """A section of a configuration file: unknown keys, NaN and infinity are errors, and values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _can_be_stored(self) -> Self:
        for name, value in self:
            largest = INT8[1] if name == "seed" or name.endswith("_bytes") else MAX_COUNT
            if isinstance(value, int) and value > largest:
                raise ValueError(f"{name} is too large: it may be up to {largest}")
        return self


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Replace keys of a mapping at every depth. A section that is changed to another `name` is replaced as a whole."""
    result = dict(base)
    for key, value in changes.items():
        under = result.get(key)
        if isinstance(value, str) and isinstance(under, Mapping) and "name" in under:
            value = {"name": value}
        if (
            isinstance(value, Mapping)
            and isinstance(under, Mapping)
            and value.get("name", under.get("name")) == under.get("name")
        ):
            result[key] = merged(under, value)
        else:
            result[key] = value
    return result


# A thousand years. All experiences are newer, and the date before which they would be purged still exists.
MAX_AGE_DAYS = 365_000


class RetentionRule(Section):
    """Limits of the experiences that are kept; if several are set, all of them apply."""

    max_age_days: float | None = Field(None, gt=0, le=MAX_AGE_DAYS, description="Purge older experiences.")
    max_experiences: int | None = Field(None, ge=0, description="Keep at most this many, the newest ones.")
    max_bytes: int | None = Field(
        None, ge=0, description="Keep the newest that fit into this size, texts and arrays together."
    )


class RetentionConfig(RetentionRule):
    keep_labelled: bool = Field(
        True, description="Keep groups with a labelled experience or a comment, regardless of the limits."
    )
    tasksets: dict[str, RetentionRule] = Field(
        default_factory=dict, description="Limits of single tasksets, in addition to those for all together."
    )

    @property
    def has_limits(self) -> bool:
        rules = [self, *self.tasksets.values()]
        return any(v is not None for r in rules for v in (r.max_age_days, r.max_experiences, r.max_bytes))


class BufferConfig(Section):
    uri: str = Field("./buffer", description="Folder of an embedded PostgreSQL, or a postgresql:// URL.")
    segments: str | None = Field(
        None, description="Folder of the Arrow segments; by default beside the embedded database."
    )
    min_free_bytes: int = Field(256 * 2**20, ge=0, description="Writers refuse to leave less free disk than this.")
    compaction_grace_s: float = Field(
        3600.0,
        ge=0,
        description="Time without writes after which the writer of a segment file is assumed to be gone, and time for which a file stays"
        " after its segments were moved. Must be longer than a reader on another machine uses an address (10 minutes).",
    )
    listen: str | None = Field(
        None,
        description="HOST:PORT on which the embedded server also accepts TCP. Such a server does not stop when idle.",
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

    @field_validator("listen")
    @classmethod
    def _has_a_host_and_a_port(cls, listen: str | None) -> str | None:
        host, _, port = (listen or "*:1").rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError("it must be HOST:PORT with a port from 1 to 65535, for example 127.0.0.1:5433")
        return listen or None

    @field_validator("uri")
    @classmethod
    def _is_a_folder_or_a_url(cls, uri: str) -> str:
        is_server(uri)  # raises what it finds wrong
        return uri


class SelectorConfig(Section):
    model_config = ConfigDict(extra="allow", frozen=True)

    type: str = Field(
        "shuffle",
        description="sequential, shuffle, random, easy_to_hard, difficulty, speed, greso, plr, or your own by path. Other keys are its"
        " arguments (`rft docs choose-tasks`).",
    )

    @property
    def args(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class MixingConfig(Section):
    temperature: float | None = Field(
        None,
        gt=0,
        description="The weight of each taskset is multiplied by the number of its active tasks to the power 1 / temperature. 1 mixes in"
        " proportion to size, larger values more evenly. By default size does not matter.",
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
        description="Column whose value decides which tasks `split` keeps together, or numbers:COLUMN for the sorted numbers in it. By default the"
        " column `split_key` if the source has one, else each task's key.",
    )
    split_shares: tuple[float, float, float] = Field(
        (0.8, 0.1, 0.1), description="Shares of train, validation and test; they must add up to 1."
    )
    limit: int | None = Field(None, gt=0, description="Maximum number of tasks.")
    timeout_s: float = Field(
        DEFAULT_S, gt=0, allow_inf_nan=False, description="Longest wait for the source's next row, in seconds."
    )
    prompt: str | None = Field(
        None,
        description="Column with the prompt, a text or a chat; by default `question`, or `messages` if the source has no `question`.",
    )
    answer: str | None = Field(
        None,
        description="Column with the answer. A named column must exist. The default is `answer`, which the source may lack.",
    )
    weight: float | WeightSchedule = Field(
        1.0,
        description="Share of this taskset in training: a number above 0, or [[step, weight], …] over explorer steps, interpolated linearly"
        " and constant before the first and after the last step; 0 switches it off.",
    )
    selector: SelectorConfig | None = Field(
        None, description="Chooses among these tasks instead of the run's selector."
    )
    group_size: int | None = Field(
        None, ge=1, description="Rollouts of each of these tasks; algorithm.group_size by default."
    )
    max_repeats: int | None = Field(
        None, ge=1, description="Maximum number of groups planned for one of these tasks in a run."
    )

    @field_validator("name")
    @classmethod
    def _name_can_be_stored(cls, name: str) -> str:
        try:
            check_name("the name of a taskset", name)
        except QueryError as error:
            raise ValueError(str(error)) from error
        return name

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
        # Stored and displayed values never contain a password: it comes from a password file, or from url_env.
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
    method: Literal["auto", "memory", "checkpoint", "nccl"] = Field(
        "auto",
        description="How weights reach the engines: auto (nccl while trainer and engines have GPUs of their own, file_method otherwise),"
        " memory (file in shared memory, one host), checkpoint (file on disk), or nccl (from the trainer straight into the live engines, by"
        " NCCL between GPUs and by gloo otherwise).",
    )
    file_method: Literal["memory", "checkpoint"] = Field(
        "memory",
        description="With nccl and auto, how weights reach evaluations, and engines that missed them and cannot be sent them again: memory or checkpoint.",
    )
    acknowledge_s: float = Field(
        5.0,
        gt=0,
        description="With nccl and auto, seconds after which an explorer that does not acknowledge is left out; it is sent the weights when it asks for them.",
    )
    timeout_s: float = Field(
        60.0,
        gt=0,
        description="With nccl and auto, seconds that an explorer may take to join, and each bucket to arrive.",
    )
    bucket_mib: int = Field(256, ge=1, description="With nccl and auto, MiB of tensors that are sent together.")
    max_logprob_diff: float = Field(
        0.3,
        gt=0,
        description="With nccl and auto, the largest mean difference, in nats per token, between the log-probabilities of engines and trainer in the first"
        " batch of an attempt that was sampled from its newest weights; beyond it the run stops.",
    )
    check_weights: bool = Field(
        False,
        description="After every change of weights, compare each tensor in each process of each engine with a model that is loaded anew from the file"
        " of the same version (with nccl, file_method then writes one of every version), and stop the run if one differs. For finding faults: it"
        " takes seconds, and memory for a second copy of the model.",
    )
    adapters: Literal["auto", "alone", "merged"] = Field(
        "auto",
        description="What engines get when trainer.lora trains adapters: alone, the adapters, which the engine computes beside the model; merged, the"
        " whole model with the adapters added to its weights, which loses what a bfloat16 engine rounds away; auto, alone where the engine can"
        " compute them.",
    )
    kv_cache: Literal["recompute", "keep"] = Field(
        "recompute",
        description="What running requests do when weights change: recompute keys and values of their tokens with the new weights, or keep"
        " those of the old ones, which saves time; later tokens then come from neither policy alone, and their recorded log-probabilities are"
        " those of that mixture. New requests never begin with keys and values of older weights (vllm only).",
    )
    address: str | None = Field(
        None,
        description="With nccl and auto, the address at which explorers on other machines reach the trainer; by default the one from which it reaches"
        " the database's machine, or, where the database runs beside it, that of its host name.",
    )
    interval: int = Field(1, ge=1, description="Explorer steps that share one policy.")
    offset: int = Field(0, ge=0, description="Explorer steps that may run ahead of the trainer.")


class EvalConfig(Section):
    every: int = Field(10, ge=1, description="Trainer steps between evaluations.")
    tasks: list[TasksetConfig] = Field(
        default_factory=list, description="Validation tasksets, which select the best checkpoint."
    )
    test: list[TasksetConfig] = Field(
        default_factory=list,
        description="Test tasksets, answered once after training by the first and the best policy.",
    )
    decodings: list[Literal["greedy", "sampled"]] = Field(
        ["greedy"], min_length=1, description="Decodings of the validation tasksets."
    )
    num_answers: int = Field(
        1,
        ge=1,
        description="Answers to each question in sampled evaluations, for mean@n, best@k and pass@k; a greedy evaluation has one.",
    )
    pass_reward: float = Field(1.0, allow_inf_nan=False, description="Reward from which an answer passes, for pass@k.")
    max_failed: float = Field(
        0.05,
        ge=0,
        le=1,
        description="Largest share of failed answers (an exception, a time limit) with which an evaluation may choose the best checkpoint.",
    )

    @model_validator(mode="after")
    def _several_answers_are_sampled(self) -> EvalConfig:
        if self.num_answers > 1 and "sampled" not in self.decodings and not self.test:
            raise ValueError(
                f"eval.num_answers ({self.num_answers}) has no effect: greedy answers to a question are all equal; add sampled to eval.decodings"
            )
        return self

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
    """Return a connection string without its password."""
    from rftdata.postgres.programs import without_password

    try:
        return without_password(url)[0]
    except Exception:  # noqa: BLE001 - not a connection string; connecting will report that
        return redacted(url)
