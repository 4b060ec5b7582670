"""Rollout engines by name. Importing this module imports neither torch nor vLLM."""

from __future__ import annotations

from rftcore.engines.base import Engine
from rftdata.plugins import Registry

ENGINES = Registry[type[Engine]](
    "engine",
    {
        "vllm": "rftcore.engines.vllm_engine:VllmEngine",
        "transformers": "rftcore.engines.transformers_engine:TransformersEngine",
        "none": "rftcore.engines.no_engine:NoEngine",
    },
)
