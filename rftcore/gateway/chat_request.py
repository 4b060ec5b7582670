"""Requests for chat completions: what the endpoint accepts, and what it refuses with the name of the field.

A field is accepted if its effect is the one that OpenAI documents, or if its value asks for nothing (`presence_penalty: 0`). null counts as absent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rftcore.gateway.errors import ApiError

MAX_N = 64
MAX_STOPS = 64
_MAX_ERRORS = 100
_MAX_PARAM = 200
# Parameters of the tokenizer, which would replace the template or what it returns.
_NOT_OF_TEMPLATES = {
    *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "messages"),
    *("padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs"),
    *("tools", "truncation"),
}


def _nothing(value: Any) -> Any:
    if value:
        raise ValueError("is not supported; only a value without effect is accepted")
    return value


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TextPart(_Strict):
    """A part of a content; parts of other types are refused."""

    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], Field(fail_fast=True)]
_Nothing = Annotated[Any, AfterValidator(_nothing)]


class _Told(_Strict):
    content: Content
    name: str | None = None


class SystemMessage(_Told):
    role: Literal["system", "developer"]


class UserMessage(_Told):
    role: Literal["user"]


class FunctionCall(_Strict):
    name: str
    arguments: str


class Call(_Strict):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # of a stream; clients that put an answer together leave it in


class AssistantMessage(_Strict):
    """An answer, of this endpoint or of the program itself. The fields without support are those with which clients return answers of the endpoint."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Annotated[list[Call], Field(fail_fast=True)] | None = None
    name: str | None = None
    refusal: _Nothing = None
    annotations: _Nothing = None
    audio: _Nothing = None
    function_call: _Nothing = None


class ToolMessage(_Told):
    role: Literal["tool"]
    tool_call_id: str


ChatMessage = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(_Strict):
    name: str = Field(min_length=1)
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _has_properties(cls, parameters: dict[str, Any]) -> dict[str, Any]:
        properties = parameters.get("properties", {})
        if not isinstance(properties, dict) or not all(isinstance(each, dict) for each in properties.values()):
            raise ValueError("properties must be an object of JSON schemas")
        return parameters


class ToolSchema(_Strict):
    type: Literal["function"]
    function: Function

    @property
    def schema_for_template(self) -> dict[str, Any]:
        """The tool as chat templates expect it."""
        return {"type": "function", "function": self.function.model_dump(exclude={"strict"})}


class StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: _Nothing = None


class ChatRequest(_Strict):
    """The body of a request for a chat completion."""

    model: str
    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    tools: Annotated[list[ToolSchema], Field(fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1, le=MAX_N)
    logprobs: bool | None = None
    top_logprobs: _Nothing = None
    response_format: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Sampling has one random stream for all requests of the engine.
    seed: int | None = None
    presence_penalty: _Nothing = None
    frequency_penalty: _Nothing = None
    logit_bias: _Nothing = None
    store: _Nothing = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: list[Literal["text"]] | None = None
    # These name the caller, and have no effect on the answer.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body

    @field_validator("stop")
    @classmethod
    def _are_few(cls, stop: str | list[str] | None) -> str | list[str] | None:
        texts = [stop] if isinstance(stop, str) else stop or []
        if not all(texts) or len(texts) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} texts are allowed, none of them empty")
        return stop

    @field_validator("chat_template_kwargs")
    @classmethod
    def _of_the_template(cls, given: dict[str, Any] | None) -> dict[str, Any] | None:
        if taken := sorted(_NOT_OF_TEMPLATES & set(given or {})):
            raise ValueError(f"{taken[0]} is no variable of the chat template")
        return given

    @property
    def longest(self) -> int | None:
        """The limit on the tokens of an answer."""
        given = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return min(given, default=None)

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def chat_request(body: Any) -> ChatRequest:
    """Return a valid request.

    Raises:
        ApiError: a field is unknown, lacks its value or has one that is not supported.
    """
    try:
        request = ChatRequest.model_validate(body)
    except ValidationError as error:
        raise _refusal(error) from None
    if request.tools and request.parallel_tool_calls is False:
        raise ApiError(
            400,
            "parallel_tool_calls: false is not supported; leave it out, and call the first tool alone",
            param="parallel_tool_calls",
            code="unsupported_value",
        )
    return request


def _refusal(error: ValidationError) -> ApiError:
    if error.error_count() > _MAX_ERRORS:
        return ApiError(400, f"the body has {error.error_count()} errors", code="invalid_value")
    # Of the errors of a union's members, the one that got farthest.
    found = max(
        error.errors(include_url=False, include_context=False, include_input=False),
        key=lambda each: len(_place(each["loc"])),
    )
    param = _param(_place(found["loc"]))
    if found["type"] == "extra_forbidden":
        return ApiError(400, f"Unrecognized request argument supplied: {param}", param=param, code="unknown_parameter")
    what = found["msg"].removeprefix("Value error, ")
    message = f"Invalid value for {param!r}: {what}" if param else f"the body is not a request: {what}"
    return ApiError(400, message, param=param or None, code="invalid_value")


def _place(loc: Sequence[int | str]) -> list[int | str]:
    """Return the path of a field without the names of a union's members."""
    places = [each for each in loc if not (isinstance(each, str) and (each == "str" or each.startswith("list[")))]
    if len(places) > 2 and places[0] == "messages":
        del places[2]  # the role
    return places


def _param(places: Sequence[int | str]) -> str:
    text = ""
    for place in places:
        text += f"[{place}]" if isinstance(place, int) else f".{place}" if text else place
    return text[:_MAX_PARAM]
