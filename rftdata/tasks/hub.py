"""Rows of a data set of the Hugging Face hub (`hf:OWNER/NAME`), or of its local cache if the hub is unavailable.

`args`: `config` (the data set's configuration), `split` (train by default) and `revision`. A private data set needs the token in
the hub's own way (HF_TOKEN or `hf auth login`); it is never part of a configuration.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from rftdata.config import TasksetConfig
from rftdata.errors import TaskSourceError

_PREFIX = "hf:"
_ARGS = ("config", "split", "revision")
_BATCH_ROWS = 4096
_PATIENCE_S = 10.0


def is_hub(source: str) -> bool:
    return source.startswith(_PREFIX)


def revision(config: TasksetConfig) -> str | None:
    """Return the commit that the hub serves now; None if it cannot be reached.

    Raises:
        TaskSourceError: the library datasets is missing, or an argument does not exist.
    """
    name = _name(config)
    _datasets()
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        found = HfApi().dataset_info(name, revision=config.args.get("revision"), timeout=_PATIENCE_S)
    except Exception:  # noqa: BLE001 - the network, the proxy, a wrong name: the local cache decides
        return None
    return found.sha


def rows(config: TasksetConfig) -> Iterator[dict[str, Any]]:
    """Yield its rows, from the files that the library datasets caches on this machine and downloads if missing.

    Raises:
        TaskSourceError: neither the hub nor the cache has it, or the configuration or split does not exist.
    """
    name = _name(config)
    datasets = _datasets()
    commit = revision(config)
    try:
        # If the hub did not answer, use the local cache at once instead of waiting.
        with _offline(datasets) if commit is None else contextlib.nullcontext():
            found = datasets.load_dataset(
                name,
                config.args.get("config"),
                split=config.args.get("split", "train"),
                revision=commit or config.args.get("revision"),
            )
    except Exception as error:
        reason = " ".join(str(error).split())[:400]
        away = " (the hub does not answer, or has no such data set)" if commit is None else ""
        raise TaskSourceError(
            f"the data set of the taskset {config.name!r} is not available from the Hugging Face hub{away}: "
            f"{type(error).__name__}: {reason}",
            value=config.source,
            allowed="hf:OWNER/NAME with args config, split, revision",
            todo="correct it, or download it on a machine with network access and name its folder (Dataset.save_to_disk) as the source",
        ) from error
    for table in found.with_format("arrow").iter(_BATCH_ROWS):
        yield from table.to_pylist()


def _name(config: TasksetConfig) -> str:
    name = config.source.removeprefix(_PREFIX).strip()
    unknown = sorted(set(config.args) - set(_ARGS))
    if unknown:
        raise TaskSourceError(
            f"a data set of the hub has no argument {unknown[0]!r}",
            allowed=", ".join(_ARGS),
            todo=f"correct args of the taskset {config.name!r}",
        )
    if not name or name.count("/") > 1:
        raise TaskSourceError(
            f"the taskset {config.name!r} does not name a data set of the hub",
            value=config.source,
            allowed="hf:OWNER/NAME",
        )
    return name


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise TaskSourceError(
            "data sets of the Hugging Face hub need the library datasets", todo="pip install 'rftdata[hf]'"
        ) from error
    datasets.disable_progress_bars()
    return datasets


@contextlib.contextmanager
def _offline(datasets: Any) -> Iterator[None]:
    """Make both libraries use their caches without the network."""
    from huggingface_hub import constants

    before = (datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE)
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before
