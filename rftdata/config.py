"""Configuration of the buffer, of task sources, selectors and sampling: what `rftdata` itself reads from a YAML file."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


class Section(BaseModel):
    """A section of a configuration file: unknown keys are errors, values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class BufferConfig(Section):
    uri: str = Field("./buffer", description="Folder of an embedded PostgreSQL, or a postgresql:// URL.")
    segments: str | None = Field(
        None, description="Folder of the Arrow segments; beside the embedded database by default."
    )
    min_free_bytes: int = Field(256 * 2**20, ge=0, description="Writers refuse to go below this much free disk.")
    listen: str | None = Field(None, description="HOST:PORT on which the embedded server also accepts TCP.")


class TasksetConfig(Section):
    name: str = Field(description="Name of the taskset, unique in a buffer.")
    source: str = Field(
        description="`reasoning_gym:NAME`, a .jsonl, .csv or .parquet file, or a generator `./file.py:function`."
    )
    args: dict[str, Any] = Field(default_factory=dict, description="Arguments of a generator.")
    split: Literal["train", "validation", "test"] | None = Field(
        None, description="Take this share of the source only; shares are disjoint by a hash of each task's split key."
    )
    split_shares: tuple[float, float, float] = Field(
        (0.8, 0.1, 0.1), description="Shares of train, validation and test in the hash space; they must add up to 1."
    )
    limit: int | None = Field(None, gt=0, description="At most this many tasks.")
    prompt: str = Field("question", description="Column with the prompt.")
    answer: str = Field("answer", description="Column with the answer; it may be missing from the source.")
    weight: float = Field(1.0, gt=0, description="Share of this taskset among those a run trains on.")

    @field_validator("split_shares")
    @classmethod
    def _shares_add_up(cls, shares: tuple[float, float, float]) -> tuple[float, float, float]:
        if min(shares) < 0 or abs(sum(shares) - 1) > 1e-9:
            raise ValueError(
                f"shares of train, validation and test must not be negative and must add up to 1, not {sum(shares):g}"
            )
        return shares


class SelectorConfig(Section):
    model_config = ConfigDict(extra="allow", frozen=True)

    type: str = Field("shuffle", description="sequential, shuffle, or your own by path; other keys are its arguments.")

    @property
    def args(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class SamplingConfig(Section):
    order: Literal["fifo"] = Field("fifo", description="Which ready groups are drawn first.")
    max_staleness: int = Field(
        4, ge=0, description="Oldest policy a drawn group may come from, in trainer steps; older groups age out."
    )
    max_times_sampled: int = Field(1, ge=1, description="How often one group may be drawn in one history.")


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
