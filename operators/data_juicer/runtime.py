"""Data-Juicer in this process: importing it with its installer disabled, and creating and calling its operators.

Data-Juicer installs missing packages at run time and has no switch for that. Its installer is disabled before anything else of it is
used. Some operators start pip, mim or git themselves, so such commands are refused while an operator is created or called. A missing
package is a `PluginError` that names what to install. Python's and NumPy's global random generators are seeded around each call and
restored after it, so that operators that draw random numbers are repeatable; these calls run one at a time. Operators that only read a
text, or call an endpoint, are called without seeding.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import logging
import random
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from operators.data_juicer.catalogue import PACKAGE
from rftdata.errors import ConfigError, OperatorError, PluginError

STATS, META, BATCH_META, CONTEXT = "__dj__stats__", "__dj__meta__", "__dj__batch_meta__", "__dj__context__"
ROW = "__rft_row__"
SEED = 0
_TOKENIZER = "pretrained_model_name_or_path"
_NO_TOKENIZER = "Failed to initialize the processor"

Samples = dict[str, list[Any]]

_TURN = threading.RLock()
_INSTALLS = re.compile(
    r"\b(?:pip3?|uv|mim|conda|mamba|apt|apt-get|yum|npm)\b.*?\b(?:install|uninstall|sync|add)\b(?P<what>.*)|\bgit clone (?P<url>\S+)|setup\.py"
)
_calls = 0
"""Number of operators being created or called now, over all threads."""


class MissingPackageError(ImportError):
    """Raised in place of Data-Juicer's run-time installation."""


def make_operator(name: str, arguments: Mapping[str, Any]) -> Any:
    """Create a Data-Juicer operator in this process.

    Raises:
        PluginError: Data-Juicer or a package that the operator needs is missing.
        ConfigError: Data-Juicer refuses the arguments.
    """
    registry = _registry()
    with missing_package_named():
        try:
            # One process: batches are small, and our own workers provide the parallelism.
            return registry[name](**{"num_proc": 1, **arguments})
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(f"Data-Juicer refuses the arguments of {name}: {error}", value=dict(arguments)) from error


def make_aggregator(name: str, arguments: Mapping[str, Any], model_path: str | None) -> Any:
    """Create an aggregator with a tokenizer to count tokens: its model's, else the run's, unless `model_params` names one.

    Raises:
        PluginError, ConfigError: as `make_operator`.
    """
    op = make_operator(name, arguments)
    if _has_tokenizer(op):
        return op
    if model_path is None:
        raise ConfigError(
            f"{name} finds no tokenizer for its model",
            value=arguments.get("api_model"),
            todo="name one: model_params: {processor_config: {pretrained_model_name_or_path: FOLDER}}",
        )
    params = {**(arguments.get("model_params") or {}), "processor_config": {_TOKENIZER: model_path}}
    return make_operator(name, {**arguments, "model_params": params})


def _has_tokenizer(op: Any) -> bool:
    """Return whether an operator that calls an endpoint can count tokens; opens its model to find out."""
    from data_juicer.utils.model_utils import get_model

    try:
        with missing_package_named():
            get_model(op.model_key)
    except ValueError as error:
        if _NO_TOKENIZER not in str(error):
            raise
        return False
    return True


@functools.cache
def _registry() -> Mapping[str, Callable[..., Any]]:
    """Return Data-Juicer's registry, with its installer disabled and its log and progress bars silenced."""
    try:
        from data_juicer.utils.lazy_loader import LazyLoader
    except ImportError as error:
        raise PluginError(
            f"Data-Juicer does not import: {error}", todo="pip install 'rftdata[train]', which brings py-data-juicer"
        ) from error
    sys.addaudithook(_refuse_to_start)
    # Disabled before the operators are imported, since some check for packages at import.
    LazyLoader._install_package = staticmethod(_refuse_to_install)
    with _logging_as_it_is():
        operators = importlib.import_module("data_juicer.ops")
    from datasets import disable_progress_bars
    from loguru import logger

    logger.disable("data_juicer")
    disable_progress_bars()
    _without_access_log()
    modules: Mapping[str, Callable[..., Any]] = operators.OPERATORS.modules
    return modules


