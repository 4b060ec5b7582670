from __future__ import annotations
from pathlib import Path
def resolve_model(path: str, cache_dir: Path | None = None) -> Path:
    return Path(path)
