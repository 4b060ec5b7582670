"""Configuration of the buffer, of task sources, selectors and sampling: what `rftdata` itself reads from a YAML file.

`config_error` says in one sentence what is wrong with any section.
"""

from __future__ import annotations

import difflib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rftdata.errors import ConfigError


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


class SourceConfig(Section):
    """What a run trains on instead of groups of its own."""

    sql: str = Field(
        pattern=r"\S",
        description="One SELECT of experience_id, or of pair_id; its result when the run is made is what the run trains on.",
    )
    pin_labels: bool = Field(
        True,
        description="Rewards count as they were when the run was made; false: as they stand when drawn, so batches may change.",
    )


class SamplingConfig(Section):
    order: Literal["fifo"] = Field("fifo", description="Which ready groups are drawn first.")
    max_staleness: int = Field(
        4, ge=0, description="Oldest policy a drawn group may come from, in trainer steps; older groups age out."
    )
    max_times_sampled: Literal[1] = Field(1, description="How often one group may be drawn in one history.")
    source: SourceConfig | None = Field(
        None, description="Train on a stored selection, {sql: SELECT …}, instead of on groups sampled by this run."
    )
    epochs: int = Field(1, ge=1, le=32767, description="How often each row of the stored selection is trained on.")

    @model_validator(mode="after")
    def _epochs_are_of_a_selection(self) -> SamplingConfig:
        if self.epochs > 1 and self.source is None:
            raise ValueError("epochs counts passes over a stored selection; set sampling.source, or remove it")
        return self


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


def config_error(error: ValidationError, section: type[BaseModel], origin: str, *, within: str = "") -> ConfigError:
    """The first thing that is wrong, and how many more there are; an unknown key names the nearest known one.

    Args:
        error: of validating `section`.
        section: the class that was validated.
        origin: where the values come from: a file, a plug-in's name.
        within: key of the section in the file; empty for the whole file.
    """
    first, *others = error.errors(include_url=False)
    where = ".".join(str(part) for part in (*filter(None, [within]), *first["loc"])) or "the file"
    more = f"; {len(others)} more after this one" if others else ""
    if first["type"] == "extra_forbidden":
        allowed = _allowed_keys(section, first["loc"][:-1])
        near = difflib.get_close_matches(str(first["loc"][-1]), allowed, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "remove the key or correct it"
        return ConfigError(
            f"{origin}: unknown key {where!r}", allowed=", ".join(allowed) or "no keys", todo=hint + more
        )
    if first["type"] == "missing":
        return ConfigError(f"{origin}: {where!r} is missing", todo="add it" + more)
    value = first["input"] if not isinstance(first["input"], dict) else None
    message = first["msg"].removeprefix("Value error, ")
    return ConfigError(f"{origin}: {where!r}: {message}", value=value, todo="correct it" + more)


def _allowed_keys(section: Any, location: tuple[int | str, ...]) -> list[str]:
    """Keys that the section at `location` within `section` accepts."""
    for part in location:
        if isinstance(part, int):
            continue
        field = section.model_fields.get(part) if hasattr(section, "model_fields") else None
        if field is None:
            return []
        section = _section_of(field.annotation)
    return sorted(section.model_fields) if hasattr(section, "model_fields") else []


def _section_of(annotation: Any) -> Any:
    if hasattr(annotation, "model_fields"):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _section_of(argument)
        if found is not None:
            return found
    return None
