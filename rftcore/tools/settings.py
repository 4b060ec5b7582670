"""The entries of `workflow_args: {tools: […]}`: functions, MCP servers and sandboxes, with the limits of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from rftcore.sandbox.config import SandboxConfig
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


ActionName = Literal["shell", "read_file", "write_file"]


class SandboxEntry(ToolLimits):
    """A shell and files in a sandbox, which each rollout has of its own."""

    sandbox: SandboxConfig = Field(description="How it is confined, and its limits; `wall_s` is that of a command.")
    session_s: float = Field(3600.0, gt=0, description="Seconds after which the sandbox of a rollout is ended.")
    tools: list[ActionName] = Field(
        ["shell", "read_file", "write_file"], min_length=1, description="Its tools that the model gets."
    )
    prefix: str = Field("", description="Put before the names of its tools.")

    @model_validator(mode="after")
    def _commands_end_before_calls(self) -> SandboxEntry:
        if self.timeout_s < self.sandbox.wall_s:
            raise ValueError(
                f"timeout_s ({self.timeout_s:g}) is less than sandbox.wall_s ({self.sandbox.wall_s:g}): a call would end before its command; raise it"
            )
        return self


Entry = FunctionEntry | McpEntry | SandboxEntry

_KINDS: dict[str, TypeAdapter[Any]] = {
    "tool": TypeAdapter(FunctionEntry),
    "mcp": TypeAdapter(McpEntry),
    "sandbox": TypeAdapter(SandboxEntry),
}
_EXAMPLES = '"./file.py:function", {tool: …}, {mcp: {command: […]}}, {mcp: {url: …}}, {sandbox: {}}'


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
            allowed=_EXAMPLES,
        )
    return [_entry(entry, defaults) for entry in tools]


def _entry(entry: Any, defaults: ToolLimits) -> Entry:
    given = {"tool": entry} if isinstance(entry, str) else entry
    kinds = [kind for kind in _KINDS if isinstance(given, dict) and kind in given]
    if len(kinds) != 1:
        raise ConfigError(
            "an entry of tools names neither a function nor an MCP server nor a sandbox",
            value=entry,
            allowed=_EXAMPLES,
        )
    try:
        values = {**defaults.model_dump(), **given}
        checked: Entry = _KINDS[kinds[0]].validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"] if part not in ("stdio", "http"))
        # The value of an MCP server may contain a key.
        raise ConfigError(
            f"an entry of tools is not valid: {place + ': ' if place else ''}{first['msg'].removeprefix('Value error, ')}",
            value=None if "mcp" in given else entry,
        ) from error
    return checked