@contextlib.contextmanager
def _logging_as_it_is() -> Iterator[None]:
    """Restore the logging setup: some operators set INFO for the whole process at import, so every request would print a line."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def _without_access_log() -> None:
    """Turn names of statistics into plain attributes.

    Every use of `StatsKeys.text_len` walks the stack to log its caller, for a report that is not used here. This is the larger part of
    the cost of a cheap filter.
    """
    from data_juicer.utils.constant import StatsKeys, StatsKeysConstant

    for name, value in vars(StatsKeysConstant).items():
        if not name.startswith("_"):
            setattr(StatsKeys, name, value)


def _refuse_to_install(package: str, pip_args: object = None) -> None:
    raise MissingPackageError(package)


def _refuse_to_start(event: str, args: tuple[Any, ...]) -> None:
    """Refuse commands that install something while an operator is active. An audit hook, which cannot be removed."""
    if not _calls or event not in ("subprocess.Popen", "os.system"):
        return
    command = args[1] if event == "subprocess.Popen" else args[0]
    parts = [command] if isinstance(command, str | bytes) else list(command)
    line = " ".join(part.decode() if isinstance(part, bytes) else str(part) for part in parts)
    match = _INSTALLS.search(line)
    if match is not None:
        named = match["url"] or next((word for word in (match["what"] or "").split() if not word.startswith("-")), line)
        raise MissingPackageError(named)


def missing_package(error: BaseException | None) -> PluginError | None:
    """Return the error for a missing package among the causes of `error`, if there is one."""
    seen = error
    while seen is not None:
        if isinstance(seen, MissingPackageError):
            package = str(seen)
            extras = _extras_with(package)
            beside = (
                f"; part of py-data-juicer[{extras[0]}], whose other pins differ from ours: install it alone"
                if extras
                else ""
            )
            return PluginError(
                f"it needs the package {package}, which is not installed", todo=f"pip install '{package}'{beside}"
            )
        seen = seen.__cause__ or seen.__context__
    return None


def _extras_with(package: str) -> list[str]:
    """Return Data-Juicer's extras that name a package, except `all`."""
    extras = []
    for requirement in importlib.metadata.requires(PACKAGE) or []:
        name, extra = re.match(r"[\w.-]+", requirement), re.search(r"extra == '([\w-]+)'", requirement)
        if name and extra and name[0].lower() == package.lower() and extra[1] not in ("all", "dev"):
            extras.append(extra[1])
    return sorted(extras)


@contextlib.contextmanager
def missing_package_named() -> Iterator[None]:
    """Refuse any attempt to install a package, with an error that names it."""
    global _calls
    with _TURN:
        _calls += 1
    try:
        yield
    except Exception as error:
        missing = missing_package(error)
        if missing is None:
            raise
        raise missing from error
    finally:
        with _TURN:
            _calls -= 1


@contextlib.contextmanager
def repeatable() -> Iterator[None]:
    """Run one call at a time, from seeded generators whose state is restored afterwards."""
    with _TURN:
        before, before_numpy = random.getstate(), np.random.get_state()
        random.seed(SEED)
        np.random.seed(SEED)
        try:
            yield
        finally:
            random.setstate(before)
            np.random.set_state(before_numpy)


def compute_stats(
    op: Any, samples: Samples, num_samples: int, earlier_stats: Sequence[dict[str, Any]] | None = None
) -> Samples:
    """Return the samples with a filter's statistics under `STATS`."""
    samples = {
        **samples,
        STATS: list(earlier_stats) if earlier_stats is not None else [{} for _ in range(num_samples)],
        META: samples.get(META) or [{} for _ in range(num_samples)],
    }
    if op.is_batched_op():
        computed: Samples = op.compute_stats_batched(samples)
        return computed
    # Not the base class's batched form, which hides all columns but the statistics from process_single.
    rows = [op.compute_stats_single(row) for row in rows_of(samples, num_samples)]
    return {**samples, STATS: [row[STATS] for row in rows]}


def keeps(op: Any, samples: Samples, num_samples: int) -> list[bool]:
    """Return a filter's decisions on its statistics."""
    if op.is_batched_op():
        kept = list(op.process_batched(samples))
    else:
        kept = [op.process_single(row) for row in rows_of(samples, num_samples)]
    if len(kept) != num_samples:
        raise OperatorError(f"decided on {len(kept)} rows of {num_samples}")
    return kept


def process(op: Any, samples: Samples, num_samples: int, *, tags: bool) -> Samples:
    """Run a mapper on the samples; it may return more or fewer. `tags`: whether to add the column of tags that it expects."""
    arguments: Samples = {key: list(values) for key, values in samples.items()}
    if tags and META not in arguments:
        arguments[META] = [{} for _ in range(num_samples)]
    if op.is_batched_op():
        processed: Samples = op.process_batched(arguments)
        return processed
    rows = [op.process_single(row) for row in rows_of(arguments, num_samples)]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def select(op: Any, kind: str, samples: Samples, num_samples: int) -> tuple[set[int], Samples]:
    """Return which samples a deduplicator or selector keeps, and the samples as it changed them.

    These kinds take a data set and return a smaller one, so rows are numbered to see which remain.
    """
    from data_juicer.core.data import NestedDataset
    from datasets import Dataset

    columns: Samples = dict(samples)
    if kind == "deduplicator":
        # The number comes first, because a row that only has lists of one image each would be taken for a batch.
        rows = [dict(op.compute_hash({ROW: number, **row})) for number, row in enumerate(rows_of(samples, num_samples))]
        # The hashes are computed, so the data set need not contain the images.
        columns = {key: [row[key] for row in rows] for key in rows[0] if key not in (ROW, "image_bytes")}
    dataset = NestedDataset(Dataset.from_dict({**columns, ROW: list(range(num_samples))}))
    result = op.process(dataset)
    left = (result[0] if isinstance(result, tuple) else result).to_dict()
    return set(left[ROW]), left


def rows_of(samples: Samples, num_samples: int) -> Iterator[dict[str, Any]]:
    """Yield the samples one by one."""
    for position in range(num_samples):
        yield {key: values[position] for key, values in samples.items()}
