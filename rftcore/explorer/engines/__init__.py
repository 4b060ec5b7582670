"""Rollout engines by name; naming one imports neither torch nor vLLM."""

from __future__ import annotations

ENGINES: dict[str, str] = {
    "vllm": "rftcore.explorer.engines.vllm_engine:VllmEngine",
    "transformers": "rftcore.explorer.engines.transformers_engine:TransformersEngine",
    "none": "rftcore.explorer.engines.no_engine:NoEngine",
}
