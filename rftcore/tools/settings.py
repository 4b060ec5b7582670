"""The entries of `workflow_args: {tools: […]}`: functions and MCP servers, with the limits of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, TypeAdapter, ValidationError, field_validator

from rftdata.errors import ConfigError


class ToolLimits(BaseModel):
    """Limits of the calls of a tool."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    timeout_s: float = Field(
        30.0, gt=0, allow_inf_nan=False, description="A call that takes longer is ended, and the model reads an error."
    )
    concurrency: int | None = Field(None, ge=1, description="Most calls at a time in an explorer; null: any number.")
    max_chars: int = Field(4096, ge=100, description="Longer results are cut in the middle.")


class FunctionEntry(ToolLimits):
    """A Python function."""

    tool: str = Field(description="`./file.py:function` or `package.module:function`.")
    name: str | None = Field(None, description="By which the model calls it; the function's own name by default.")


_SECRETS = ("authorization", "proxy-authorization", "cookie", "x-api-key", "api-key")


class StdioServer(BaseModel):
    """An MCP server that is started as a process."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: list[str] = Field(min_length=1, description="The program and its arguments.")
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables beside a few usual ones.")
    pass_env: list[str] = Field(
        default_factory=list, description="Variables of the explorer that it gets, such as keys."
    )
    cwd: str | None = Field(None, description="Its folder, relative to the configuration file.")


class HttpServer(BaseModel):
    """An MCP server that is reached over streamable HTTP."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = Field(pattern=r"^https?://")
    headers: dict[str, str] = Field(default_factory=dict)
    headers_env: dict[str, str] = Field(
        default_factory=dict, description="Headers with secrets: the name of the environment variable with each value."
    )

    @field_validator("headers")
    @classmethod
    def _without_secrets(cls, headers: dict[str, str]) -> dict[str, str]:
        for name in headers:
            if name.lower() in _SECRETS:
                raise ValueError(
                    f"a configuration must not contain keys: name the variable with the header {name} in headers_env"
                )
        return headers


class McpEntry(ToolLimits):
    """An MCP server, whose tools are read at the start of an explorer."""

    mcp: Annotated[
        Annotated[StdioServer, Tag("stdio")] | Annotated[HttpServer, Tag("http")],
        Discriminator(lambda given: "http" if isinstance(given, dict) and "url" in given else "stdio"),
    ]
    tools: list[str] | None = Field(None, description="Names of its tools that the model gets; null: all.")
    prefix: str = Field("", description="Put before the names of its tools.")
    shared: bool = Field(False, description="Whether all rollouts of an explorer share a session.")
    max_sessions: int = Field(16, ge=1, description="Most sessions at a time in an explorer, unless it is shared.")


Entry = FunctionEntry | McpEntry

_FUNCTION, _MCP = TypeAdapter(FunctionEntry), TypeAdapter(McpEntry)


def entries_of(tools: object, defaults: ToolLimits) -> list[Entry]:
    """Return the checked entries.

    Args:
        tools: names of functions, or mappings.
        defaults: limits of entries that name none.

    Raises:
        ConfigError: an entry is not valid.
    """
    if isinstance(tools, str) or not isinstance(tools, Sequence) or not tools:
        raise ConfigError(
            "tools must be a list of at least one tool",
            value=tools,
            allowed='"./file.py:function", {tool: …}, {mcp: {command: […]}}, {mcp: {url: …}}',
        )
    return [_entry(entry, defaults) for entry in tools]


def _entry(entry: Any, defaults: ToolLimits) -> Entry:
    given = {"tool": entry} if isinstance(entry, str) else entry
    if not isinstance(given, dict) or ("tool" in given) == ("mcp" in given):
        raise ConfigError(
            "an entry of tools names neither a function nor an MCP server",
            value=entry,
            allowed='"./file.py:function", {tool: …}, {mcp: {command: […]}}, {mcp: {url: …}}',
        )
    try:
        values = {**defaults.model_dump(), **given}
        return (_FUNCTION if "tool" in given else _MCP).validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"] if part not in ("stdio", "http"))
        # The value of an MCP server may contain a key.
        raise ConfigError(
            f"an entry of tools is not valid: {place}: {first['msg'].removeprefix('Value error, ')}",
            value=entry if "tool" in given else None,
        ) from error
