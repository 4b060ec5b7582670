"""Whether a process has ended, seen from another one."""

from __future__ import annotations

import builtins
import os
import socket
from typing import Any

import pytest

from rftdata.processes import has_ended, pid_space


def test_a_process_whose_file_under_proc_may_not_be_opened_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with the mount option hidepid=1, for processes of other users."""

    def refused(file: Any, *args: Any, **kwargs: Any) -> Any:
        if file == f"/proc/{os.getppid()}/stat":
            raise PermissionError(1, os.strerror(1), file)
        return opened(file, *args, **kwargs)

    opened = builtins.open
    monkeypatch.setattr(builtins, "open", refused)
    assert not has_ended(socket.gethostname(), os.getppid(), pid_space(), 1)
