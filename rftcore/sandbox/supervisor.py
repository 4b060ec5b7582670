"""Runs one program in a sandbox, in a process forked for it: starts it confined, keeps its limits, ends all of it and reports."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import sys
import tempfile
import time

from rftcore.sandbox import kernel
from rftcore.sandbox.cgroups import ControlGroup, group_name
from rftcore.sandbox.confinement import (
    become_program,
    count_processes,
    end_without_cleanup,
    enter_other_namespaces,
    enter_process_namespace,
    give_up_rights,
    reserved_user,
    set_limits,
)
from rftcore.sandbox.file_system import write_files
from rftcore.sandbox.process_tree import kill_children, memory_bytes, unlinked_bytes
from rftcore.sandbox.request import WORK_FOLDER, Report, Request, read_frame, write_all
from rftcore.sandbox.work_folder import disk_bytes, remove_folder

_LOOK_S = 0.05
_LOOK_DISK_S = 0.5
_LONGEST_POLL_S = 3600.0
_CHUNK = 65536
_STARTED, _REFUSED, _END = b"s", b"r", b"\0"


def supervise(channel: int, files: list[int]) -> None:
    """Run the program that the next message of a channel describes, and report its end there.

    Args:
        channel: a connected socket; its end asks for the end of the program.
        files: open files: its standard input, then those that become 3, 4, ….
    """
    values = read_frame(functools.partial(os.read, channel))
    if values is None:
        return
    request = Request.of(values)
    began = time.monotonic()
    try:
        report = _Supervisor(request, channel, files).run()
    except OSError as error:
        report = Report(refused=str(error))
    except Exception as error:  # noqa: BLE001 - the edge of the process: the caller must know why there is no program
        report = Report(refused=f"{type(error).__name__}: {error}")
    report = Report(**{**report.__dict__, "seconds": time.monotonic() - began})
    with contextlib.suppress(OSError):  # the caller has gone
        write_all(channel, report.encoded())


class _Supervisor:
    def __init__(self, request: Request, channel: int, files: list[int]) -> None:
        self._request = request
        self._channel = channel
        self._files = files
        self._output = {1: bytearray(), 2: bytearray()}
        self._killed: str | None = None
        self._has_namespaces = request.level in ("cgroup", "namespaces")

    def run(self) -> Report:
        with contextlib.ExitStack() as stack:
            group = self._group(stack)
            user = stack.enter_context(reserved_user()) if os.geteuid() == 0 and self._request.level != "none" else None
            work = self._work_folder(stack, user)
            others = count_processes(os.geteuid()) if user is None and not self._has_namespaces else 1
            if self._has_namespaces:
                enter_process_namespace()
            else:
                kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
            status, status_of_child = os.pipe()
            pipes = [os.pipe(), os.pipe()]
            first = os.fork()
            if first == 0:
                os.close(self._channel)
                written = [write for _, write in pipes]
                self._first_process(
                    group, user, work, status_of_child, [self._files[0], *written, *self._files[1:]], others
                )
            for file in (*self._files, status_of_child, *(write for _, write in pipes)):
                os.close(file)
            try:
                self._watch(first, [read for read, _ in pipes], work)
            finally:
                if self._has_namespaces:
                    os.kill(first, signal.SIGKILL)
                    os.waitpid(first, 0)
                else:
                    kill_children()
            self._drain([read for read, _ in pipes])
            return self._report(_read_all(status), group)

    def _group(self, stack: contextlib.ExitStack) -> ControlGroup | None:
        if self._request.level != "cgroup":
            return None
        limits = self._request.limits
        group = ControlGroup(group_name(os.getpid()), limits.memory_bytes, limits.processes + 1)
        stack.callback(group.remove)
        return group

    def _work_folder(self, stack: contextlib.ExitStack, user: int | None) -> str:
        if self._has_namespaces:
            return WORK_FOLDER
        work = tempfile.mkdtemp(prefix="rft-sandbox-")
        stack.callback(remove_folder, work)
        if user is not None:
            os.chown(work, user, user)
        write_files(self._request.files, work, user)
        return work

    def _first_process(
        self, group: ControlGroup | None, user: int | None, work: str, status: int, files: list[int], others: int
    ) -> None:
        """Confine this process, start the program in a child, and write its status when it ends."""
        request = self._request
        try:
            if group is not None:
                group.enter()
            if self._has_namespaces:
                enter_other_namespaces(request, os.geteuid() if user is None else user)
            else:
                kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)  # the watch counts what is below this process
                os.chdir(work)
            if request.level != "none":
                give_up_rights(request, user, work)
            program = os.fork()
            if program == 0:
                try:
                    kernel.prctl(kernel.PR_SET_PDEATHSIG, int(signal.SIGKILL))
                    os.setsid()
                    set_limits(request.limits, request.level, others)
                    become_program(request, work, files)
                finally:
                    _write_error(status)
                    end_without_cleanup(127)
            for file in files:
                os.close(file)
            while True:  # it also reaps what the program leaves
                ended, code = os.waitpid(-1, 0)
                if ended == program:
                    os.write(status, _STARTED + str(os.waitstatus_to_exitcode(code)).encode())
                    end_without_cleanup(0)
        except OSError:
            _write_error(status)
        finally:
            end_without_cleanup(1)

    def _watch(self, first: int, outputs: list[int], work: str) -> None:
        """Read the output until the first process ends, a limit is reached, or the caller asks for the end."""
        limits = self._request.limits
        began = time.monotonic()
        ends = os.pidfd_open(first)
        poll = select.poll()
        for file in (*outputs, ends, self._channel):
            poll.register(file, select.POLLIN)
        looks = self._request.level != "cgroup"
        looked_at_disk = began
        while True:
            now = time.monotonic()
            left = began + limits.wall_s - now if limits.wall_s else _LONGEST_POLL_S
            if left <= 0:
                self._killed = "wall"
                return
            found = poll.poll(1000 * min(left, _LOOK_S if looks else _LONGEST_POLL_S))
            for file, _ in found:
                if file == ends:
                    return
                if file == self._channel:
                    self._killed = "asked"
                    return
                if not self._read(file, 1 + outputs.index(file)):
                    poll.unregister(file)
                    continue
                if sum(map(len, self._output.values())) > limits.output_bytes:
                    self._killed = "output"
                    return
            if looks and memory_bytes(first) > limits.memory_bytes:
                self._killed = "memory"
                return
            if not self._has_namespaces and now - looked_at_disk > _LOOK_DISK_S:
                looked_at_disk = now
                if disk_bytes(work, limits.disk_bytes) + unlinked_bytes(first) > limits.disk_bytes:
                    self._killed = "disk"
                    return

    def _read(self, file: int, stream: int) -> bool:
        data = os.read(file, _CHUNK)
        self._output[stream] += data
        return bool(data)

    def _drain(self, outputs: list[int]) -> None:
        """Read what ended processes have left in the pipes."""
        for stream, file in enumerate(outputs, 1):
            os.set_blocking(file, False)
            with contextlib.suppress(BlockingIOError):
                while len(self._output[stream]) <= self._request.limits.output_bytes and self._read(file, stream):
                    pass

    def _report(self, status: bytes, group: ControlGroup | None) -> Report:
        if status.startswith(_REFUSED):
            return Report(refused=status[1:].partition(_END)[0].decode(errors="replace"))
        code = int(status[1:]) if status else None
        killed = self._killed
        if killed is None and group is not None and group.out_of_memory():
            killed = "memory"
        if killed is None and code in (-signal.SIGXCPU, 128 + signal.SIGXCPU):
            killed = "cpu"
        most = self._request.limits.output_bytes
        return Report(
            code=code,
            killed=killed,
            stdout=bytes(self._output[1][:most]),
            stderr=bytes(self._output[2][:most]),
            peak_bytes=None if group is None else group.peak_bytes(),
        )


def _write_error(status: int) -> None:
    error = sys.exc_info()[1]
    with contextlib.suppress(OSError):
        os.write(status, _REFUSED + str(error)[:2000].encode(errors="replace") + _END)


def _read_all(file: int) -> bytes:
    data = bytearray()
    while part := os.read(file, _CHUNK):
        data += part
    return bytes(data)
