"""A fork of an explorer that has imported vLLM, which becomes the process of vLLM's engine core.

A core that vLLM spawns imports vLLM once more, which takes 15 seconds and longer, and begins after the explorer has imported it. A fork has everything
imported, and shares the memory. The following holds:

- The fork waits in a session of its own. The parent's death signal ends it with the explorer, however the explorer ends and whatever the fork does.
- Its work begins with the environment, the standard output and the standard errors that the explorer has then. Variables that packages read when they
  are imported have the values of that time, as in the explorer.
- A fork has one thread, and cannot use a GPU that its parent has used. Therefore an explorer is forked before it starts a thread of Python's or uses a
  GPU. Modules that only the core needs, and that may use the GPU on import, are imported by the fork while it waits.
- The pools of threads that numpy, OpenCV, pyarrow and torch start on import restart in a fork.

Where an explorer cannot be forked, or the fork has ended, `ForkContext` spawns the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from multiprocessing import (
    connection,
    context,
    popen_fork,
    popen_spawn_posix,
    process,
    reduction,
    resource_tracker,
    spawn,
    util,
)
from typing import Any, NoReturn

from rftcore.garbage import large_imports
from rftcore.imported_packages import apply_environment
from rftcore.parent_process import end_with_parent

_CUDA_DRIVER = "libcuda.so.1"
_CUDA_ERROR_NOT_INITIALIZED = 3
_MAX_FILES = 250


class CoreFork:
    """A fork of this process that waits for its work.

    Args:
        modules: imported by the fork alone, while it waits; its work imports again what fails.

    Raises:
        OSError: the system refuses.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._connection, theirs = socket.socketpair()
        explorer = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        with theirs:
            self.pid = os.fork()
            if not self.pid:
                self._connection.close()
                _work(theirs, explorer, modules)
        try:
            self.pidfd = os.pidfd_open(self.pid)
        except OSError:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            raise

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return bool(connection.wait([self.pidfd], 0))

    def begin(self, work: bytes, files: Sequence[int]) -> int:
        """Let a process of multiprocessing begin in the fork; return the end of the connection that it has the other end of.

        Args:
            work: what `spawn_main` would read.
            files: those that the process inherits.
        """
        tracker = resource_tracker.getfd()
        assert tracker is not None, "it runs now"
        memory = os.memfd_create("work")
        with os.fdopen(memory, "wb") as file:
            pickle.dump(dict(os.environ), file)
            file.write(work)
            file.flush()
            os.lseek(memory, 0, os.SEEK_SET)
            socket.send_fds(self._connection, [b"w"], [memory, 1, 2, tracker, *files])
        return self._connection.detach()

    def end(self) -> None:
        """End the process."""
        self._connection.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.pidfd)


_waiting: CoreFork | None = None
_inherited: list[int] = []  # files, in a fork that works


def fork_core(modules: Sequence[str] = ()) -> None:
    """Fork this process unless a fork waits; print the reason where that is not possible.

    Args:
        modules: see `CoreFork`.
    """
    global _waiting
    if _waiting is not None:
        return
    try:
        reason = _reason_not_to_fork()
        if reason is None:
            _waiting = CoreFork(modules)
    except OSError as error:
        reason = str(error)
    if reason is not None:
        print(f"vLLM's engine core will import vLLM again: {reason}", file=sys.stderr, flush=True)


def take_fork() -> CoreFork | None:
    """Return the fork that waits, once; None if there is none, or it has ended."""
    global _waiting
    fork, _waiting = _waiting, None
    if fork is not None and fork.has_ended:
        fork.end()
        return None
    return fork


def _reason_not_to_fork() -> str | None:
    others = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
    if others:
        return f"its explorer has threads ({', '.join(others)})"
    return "what it imports uses the GPU" if _cuda_is_initialized() else None


def _cuda_is_initialized() -> bool:
    """Return whether this process has initialized CUDA, which a fork of it could then not use.

    Open files of the GPU do not tell: NVML, by which torch and vLLM count GPUs on import, opens the same ones.
    """
    try:
        driver = ctypes.CDLL(_CUDA_DRIVER, mode=os.RTLD_NOLOAD)
    except OSError:  # it is not loaded
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _CUDA_ERROR_NOT_INITIALIZED)


def _work(explorer_end: socket.socket, explorer: int, modules: Sequence[str]) -> NoReturn:
    code = 1
    try:
        os.setsid()
        end_with_parent(explorer)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with large_imports():
            for module in modules:
                with contextlib.suppress(Exception):
                    importlib.import_module(module)
        files = socket.recv_fds(explorer_end, 1, _MAX_FILES)[1]
        if files:
            code = _run(files, explorer_end.detach())
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
    finally:
        os._exit(code)


def _run(files: Sequence[int], explorer_end: int) -> int:
    """Run a process of multiprocessing; return its exit code."""
    work, output, errors, tracker, *inherited = files
    for received, number in ((output, 1), (errors, 2)):
        os.dup2(received, number)
        os.close(received)
    with os.fdopen(work, "rb", closefd=False) as file:
        environment = pickle.load(file)
        os.lseek(work, file.tell(), os.SEEK_SET)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in environment.items() if os.environ.get(name) != value})
    apply_environment()
    resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]
    _inherited[:] = inherited
    return spawn._main(work, explorer_end)


class _InheritedFile:
    """A file in the message to a fork."""

    def __init__(self, index: int) -> None:
        self._index = index

    def detach(self) -> int:
        return _inherited[self._index]


class _ForkPopen(popen_fork.Popen):
    """Starts a process in a fork that waits."""

    method = "spawn"
    DupFd = _InheritedFile

    def __init__(self, process_object: process.BaseProcess, fork: CoreFork) -> None:
        self._fork, self._files = fork, list[int]()
        super().__init__(process_object)

    def duplicate_for_child(self, fd: int) -> int:
        self._files.append(fd)
        return len(self._files) - 1

    def _launch(self, process_object: process.BaseProcess) -> None:
        work = io.BytesIO()
        try:
            context.set_spawning_popen(self)  # type: ignore[arg-type]  # as any of multiprocessing's classes
            reduction.dump(spawn.get_preparation_data(process_object.name), work)
            reduction.dump(process_object, work)
            end = self._fork.begin(work.getvalue(), self._files)
        except BaseException:
            self._fork.end()
            raise
        finally:
            context.set_spawning_popen(None)
        self.pid, self.sentinel = self._fork.pid, self._fork.pidfd
        self.finalizer = util.Finalize(self, _close_files, (self.sentinel, end))


def _close_files(*files: int) -> None:
    for file in files:
        os.close(file)


class _ForkProcess(context.SpawnProcess):
    @staticmethod
    def _Popen(process_obj: process.BaseProcess) -> Any:
        fork = take_fork()
        return popen_spawn_posix.Popen(process_obj) if fork is None else _ForkPopen(process_obj, fork)


class ForkContext(context.SpawnContext):
    """Starts one process in the fork that waits, and spawns all others."""

    Process = _ForkProcess
