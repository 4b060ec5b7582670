"""The studio beside a run (`rft run --studio`): a process of its own, which the run neither waits for nor depends on.

It is started once the buffer exists, and ends with the run, however that ends: its standard input is a pipe that the system closes with
this process. If it fails, the run reports that and continues.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque
from types import TracebackType

from rftcore.launch.terminal.views import View
from rftdata.config import BufferConfig
from rftdata.connection import exists

_TRIES = 5
_PAUSE_S = 1.0
_STOP_S = 3.0
_ADDRESS = "the studio is at "


class StudioBeside:
    """A context manager: the studio runs within it.

    Args:
        buffer: of the run; need not exist yet.
        view: receives the address, and why there is none.
        tries: how often it is started before it has an address.
    """

    def __init__(self, buffer: BufferConfig, view: View, *, tries: int = _TRIES) -> None:
        self._buffer, self._view, self._tries = buffer, view, tries
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._keep, name="studio", daemon=True)

    def __enter__(self) -> StudioBeside:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        self._ended.set()
        with self._lock:
            process = self._process
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
        self._thread.join(_STOP_S)

    def _keep(self) -> None:
        """Start the studio, and again if it fails before it has an address; another process may just be migrating the buffer."""
        while not exists(self._buffer):
            if self._ended.wait(_PAUSE_S):
                return
        why = ""
        for _ in range(self._tries):
            has_begun, why = self._serve()
            if self._ended.is_set():
                return
            if has_begun:
                break
            self._ended.wait(_PAUSE_S)
        self._view.message(f"warning: the studio has ended, the run continues: {why or 'it has printed no reason'}")

    def _serve(self) -> tuple[bool, str]:
        """Run the studio to its end; return whether it has had an address, and the last line that it has printed."""
        environment = os.environ | {"RFT_BUFFER": self._buffer.uri}
        if self._buffer.segments:
            environment["RFT_SEGMENTS"] = str(self._buffer.segments)
        with self._lock:
            if self._ended.is_set():
                return False, ""
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rftcore", "studio", "--end-with-input"],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,  # Ctrl-C is for the run, which then ends it
            )
        has_begun, last = False, deque[str](maxlen=1)
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                last.append(line.strip())
                if line.startswith(_ADDRESS):
                    has_begun = True
                    self._view.message(line.strip())
        self._process.wait()
        return has_begun, "".join(last)
