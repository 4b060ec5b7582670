"""Configuration of a model that workflows ask besides the policy."""

from __future__ import annotations

from pydantic import Field, model_validator

from operators.llm.endpoint import BudgetConfig, Chat, EndpointConfig
from rftdata.config import Section
from rftdata.errors import ConfigError


class OtherModelConfig(Section):
    """A model behind an OpenAI-compatible server. It is not trained."""

    endpoint: EndpointConfig = Field(description="The server: url, model, and further keys of an endpoint.")
    max_tokens: int = Field(512, ge=1, description="Longest answer, in tokens.")
    temperature: float = Field(0.0, ge=0, description="Sampling temperature; 0 takes the likeliest token.")
    seed: int | None = Field(None, description="Seed of the sampling, if the server takes one.")
    budget: BudgetConfig = Field(
        default_factory=BudgetConfig,
        description="The most that a run may spend on it, over all explorers and restarts; the run ends when it is used up. No limit by default.",
    )

    @model_validator(mode="after")
    def _budget_allows_a_call(self) -> OtherModelConfig:
        try:
            self.budget.check_allows(Chat([]), self.max_tokens)
        except ConfigError as error:  # without the key
            raise ValueError(f"{error.what}; the budget is {error.value}: raise it, or lower max_tokens") from error
        return self
