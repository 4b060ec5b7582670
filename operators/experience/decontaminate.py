"""Drop rows that contain texts on which the policy will be evaluated.

    - decontaminate: {against: [gsm8k_test.parquet], against_column: question}
    - decontaminate: {against: [test.jsonl], columns: [prompt, response], n: 8, max_share: 0.5}
    - decontaminate: {against: ["taskset:gsm8k_test"]}

A row is contaminated if it shares word n-grams with a text of the evaluation set. With `max_share: 0` one n-gram is enough, which with n = 13 is
about the rule of GPT-3 (arXiv 2005.14165, appendix C); n = 8 and `max_share: 0.5` is close to that of Tülu 3 (arXiv 2411.15124, section 3.2). A text
of fewer than n words is contaminated if all its words, in order, are an evaluation text of the same length. Words are compared in lower case
and without punctuation. The reason names the text of the evaluation set: its file, its row (from 1), and its beginning.
`taskset:NAME` is a set in the buffer, with `prompt` and `answer` as columns. The pipeline's version includes a file's content, but only a set's name.

Prompts from one template share the template. Raise n or `max_share` until only contaminated rows are dropped (check with `rft pipeline preview`).
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
    """Sorted n-grams of the evaluation set, the text in which each appears first, and the texts' names for reasons."""

    hashes: Hashes
    texts: Rows
    names: list[str]

    def look_up(self, hashes: Hashes) -> Rows:
        """Return the text of each n-gram, −1 where no text has it."""
        if not len(self.hashes):
            return np.full(len(hashes), -1)
        place = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        return np.where(self.hashes[place] == hashes, self.texts[place], -1)


class Decontaminate(Operator, revision=1):
    """Drops each row in which a larger share than `max_share` of the n-grams of one of its `columns` is in the evaluation set."""

    class Config(StageConfig):
        """What is compared with what."""

        against: tuple[str, ...] = Field(
            min_length=1, description="Files of the evaluation set (.parquet, .csv, .jsonl), or `taskset:NAME`."
        )
        against_column: str = Field("prompt", description="Text column of these files or sets.")
        columns: tuple[str, ...] = Field(("prompt",), min_length=1, description="Text columns of the batch.")
        n: int = Field(13, ge=1, le=50, description="Words in an n-gram; 8 to 13 are usual.")
        max_share: float = Field(
            0.0, ge=0, lt=1, description="Largest share of a text's n-grams that may be in the evaluation set."
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
            names += [f"{file} row {row}: {_excerpt(text)}" for row, text in enumerate(texts.to_pylist(), start=1)]
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
            for row, reason in self._contaminated_rows(name, table[name].combine_chunks()).items():
                reasons[row] = reasons[row] or reason
        return StageOutcome(pa.array(reasons, pa.string()))

    def _contaminated_rows(self, name: str, texts: pa.Array) -> dict[int, str]:
        """Return row -> why it is contaminated."""
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
            f"the column {column!r} of {file} does not contain texts",
            value=str(values.type),
            todo="name another in against_column",
        ) from error


def _ngrams_or_whole(texts: pa.Array, n: int) -> tuple[Hashes, Rows, frozenset[int]]:
    """Return the n-grams of each text; a shorter text is a single one, marked by its number of words. Third: the rows of short texts."""
    hashes, rows = ngrams(texts, n)
    short = np.flatnonzero(np.bincount(rows, minlength=len(texts)) == 0)
    parts: list[tuple[npt.NDArray[np.uint64], Rows]] = [(hashes, rows)]
    wanted = texts.take(pa.array(short))
    for length in range(1, n) if len(short) else ():
        values, of = ngrams(wanted, length)
        single = np.bincount(of, minlength=len(short))[of] == 1
        parts.append((values[single] ^ np.uint64(length), short[of[single]]))
    hashes, rows = (np.concatenate(arrays) for arrays in zip(*parts))
    return hashes, rows, frozenset(short.tolist())


def _excerpt(text: str | None) -> str:
    words = " ".join((text or "").split())
    return words if len(words) <= _SHOWN else f"{words[: _SHOWN - 1]}…"
