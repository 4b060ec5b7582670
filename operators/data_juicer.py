"""Any Data-Juicer operator by its own name as a stage, on `response` (of tasks, on `prompt`) unless `text_key`
names another column.

    - text_length_filter: {min_len: 10, max_len: 2000}
    - clean_links_mapper: {}
    - document_deduplicator: {lowercase: true, text_key: prompt}

The operator's own methods are called on the batch as it stands, without JSON or a Hugging Face data set in between.
A filter keeps or drops, with its statistic in the reason. A mapper changes columns for the later stages only: what was
sampled stays as it is in the buffer. A deduplicator or selector decides within the batch it is given. Groupers,
aggregators and pipelines make new rows and are refused.

Data-Juicer is imported when the stage is prepared. Its habit of installing packages at run time is switched off: a
missing one is a `PluginError` that says what to install. Python's and NumPy's global generators are seeded around
each call and restored after it, so that operators that draw random numbers are repeatable.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from operators.base import Operator, StageConfig, StageContext, StageOutcome, unknown_key
from operators.data_juicer_index import index
from rftdata.errors import ConfigError, OperatorError, PluginError

STATS, META, CONTEXT = "__dj__stats__", "__dj__meta__", "__dj__context__"
ROW = "__rft_row__"
ROW_MAKING_KINDS = ("grouper", "aggregator", "pipeline")
SEED = 0

Samples = dict[str, list[Any]]


class MissingPackageError(ImportError):
    """Raised in place of Data-Juicer's run-time installation."""


