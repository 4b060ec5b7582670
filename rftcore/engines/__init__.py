"""Rollout engines by name; naming one imports neither torch nor vLLM."""

from __future__ import annotations

ENGINES: dict[str, str] = {
    "vllm": "rftcore.engines.vllm_engine:VllmEngine",
    "transformers": "rftcore.engines.transformers_engine:TransformersEngine",
    "none": "rftcore.engines.no_engine:NoEngine",
}
