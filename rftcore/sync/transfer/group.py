"""Communication group of a transfer: all ranks of the trainer, then every process of every engine, by NCCL between GPUs or gloo between CPUs.

It is separate from torch's default group, which trainer and engines may use themselves. Members meet at a store that the trainer keeps. They
count each other first, since a communicator that is silently disabled would leave the old weights in place and report success. Every wait has a
time limit. After any error the group is unusable, and `abort` ends calls that still hang in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, TCPStore
from torch.distributed import ProcessGroupGloo

from rftcore import stuck_threads
from rftcore.sync.addresses import address_towards
from rftdata.errors import RftError
from rftdata.processes import has_ended, own_process

# The store listens before members are told of it. If it does not answer, its trainer has died or is suspended, and another one may need the engine.
# torch looks the address up, which takes 5 s for each name server that does not answer.
_CONNECT_S = 10.0
# A small transfer is over before a sleeping thread would look for it again.
_SPIN_S = 0.005
_POLL_S = 0.0005
# Interval at which a longer wait checks whether it is still wanted.
_CHECK_S = 0.5
# In the store once a member has left while its calls were on their way.
_BROKEN = "broken"
# A group without hanging calls takes no time to end.
_LEAVE_S = 1.0
# With torch's defaults a call that hangs for too long ends the process, and a thread of NCCL's waits for reports of all ranks.
_NCCL_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
_settings_lock = threading.Lock()


class GroupError(RftError):
    """A member of a group failed, left, or did not come; the group is unusable."""


def open_store(host: str, timeout_s: float) -> TCPStore:
    """Return a store at which a group can meet, listening on a port that the system chooses (`store.port`)."""
    return TCPStore(host, 0, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def always_wanted() -> None:
    """Do nothing: the `check` of members whose waits only the time limit ends."""


class TransferGroup:
    """Membership in a group; the constructor returns when all members have come.

    Args:
        backend: gloo or nccl.
        store: where the members meet; a (host, port) for those that did not open it.
        group_id: id of the group.
        rank: rank of this member.
        num_ranks: number of members.
        timeout_s: longest wait of every call.
        check: called during waits for other members; what it raises ends them.

    Raises:
        GroupError: a member did not come in time, or the members do not reach each other.
    """

    def __init__(
        self,
        backend: str,
        store: TCPStore | tuple[str, int],
        group_id: int,
        rank: int,
        num_ranks: int,
        timeout_s: float,
        check: Callable[[], None] = always_wanted,
    ) -> None:
        self.check = check
        self.group_id = group_id
        self.rank = rank
        self.num_ranks = num_ranks
        self.device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        self._timeout_s = timeout_s
        timeout = timedelta(seconds=timeout_s)
        self._calls: list[Call] = []
        self._group: Any = None
        self._processes: list[dict[str, Any]] = []
        self._is_host = not isinstance(store, tuple)
        try:
            if isinstance(store, tuple):
                store = _connect(*store, min(_CONNECT_S, timeout_s), check)
                store.set_timeout(timeout)
            self._store = PrefixStore(str(group_id), store)
            self._processes = _await_members(self._store, rank, num_ranks, timeout_s, check)
            self._group = _open_backend(backend, self._store, store.host, rank, num_ranks, timeout)
            members = torch.zeros(num_ranks, dtype=torch.int64, device=self.device)
            members[rank] = 1
            self._begin(self._group.allreduce([members])).wait()
            refuse_missing(members, group_id)
        except RftError:
            self.abort()
            raise
        except (RuntimeError, OSError) as error:  # all of torch.distributed's errors; no way to the trainer's machine
            self.abort()
            raise self.error("does not come together", error) from error

    def broadcast(self, tensor: Tensor, sender: int) -> Pending:
        """Begin to send one rank's tensor to all, into tensors of the same size and type. All members begin the same calls in the same order.

        Between GPUs it begins after the work that has been queued on the current stream.

        Raises:
            GroupError: another member has gone.
        """
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = sender, 0
        try:
            return self._begin(self._group.broadcast([tensor], options))
        except RuntimeError as error:
            raise self.error("broke off", error) from error

    def abort(self) -> None:
        """Leave the group at once; calls of other members end with an error, soon or when their time is over."""
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            if any(call.work is not None for call in self._calls):
                self._store.set(_BROKEN, str(self.rank))
        with contextlib.suppress(RuntimeError):
            if self._group is not None:
                self._group.abort()
        # A call keeps the connections to the members open. It may live on in the traceback of an error.
        handles = [self._group, *(call.work for call in self._calls)]
        self._group = None
        for call in self._calls:
            call.work = None
        self._calls = []
        # gloo's group ends only after its hanging calls, whose time limit may be far; the process may go on, and end, meanwhile.
        end = threading.Thread(target=handles.clear, name=f"leaves weight group {self.group_id}", daemon=True)
        end.start()
        stuck_threads.leave(end, _LEAVE_S)

    def is_broken(self) -> bool:
        """Return whether a member has left with unfinished calls, or its process has ended.

        gloo keeps the connections of a member that has left open until its calls time out, so the other members see no error, and at times loses the error
        of a connection that a killed process has closed; NCCL sees neither. Only the member that opened the store looks up who has left: a request
        of another one to a machine that cannot be reached may block for longer than the time limit of the call. A process is looked up by
        members that see its id.
        """
        ended = (
            has_ended(each["host"], each["pid"], each["pid_space"], each["pid_started"]) for each in self._processes
        )
        return any(ended) or (self._is_host and self._store.check([_BROKEN]))

    def _begin(self, work: Any) -> Call:
        self._calls = [call for call in self._calls if call.work is not None]
        self._calls.append(Call(self, work, self._timeout_s))
        return self._calls[-1]

    def error(self, what: str, error: Exception) -> GroupError:
        """Return the error of a call in this group."""
        # gloo begins with the place in its source, and ends with advice.
        first_line = re.sub(r"^\[[^\]]*\]\s*", "", str(error).strip().partition("\n")[0]).partition(". This is ")[0]
        return GroupError(
            f"weight group {self.group_id} (rank {self.rank} of {self.num_ranks}) {what} within {self._timeout_s:g} s: {first_line}",
            todo="the group is formed again without members that left; raise sync.timeout_s if one is only slow",
        )


def refuse_missing(members: Tensor, group_id: int) -> None:
    """Refuse a group whose communicator does not connect all members.

    Args:
        members: the sum over the members of a vector with a 1 at their own rank, int64 [num_ranks].

    Raises:
        GroupError: a member is missing, or counted twice.
    """
    if members.tolist() != [1] * len(members):
        raise GroupError(
            f"the communicator of weight group {group_id} does not connect its {len(members)} members",
            value=members.tolist(),
            allowed="each of them once",
            todo="check that NCCL loads on both sides (NCCL_DEBUG=INFO), or set sync.method: memory",
        )


class Pending(Protocol):
    """A message on its way."""

    def wait(self) -> None:
        """Return when its tensor may be used.

        Raises:
            GroupError: another member has gone, or the time is over.
        """


class Call:
    """A collective call on its way.

    Attributes:
        work: torch's handle; None once the call has ended or its member has left.
    """

    def __init__(self, group: TransferGroup, work: Any, timeout_s: float) -> None:
        self._group = group
        self._timeout_s = timeout_s
        self.work = work

    def wait(self) -> None:
        """Return when its tensor may be used, on the current stream where it is on a GPU.

        Raises:
            GroupError: another member has gone, or the time is over.
        """
        try:
            started = looked_at = time.monotonic()
            while not self.work.is_completed():
                waited = time.monotonic() - started
                if waited > self._timeout_s:
                    raise RuntimeError("no answer in time")
                if self._group.device.type == "cpu":
                    with contextlib.suppress(RuntimeError):  # not yet; an error of the call is raised below
                        self.work.wait(timedelta(seconds=min(_CHECK_S, self._timeout_s)))
                else:
                    time.sleep(0.0 if waited < _SPIN_S else _POLL_S)
                self._group.check()
                if (now := time.monotonic()) - looked_at >= _CHECK_S:
                    looked_at = now
                    if self._group.is_broken():
                        raise RuntimeError("another member has left")
            self.work.wait()  # raises an error of the call; the current stream waits for its result
        except RuntimeError as error:
            raise self._group.error("broke off", error) from error
        self.work = None


def _connect(host: str, port: int, timeout_s: float, check: Callable[[], None]) -> TCPStore:
    """Connect to the store of the first rank.

    A suspended process accepts connections and does not answer; torch would wait for it without end.
    """
    store: Future[TCPStore] = Future()

    def connect() -> None:
        try:
            store.set_result(TCPStore(host, port, timeout=timedelta(seconds=timeout_s), wait_for_workers=False))
        except BaseException as error:  # noqa: BLE001 - raised again below
            store.set_exception(error)

    thread = threading.Thread(target=connect, name="connects to a weight group", daemon=True)
    thread.start()
    deadline = time.monotonic() + timeout_s
    try:
        while (left := deadline - time.monotonic()) > 0 and not store.done():
            wait([store], min(_CHECK_S, left))
            check()
        if not store.done():
            raise RuntimeError(f"the store at {host}:{port} does not answer within {timeout_s:g} s")
        return store.result()
    finally:
        stuck_threads.leave(thread, 0.0)


def _await_members(
    store: PrefixStore, rank: int, num_ranks: int, timeout_s: float, check: Callable[[], None]
) -> list[dict[str, Any]]:
    """Wait for all members; return their processes. NCCL would wait without end for a member that does not come."""
    store.set(f"member {rank}", json.dumps(own_process()))
    members = [f"member {number}" for number in range(num_ranks)]
    deadline = time.monotonic() + timeout_s
    while not store.check(members) and (left := deadline - time.monotonic()) > _CHECK_S:
        with contextlib.suppress(RuntimeError):  # not yet
            store.wait(members, timedelta(seconds=min(_CHECK_S, left)))
        check()
    store.wait(members, timedelta(seconds=min(_CHECK_S, timeout_s)))
    return [json.loads(process) for process in store.multi_get(members)]


def _open_backend(
    backend: str, store: PrefixStore, store_host: str, rank: int, num_ranks: int, timeout: timedelta
) -> Any:
    if backend == "gloo":
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in torch's annotations
        options._timeout = timeout
        # The default one takes the address of the host's own name, which may be unknown, or that of the loopback interface.
        options._devices = [ProcessGroupGloo.create_device(hostname=address_towards(store_host))]
        return ProcessGroupGloo(store, rank, num_ranks, options)
    from torch.distributed import ProcessGroupNCCL

    with _environment(_NCCL_SETTINGS):
        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        return ProcessGroupNCCL(store, rank, num_ranks, options)


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Set variables that a new group reads while it is created; other groups of this process keep theirs."""
    with _settings_lock:
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
