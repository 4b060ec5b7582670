"""Plug-ins by name: one `Registry` per kind turns a name in YAML into an object.

A name is looked up in this order: the built-ins of its kind, `./file.py:attr` (relative to the configuration file), the
entry points of group `rftdata.<kind>`, then as a dotted path `package.module:attr` or `package.module.attr`. Built-ins
are given as strings `module:attr`, so that using one imports only that one. A plug-in that fails to load is an error,
never a warning.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from rftdata.config_errors import did_you_mean
from rftdata.errors import PluginError
from rftdata.user_code.time_limits import LOADING_S, call

T = TypeVar("T")
Loaded = TypeVar("Loaded")

_IMPORTS = threading.RLock()  # a file may load another


@dataclass(frozen=True)
class Registry(Generic[T]):
    """The plug-ins of one kind. There is one instance per kind, in the package that it loads from.

    `T` is the type of the kind's plug-ins. It is not checked on loading, because a plug-in may be a user's own object; the code that
    calls it reports what is missing. With `Registry[object]` the caller determines the type.

    Attributes:
        kind: the kind as configurations call it (`operator`, `reward`, `selector`, …).
        builtins: name -> `module:attr`.
        loading_s: limit for importing a plug-in that is not built in, in seconds; None if the caller keeps a limit of its own.
    """

    kind: str
    builtins: Mapping[str, str]
    loading_s: float | None = LOADING_S

    def load(self, name: str, base_dir: Path | None = None) -> T:
        """Return the object that `name` refers to.

        Args:
            name: a built-in's name, an entry point's name, `./file.py:attr`, or a dotted path.
            base_dir: folder that `./` is relative to; the current folder when None.

        Raises:
            PluginError: unknown name (with the nearest known one), or a file, module or entry point that fails to load.
        """
        plugin: T = self._load(name, base_dir)
        return plugin

    def names(self) -> list[str]:
        """Return all names of the kind that need no path in YAML."""
        return sorted({*self.builtins, *_installed(self._group).names})

    @property
    def _group(self) -> str:
        return f"rftdata.{self.kind}"

    def _load(self, name: str, base_dir: Path | None) -> Any:
        if name in self.builtins:
            return _from_module(self.kind, name, self.builtins[name], None)
        if ".py:" in name or name.endswith(".py"):
            return _from_file(self.kind, name, base_dir or Path.cwd(), self.loading_s)
        for entry_point in _installed(self._group).select(name=name):
            return _from_entry_point(self.kind, name, entry_point, self.loading_s)
        if ":" in name or "." in name:
            target = name if ":" in name else ":".join(name.rsplit(".", 1))
            return _from_module(self.kind, name, target, self.loading_s)
        raise self._unknown(name)

    def _unknown(self, name: str) -> PluginError:
        names = self.names()
        own = f"for your own {self.kind} write './file.py:attr' or 'package.module:attr'"
        return PluginError(
            f"unknown {self.kind}", value=name, allowed=", ".join(names), todo=did_you_mean(name, names, own)
        )


def _installed(group: str) -> importlib.metadata.EntryPoints:
    """Return the entry points of the packages on `sys.path`; installing one changes its folder's time."""
    return _entry_points(group, tuple((folder, _changed_at(folder)) for folder in sys.path))


def _changed_at(folder: str) -> int:
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:  # sys.path may name what does not exist
        return 0


@functools.lru_cache(maxsize=64)
def _entry_points(group: str, folders: tuple[tuple[str, int], ...]) -> importlib.metadata.EntryPoints:
    # Kept, because finding them opens a file of each package: 20 ms for 250.
    return importlib.metadata.entry_points(group=group)


def _from_module(kind: str, name: str, target: str, loading_s: float | None) -> Any:
    """Import an attribute. Built-in modules have no time limit (None), since they may import large packages."""
    module_name, _, attribute = target.partition(":")

    def load_module() -> ModuleType:
        return importlib.import_module(module_name)

    try:
        what = f"the import of {module_name}"
        return getattr(_limited(load_module, loading_s, what), attribute)
    except Exception as error:
        raise PluginError(
            f"the {kind} {name!r} does not load: {type(error).__name__}: {error}",
            todo=_todo(error, f"check that `python -c 'import {module_name}'` works and that it defines {attribute!r}"),
        ) from error


def _limited(load: Callable[[], Loaded], loading_s: float | None, what: str, *, of_file: bool = False) -> Loaded:
    return load() if loading_s is None else call(load, loading_s, what, cap=of_file, loading=of_file)


def _todo(error: Exception, otherwise: str) -> str:
    """Return what to do about a plug-in that does not load."""
    if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("operators."):
        return (
            "`operators` is a package of rftdata: a folder of your own with this name cannot be imported; rename it, or name its files by path "
            "('./operators/file.py:attr')"
        )
    return otherwise


def _from_entry_point(kind: str, name: str, entry_point: importlib.metadata.EntryPoint, loading_s: float | None) -> Any:
    try:
        return _limited(entry_point.load, loading_s, f"the import of {entry_point.value}")
    except Exception as error:
        package = entry_point.dist.name if entry_point.dist else entry_point.module
        raise PluginError(
            f"the {kind} {name!r} of the package {package} does not load: {type(error).__name__}: {error}",
            todo=f"repair or remove the package; it declares {entry_point.value}",
        ) from error


def _from_file(kind: str, name: str, base_dir: Path, loading_s: float | None) -> Any:
    file_name, _, attribute = name.partition(":")
    path = (base_dir / file_name).resolve()
    if not attribute:
        raise PluginError(f"the {kind} names a file but no object in it", value=name, allowed="./file.py:attr")
    if not path.is_file():
        raise PluginError(
            f"the {kind}'s file does not exist",
            value=str(path),
            todo="correct the path; it is relative to the configuration file",
        )
    try:
        module = _limited(lambda: _import_file(path), loading_s, f"the import of {path}", of_file=True)
    except Exception as error:
        raise PluginError(
            f"the {kind} {name!r} does not load: {type(error).__name__}: {error}", todo=_todo(error, f"correct {path}")
        ) from error
    if not hasattr(module, attribute):
        public = sorted(n for n in vars(module) if not n.startswith("_"))
        raise PluginError(f"{path} has no {attribute!r}", allowed=", ".join(public), todo=f"correct the {kind}'s name")
    return getattr(module, attribute)


def _import_file(path: Path) -> ModuleType:
    # The name contains a digest of path and text: two files called reward.py are two modules, and so is an edited one.
    source = path.read_bytes()
    module_name = f"rft_plugin_{path.stem}_{hashlib.sha1(str(path).encode() + source).hexdigest()[:8]}"
    with _IMPORTS:  # another thread must not see a module that is half executed
        return sys.modules.get(module_name) or _executed(path, source, module_name)


def _executed(path: Path, source: bytes, module_name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        # Not with the loader, which would reuse compiled code of a text with the same second and size.
        exec(compile(source, str(path), "exec"), vars(module))
    except BaseException:
        del sys.modules[module_name]
        raise
    return module
