"""Configuration of the teacher whose log-probabilities are stored with rollouts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from operators.llm.endpoint import EndpointConfig
from rftdata.config import Section


class TeacherConfig(Section):
    """The folder or endpoint of a teacher. YAML may also give the path alone."""

    path: str | None = Field(
        None, description="Folder of a model, or a Hugging Face id; it is computed in the explorer's process."
    )
    endpoint: EndpointConfig | None = Field(
        None,
        description="A server that returns log-probabilities of prompts (vLLM): url, model, and further keys of an endpoint.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Type of the weights of `path`; auto uses that of the model's config.json."
    )
    max_tokens_per_batch: int = Field(
        4096,
        ge=1,
        description="Tokens that `path` computes at a time, padding included; a longer response is computed alone.",
    )

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_of_two(self) -> TeacherConfig:
        if (self.path is None) == (self.endpoint is None):
            raise ValueError("a teacher has either path (a model) or endpoint (a server)")
        return self
