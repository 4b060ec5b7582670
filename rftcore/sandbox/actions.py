"""What a model may do in a session, as tools: `shell`, `read_file` and `write_file`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rftcore.sandbox.session import SandboxSession, SessionError


class Action(BaseModel):
    """A call of a tool, with its arguments as fields; the docstring is its description for the model."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def perform(self, session: SandboxSession) -> str:
        """Do it; return what the model reads.

        Raises:
            SessionError: it failed, and the session lives on.
            SessionEndedError: the session has ended.
        """
        raise NotImplementedError


class Shell(Action):
    """Run a command in a shell. The current folder, exported variables and files are kept between commands. There is no network."""

    command: str = Field(description="the command")

    def perform(self, session: SandboxSession) -> str:
        result = session.shell(self.command)
        head = "took too long and was ended" if result.code is None else f"exit code {result.code}"
        missing = f"\n[{result.num_missing_bytes} bytes left out]" if result.num_missing_bytes else ""
        return f"{head}\n{result.output}{missing}"


class ReadFile(Action):
    """Return the text of a file."""

    path: str = Field(description="path of the file")

    def perform(self, session: SandboxSession) -> str:
        return session.read_file(self.path).decode(errors="replace")


class WriteFile(Action):
    """Write a text to a file, and make its folder."""

    path: str = Field(description="path of the file")
    text: str = Field(description="what the file contains afterwards")

    def perform(self, session: SandboxSession) -> str:
        session.write_file(self.path, self.text)
        return f"{self.path} was written"


ACTIONS: dict[str, type[Action]] = {"shell": Shell, "read_file": ReadFile, "write_file": WriteFile}


def action_schema(name: str, prefix: str = "") -> dict[str, Any]:
    """Return an action as chat templates and OpenAI's interface expect a tool."""
    action = ACTIONS[name]
    parameters = action.model_json_schema()
    properties = {
        key: {k: v for k, v in value.items() if k != "title"} for key, value in parameters["properties"].items()
    }
    schema = {"type": "object", "properties": properties, "required": parameters.get("required", [])}
    function = {"name": prefix + name, "description": inspect.getdoc(action), "parameters": schema}
    return {"type": "function", "function": function}


def action_of(name: str, arguments: Mapping[str, Any]) -> Action:
    """Return the action of a call.

    Raises:
        SessionError: there is none of that name, or the arguments do not fit.
    """
    if name not in ACTIONS:
        raise SessionError(f"there is no tool {name[:64]!r}; tools: {', '.join(ACTIONS)}")
    try:
        return ACTIONS[name].model_validate(dict(arguments))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise SessionError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
