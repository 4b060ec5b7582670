"""Engine for workflows that sample nothing (demonstrations). It has the model's tokenizer and refuses to generate."""

from __future__ import annotations

from pathlib import Path

from rftcore.engines.base import Decoding, Engine, EngineConfig, Generation
from rftdata.errors import ConfigError


class NoEngine(Engine):
    """Provides the `tokenizer` only."""

    def __init__(self, model_path: str | Path, config: EngineConfig | None = None, policy_version_id: int = 0) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(str(model_path))
        self.policy_version_id = policy_version_id
        self.num_generated_tokens = 0

    async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        raise ConfigError(
            "this workflow or evaluation samples, but explorer.engine is 'none'",
            todo="set explorer.engine to vllm or transformers",
        )

    def load_weights(self, uri: str, policy_version_id: int, checksum: str | None = None) -> float:
        """Record the version; no weights are loaded."""
        self.policy_version_id = policy_version_id
        return 0.0

    def close(self) -> None:
        """Do nothing."""
