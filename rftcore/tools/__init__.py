"""Tools: functions and MCP servers that the model calls in its answers.

An answer's text is parsed into calls (`formats`), calls become observations (`tool_box`), and errors are observations, too. A `Tool` is made
of a typed Python function with a docstring (`tool`, `signature`). Users write functions, and configure them as `workflow: tools`
(`rftcore.workflows.tools`).
"""

from __future__ import annotations

from rftcore.failures import InfrastructureError
from rftcore.tools.calls import CallError, ToolCall
from rftcore.tools.tool import Tool, ToolContext

__all__ = ["CallError", "InfrastructureError", "Tool", "ToolCall", "ToolContext"]
