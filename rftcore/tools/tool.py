"""`Tool`: a function that the model may call, with the schema that the model reads; `ToolContext`: what the function gets of the rollout."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from rftcore.tools.signature import Signature, signature_of
from rftdata.errors import ConfigError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class ToolContext:
    """What a tool gets as its parameter `ctx`.

    Attributes:
        task: the rollout's `rftcore.workflows.task.Task`.
        seed: equal for all rollouts of a group, another for each group.
        state: the rollout's own data, empty at its beginning and kept from call to call. A plain function runs in another process: its state
            travels there and back, so the values must be such as `pickle` writes, and changes of a call that fails are lost.
    """

    task: Any
    seed: int
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Tool:
    """A tool as the model reads it, and the function that it calls.

    Attributes:
        name: by which the model calls it.
        description: what it does, for the model.
        parameters: JSON schema of its arguments, an object.
        function: plain or async.
        signature: checks the arguments of the function.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    function: Callable[..., Any] = field(repr=False)
    signature: Signature = field(repr=False)

    @classmethod
    def of(cls, function: object, name: str | None = None) -> Tool:
        """Return the tool of a function with types and a docstring in Google style.

        Args:
            name: by which the model calls it; the function's own name by default.

        Raises:
            ConfigError: a parameter has no type or cannot be given by its name, or there is no docstring.
        """
        if isinstance(function, Tool):
            return function
        if not callable(function):
            raise ConfigError("a tool must be a function", value=type(function).__name__)
        name = name or str(getattr(function, "__name__", type(function).__name__))
        signature = signature_of(function, valid_name(name))
        return cls(name, signature.description, signature.parameters, function, signature)

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as chat templates and OpenAI's interface expect it."""
        return function_schema(self.name, self.description, self.parameters)

    @property
    def takes_context(self) -> bool:
        """Whether it has the parameter `ctx`."""
        return self.signature.takes_context

    @property
    def is_async(self) -> bool:
        """Whether it is a coroutine function."""
        call = getattr(self.function, "__call__", None)  # noqa: B004 - an object with an async __call__ is also an async function
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call)

    @property
    def runs_in_explorer(self) -> bool:
        """Whether it runs in the event loop of the workflows: if it is async, or returns at once and declares `runs_in_explorer = True`."""
        return self.is_async or bool(getattr(self.function, "runs_in_explorer", False))

    def call(self, arguments: dict[str, Any], context: ToolContext) -> Any:
        """Return what the function returns, a coroutine if it is async.

        Raises:
            InvalidArgumentsError: the arguments do not fit the parameters.
            Exception: the function raised it.
        """
        values = self.signature.values(arguments)
        if self.takes_context:
            values["ctx"] = context
        return self.function(**values)


def valid_name(name: str) -> str:
    """Return the name of a tool.

    Raises:
        ConfigError: no format of calls could write it.
    """
    if _NAME.fullmatch(name) is None:
        raise ConfigError("the name of a tool is not valid", value=name, allowed="up to 64 letters, digits, _, . and -")
    return name


def function_schema(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as chat templates and OpenAI's interface expect it."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def refuse_equal_names(names: Iterable[str]) -> None:
    """Refuse several tools of one name.

    Raises:
        ConfigError: which name.
    """
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ConfigError(
                "two tools have one name", value=name, todo="give one of them another, as in {tool: …, name: …}"
            )
        seen.add(name)
