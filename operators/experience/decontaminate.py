"""Drop rows that contain what the policy will be evaluated on.

    - decontaminate: {against: [gsm8k_test.parquet], against_column: question}
    - decontaminate: {against: [test.jsonl], columns: [prompt, response], n: 8, max_share: 0.5}
    - decontaminate: {against: ["taskset:gsm8k_test"]}

A row is contaminated by word n-grams that it shares with a text of the evaluation set. With `max_share: 0` one is enough, which with n = 13 is
about the rule of GPT-3 (arXiv 2005.14165, appendix C); n = 8 and `max_share: 0.5` is close to that of Tülu 3 (arXiv 2411.15124, section 3.2). A text of fewer
than n words is contaminated where all of its words, in order, are an evaluation text of as few words. Words are compared in lower case and
without punctuation. The reason names the text of the evaluation set: its file, its row (from 1), and how it begins.
`taskset:NAME` is a set in the buffer, with `prompt` and `answer` as columns; a file is part of the pipeline's version by its content, a set by its name.

Prompts of a template share the template: raise n or `max_share` until what is dropped is what should be (`rft pipeline preview`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field

from operators.base import Operator, StageConfig, StageContext, StageOutcome
from operators.sql import reference_files
from operators.text.ngrams import Hashes, Rows, ngrams
from rftdata.errors import ConfigError

_SHOWN = 60
_TASKSET = "taskset:"


@dataclass(frozen=True)
class _Index:
    """N-grams of the evaluation set in ascending order, the text each was first seen in, and what to call the texts."""

    hashes: Hashes
    texts: Rows
    names: list[str]

    def look_up(self, hashes: Hashes) -> Rows:
        """The text of each n-gram, −1 where none has it."""
        if not len(self.hashes):
            return np.full(len(hashes), -1)
        place = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        return np.where(self.hashes[place] == hashes, self.texts[place], -1)


class Decontaminate(Operator, revision=1):
    """Drops each row in which a larger share than `max_share` of the n-grams of one of its `columns` is in the evaluation set."""

    class Config(StageConfig):
        """What to compare with what."""

        against: tuple[str, ...] = Field(
            min_length=1, description="Files of the evaluation set (.parquet, .csv, .jsonl), or `taskset:NAME`."
        )
        against_column: str = Field("prompt", description="Their text column.")
        columns: tuple[str, ...] = Field(("prompt",), min_length=1, description="Text columns of the batch.")
        n: int = Field(13, ge=1, le=50, description="Words in an n-gram; 8 to 13 are usual.")
        max_share: float = Field(
            0.0, ge=0, lt=1, description="Greatest share of a text's n-grams that may be in the evaluation set."
        )

    rowwise = True
    prepare_timeout_s = None  # an evaluation set may be large

    def __init__(self, config: StageConfig) -> None:
        super().__init__(config)
        self.reads = frozenset(self.config.columns)
        self._index: _Index | None = None

    def validate_schema(self, schema: pa.Schema) -> pa.Schema:
        for file in self.config.against:
            if not file.startswith(_TASKSET):
                reference_files.resolve(self.base_dir, file)
        return super().validate_schema(schema)

    def spec(self) -> dict[str, Any]:
        files = {file: reference_files.digest((self.base_dir / file).resolve()) for file in self.config.against}
        return {**super().spec(), "against": files}

    def prepare(self, context: StageContext) -> None:
        if self._index is None:
            self._index = self._read(context)

    def close(self) -> None:
        self._index = None

    def _read(self, context: StageContext) -> _Index:
        column, parts, names = self.config.against_column, [], []
        for file in self.config.against:
            table = self._table(file, context)
            if column not in table.column_names:
                raise ConfigError(
                    f"{file} has no column {column!r}",
                    allowed=", ".join(table.column_names),
                    todo="name it in against_column",
                )
            texts = _texts(file, column, table[column])
            names += [f"{file} row {row}: {_shown(text)}" for row, text in enumerate(texts.to_pylist(), start=1)]
            parts.append(texts)
        hashes, texts, _ = _ngrams_or_whole(pa.chunked_array(parts, pa.string()).combine_chunks(), self.config.n)
        hashes, first = np.unique(hashes, return_index=True)
        return _Index(hashes, texts[first], names)

    def _table(self, file: str, context: StageContext) -> pa.Table:
        if not file.startswith(_TASKSET):
            return reference_files.read(reference_files.resolve(self.base_dir, file))
        if context.read_taskset is None:
            raise ConfigError("there is no buffer here to read a taskset from", value=file, todo="name a file instead")
        return context.read_taskset(file.removeprefix(_TASKSET))

    def apply(self, table: pa.Table) -> StageOutcome:
        if self._index is None:
            self.prepare(StageContext())
        reasons: list[str | None] = [None] * table.num_rows
        for name in self.config.columns:
            for row, reason in self._found(name, table[name].combine_chunks()).items():
                reasons[row] = reasons[row] or reason
        return StageOutcome(pa.array(reasons, pa.string()))

    def _found(self, name: str, texts: pa.Array) -> dict[int, str]:
        """Row -> why it is contaminated."""
        assert self._index is not None
        hashes, rows, whole = _ngrams_or_whole(texts, self.config.n)
        sources = self._index.look_up(hashes)
        hit = sources >= 0
        if not hit.any():
            return {}
        total = np.bincount(rows, minlength=len(texts))
        hits = np.bincount(rows[hit], minlength=len(texts))
        contaminated = np.flatnonzero(hits > self.config.max_share * total)
        first = {int(row): int(source) for row, source in zip(rows[hit][::-1], sources[hit][::-1])}
        reasons = {}
        for row in contaminated.tolist():
            some = f"{hits[row]} of {total[row]} {self.config.n}-grams of {name} are"
            reasons[row] = f"{f'all of {name} is' if row in whole else some} in {self._index.names[first[row]]}"
        return reasons


def _texts(file: str, column: str, values: pa.ChunkedArray) -> pa.ChunkedArray:
    try:
        return values.cast(pa.string())
    except pa.ArrowException as error:
        raise ConfigError(
            f"the column {column!r} of {file} holds no texts",
            value=str(values.type),
            todo="name another in against_column",
        ) from error


def _ngrams_or_whole(texts: pa.Array, n: int) -> tuple[Hashes, Rows, frozenset[int]]:
    """The n-grams of each text; of a text of fewer words all of them as one, marked by their number. Third: which those are."""
    hashes, rows = ngrams(texts, n)
    short = np.flatnonzero(np.bincount(rows, minlength=len(texts)) == 0)
    found: list[tuple[npt.NDArray[np.uint64], Rows]] = [(hashes, rows)]
    wanted = texts.take(pa.array(short))
    for length in range(1, n) if len(short) else ():
        values, of = ngrams(wanted, length)
        single = np.bincount(of, minlength=len(short))[of] == 1
        found.append((values[single] ^ np.uint64(length), short[of[single]]))
    hashes, rows = (np.concatenate(parts) for parts in zip(*found))
    return hashes, rows, frozenset(short.tolist())


def _shown(text: str | None) -> str:
    words = " ".join((text or "").split())
    return words if len(words) <= _SHOWN else f"{words[: _SHOWN - 1]}…"
