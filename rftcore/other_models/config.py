"""Configuration of a model that workflows ask besides the policy."""

from __future__ import annotations

from pydantic import Field

from operators.llm.endpoint import EndpointConfig
from rftdata.config import Section


class OtherModelConfig(Section):
    """A model behind an OpenAI-compatible server. It is not trained."""

    endpoint: EndpointConfig = Field(description="The server: url, model, and further keys of an endpoint.")
    max_tokens: int = Field(512, ge=1, description="Longest answer, in tokens.")
    temperature: float = Field(0.0, ge=0, description="Sampling temperature; 0 takes the likeliest token.")
    seed: int | None = Field(None, description="Seed of the sampling, if the server takes one.")
