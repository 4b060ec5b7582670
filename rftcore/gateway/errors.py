"""Errors of the endpoint, in the form in which OpenAI's clients read them."""

from __future__ import annotations

import traceback
from typing import Any

from rftcore.engines.base import PromptTooLongError
from rftcore.workflows.limits import LimitReachedError
from rftdata.errors import RftError


class ApiError(Exception):
    """A request that is answered with an error.

    Attributes:
        status: of HTTP.
        code: names the error for programs.
        param: the field of the request that is not valid.
        kind: OpenAI's `type` of the error.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.kind = status, message, code, param, kind

    @property
    def body(self) -> dict[str, Any]:
        """The body of the response."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """OpenAI's clients send requests again after some errors, unless this header forbids it. None of these errors passes by waiting."""
        return [(b"x-should-retry", b"false")]


def session_closed() -> ApiError:
    """Return the error of a request after the end of its rollout."""
    return ApiError(409, "the rollout of this key has ended", code="rollout_ended", kind="rollout_ended")


def api_error(error: Exception) -> ApiError:
    """Return the error with which a failed call of the model is answered."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, LimitReachedError) and error.reason != "context_length":
        return ApiError(403, error.what, code=error.reason, kind="limit_reached")
    if isinstance(error, LimitReachedError | PromptTooLongError):
        return ApiError(400, error.what, code="context_length_exceeded", param="messages")
    if isinstance(error, RftError):
        return ApiError(400, str(error))
    if _is_of_template(error):
        return ApiError(400, f"the model's chat template refuses the chat: {error}", param="messages")
    return ApiError(500, f"{type(error).__name__}: {error}", kind="server_error")


def _is_of_template(error: Exception) -> bool:
    """Return whether a chat template raised an error: one of its own, or of Python, such as for a schema that it cannot write."""
    in_template = any(frame.filename == "<template>" for frame in traceback.extract_tb(error.__traceback__))
    return in_template or type(error).__module__.partition(".")[0] == "jinja2"