class DataJuicerStage(Operator):
    """One Data-Juicer operator; see the module's text for what each kind does."""

    def __init__(self, name: str, args: object) -> None:
        super().__init__(StageConfig())
        if not isinstance(args, Mapping | None):
            raise ConfigError("its arguments are not a mapping", value=args)
        self.name = name
        self.args: dict[str, Any] = dict(args or {})
        self.indexed = index()[name]
        if self.indexed.kind in ROW_MAKING_KINDS or name.startswith("ray_"):
            raise PluginError(
                f"the Data-Juicer operator {name!r} is a {self.indexed.kind} that cannot be a stage here",
                allowed="filters, mappers, deduplicators (not ray_…) and selectors",
                todo="run it in a Data-Juicer job of its own before the tasks are loaded",
            )
        own = self.indexed.arguments()
        for key in self.args if own is not None else ():
            if own is not None and key not in own and key not in self.indexed.general_arguments():
                raise unknown_key(str(key), [*own, "text_key"])
        self.text_key: str = self.args.get("text_key", "response")
        self.reads = frozenset({self.text_key}) if self.indexed.reads_only_text else None
        self.writes = None if self.indexed.kind == "mapper" else frozenset()
        self._op: Any = None

    def spec(self) -> dict[str, Any]:
        return {"args": self.args, "py-data-juicer": importlib.metadata.version("py-data-juicer")}

    def validate_schema(self, schema: pa.Schema) -> pa.Schema:
        if "text_key" not in self.args and self.text_key not in schema.names and "prompt" in schema.names:
            self.text_key = "prompt"  # tasks have no response
            self.reads = frozenset({"prompt"}) if self.reads is not None else None
        if self.text_key not in schema.names:
            raise ConfigError(
                "text_key is not a column of the batch", value=self.text_key, allowed=", ".join(schema.names)
            )
        if not pa.types.is_string(schema.field(self.text_key).type):
            raise ConfigError("text_key is not a column of text", value=self.text_key)
        return schema

    def prepare(self, context: StageContext) -> None:
        if self._op is not None:
            return
        registry = _import_data_juicer()
        with _missing_package_named(self.name):
            try:
                # One process: batches are small, and workers of ours are what runs in parallel.
                op = registry[self.name](**{"num_proc": 1, **self.args, "text_key": self.text_key})
            except (TypeError, ValueError, AssertionError) as error:
                raise ConfigError(
                    f"Data-Juicer refuses the arguments of {self.name}: {error}", value=self.args
                ) from error
        self._op = op
        self._probe()

    def _probe(self) -> None:
        """Run one line of text through, so that a missing package is found before the first batch."""
        if not self.indexed.reads_only_text or "api_" in self.indexed.path.read_text():
            return
        try:
            self._decide({self.text_key: ["Two plain sentences. This is the second one."]})
        except Exception as error:
            # Whatever else a line of plain text provokes says nothing about real batches.
            missing = _missing_package(error)
            if missing is not None:
                raise missing from error

    def apply(self, table: pa.Table) -> StageOutcome:
        if self._op is None:
            self.prepare(StageContext())
        columns = [self.text_key] if self.reads is not None else table.column_names
        readable = pc.is_valid(table[self.text_key].combine_chunks())
        samples: Samples = table.select(columns).filter(readable).to_pydict()
        where = np.flatnonzero(readable.to_numpy(zero_copy_only=False))
        missing = f"{self.text_key} is null, which {self.name} cannot read"
        # A mapper has nothing to change in a null text; the others would have to judge it and cannot.
        reasons: list[str | None] = [None if self.indexed.kind == "mapper" else missing] * table.num_rows
        if not len(where):
            return StageOutcome(pa.array(reasons, pa.string()))
        with _missing_package_named(self.name), _repeatable():
            decided, changed = self._decide(samples)
        for position, reason in zip(where, decided):
            reasons[position] = reason
        return StageOutcome(pa.array(reasons, pa.string()), _changed_columns(table, where, changed))

    def _decide(self, samples: Samples) -> tuple[list[str | None], Samples]:
        """One reason or None per sample, and the columns that a mapper changed."""
        num_samples = len(samples[self.text_key])
        if self.indexed.kind == "filter":
            return self._filter(samples, num_samples), {}
        if self.indexed.kind == "mapper":
            return [None] * num_samples, self._map(samples, num_samples)
        return self._select(samples, num_samples), {}

    def _filter(self, samples: Samples, num_samples: int) -> list[str | None]:
        samples = {**samples, STATS: [{} for _ in range(num_samples)], META: [{} for _ in range(num_samples)]}
        if self._op.is_batched_op():
            samples = self._op.compute_stats_batched(samples)
            kept = list(self._op.process_batched(samples))
        else:
            # Not the base class's batched form: it hides all columns but the statistics from process_single.
            rows = [self._op.compute_stats_single(row) for row in _rows(samples, num_samples)]
            kept = [self._op.process_single(row) for row in rows]
            samples[STATS] = [row[STATS] for row in rows]
        if len(kept) != num_samples:
            raise OperatorError(f"{self.name} decided on {len(kept)} rows of {num_samples}")
        return [None if keep else self._filter_reason(stats) for keep, stats in zip(kept, samples[STATS])]

    def _filter_reason(self, stats: Mapping[str, Any]) -> str:
        """The statistic against the bound it broke, as in `text_len 3 < min_len 10`."""
        shown = {key: value for key, value in stats.items() if isinstance(value, int | float | str)}
        bounds = {
            key: value
            for key, value in vars(self._op).items()
            if key.startswith(("min_", "max_")) and isinstance(value, int | float) and not isinstance(value, bool)
        }
        numbers = {key: value for key, value in shown.items() if not isinstance(value, str)}
        if len(shown) == len(numbers) == 1:
            ((statistic, value),) = numbers.items()
            for bound, limit in bounds.items():
                if bound.startswith("min_") and value < limit:
                    return f"{statistic} {value:g} < {bound} {limit:g}"
                if bound.startswith("max_") and value > limit:
                    return f"{statistic} {value:g} > {bound} {limit:g}"
        found = ", ".join(f"{key} is {value}" for key, value in shown.items())
        wanted = ", ".join(f"{key} {value}" for key, value in (self.args or bounds).items() if key != "text_key")
        return f"{self.name}: {found or 'its condition is false'}" + (f" ({wanted})" if wanted else "")

    def _map(self, samples: Samples, num_samples: int) -> Samples:
        given = {**{key: list(values) for key, values in samples.items()}, META: [{} for _ in range(num_samples)]}
        if self._op.is_batched_op():
            result = self._op.process_batched(given)
        else:
            rows = [self._op.process_single(row) for row in _rows(given, num_samples)]
            result = {key: [row.get(key) for row in rows] for key in samples}
        if len(result[self.text_key]) != num_samples:
            raise OperatorError(
                f"{self.name} made {len(result[self.text_key])} rows of {num_samples}",
                allowed="mappers that give one row for one row",
                todo="use it on tasks, in a Data-Juicer job of its own",
            )
        return {key: list(result[key]) for key in samples if key in result and list(result[key]) != samples[key]}

    def _select(self, samples: Samples, num_samples: int) -> list[str | None]:
        """These kinds take a data set and give back a smaller one: mark the rows, see which come back."""
        from data_juicer.core.data import NestedDataset
        from datasets import Dataset

        reason = f"not selected by {self.name}"
        columns = dict(samples)
        if self.indexed.kind == "deduplicator":
            reason = f"duplicate of an earlier row of the batch ({self.name})"
            rows = [dict(self._op.compute_hash(row)) for row in _rows(samples, num_samples)]
            columns = {key: [row[key] for row in rows] for key in rows[0]}
        dataset = NestedDataset(Dataset.from_dict({**columns, ROW: list(range(num_samples))}))
        result = self._op.process(dataset)
        remaining = set((result[0] if isinstance(result, tuple) else result)[ROW])
        return [None if row in remaining else reason for row in range(num_samples)]


def _rows(samples: Samples, num_samples: int) -> Iterator[dict[str, Any]]:
    for position in range(num_samples):
        yield {key: values[position] for key, values in samples.items()}


def _changed_columns(table: pa.Table, where: np.ndarray, changed: Samples) -> dict[str, pa.Array]:
    columns = {}
    for name, new_values in changed.items():
        values = table[name].to_pylist()
        for position, value in zip(where, new_values):
            values[position] = value
        columns[name] = pa.array(values, table.schema.field(name).type)
    return columns


def _import_data_juicer() -> Mapping[str, Callable[..., Any]]:
    """Data-Juicer's registry, with its installer stopped and its log and progress bars silenced."""
    try:
        from data_juicer.utils.lazy_loader import LazyLoader
    except ImportError as error:
        raise PluginError(f"Data-Juicer does not import: {error}", todo="pip install py-data-juicer") from error
    # No switch exists for this. Stopped before the operators are imported, since some check for packages at import.
    LazyLoader._install_package = staticmethod(_refuse_to_install)
    operators = importlib.import_module("data_juicer.ops")
    from datasets import disable_progress_bars
    from loguru import logger

    logger.disable("data_juicer")
    disable_progress_bars()
    registry: Mapping[str, Callable[..., Any]] = operators.OPERATORS.modules
    return registry


def _refuse_to_install(package: str, pip_args: object = None) -> None:
    raise MissingPackageError(package)


def _missing_package(error: BaseException | None) -> PluginError | None:
    """The error for the missing package that lies somewhere behind `error`, if one does."""
    seen = error
    while seen is not None:
        if isinstance(seen, MissingPackageError):
            return PluginError(f"it needs the package {seen}, which is not installed", todo=f"pip install '{seen}'")
        seen = seen.__cause__ or seen.__context__
    return None


@contextlib.contextmanager
def _missing_package_named(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        missing = _missing_package(error)
        if missing is None:
            raise
        raise missing from error


@contextlib.contextmanager
def _repeatable() -> Iterator[None]:
    before, before_numpy = random.getstate(), np.random.get_state()
    random.seed(SEED)
    np.random.seed(SEED)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(before_numpy)
