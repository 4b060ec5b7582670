"""The process of one rank of the trainer other than rank 0. It answers the calls of rank 0, one after the other, and ends with it.

Ctrl-C and signals to the process group reach rank 0 alone, which ends the others.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from rftcore.garbage import collect_rarely, large_imports
from rftcore.parent_process import end_with_parent
from rftcore.run.stacks import answer_requests
from rftdata.errors import RftError, RoleFailedError

if TYPE_CHECKING:
    from rftcore.trainer.learner import Learner
    from rftcore.trainer.processes.shared_batch import SharedBatchMemory


def main(parent: int, rank: int, socket_fd: int, memory_fd: int) -> None:
    """Answer calls until rank 0 closes the connection.

    A call is (method, arguments). The answer is None, or the error that the method raised.

    Args:
        parent: process id of rank 0.
        socket_fd: the connection to rank 0.
        memory_fd: the memory of the batches.
    """
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_connection, args=(socket_fd,), name="connection", daemon=True).start()
    logging.disable(logging.WARNING)  # rank 0 computes and reports the same
    collect_rarely()
    # Imported only now: torch takes seconds, in which rank 0 may end.
    with large_imports():
        from rftcore.trainer.processes.shared_batch import SharedBatchMemory

    connection, state = Connection(socket_fd), _Rank(rank, SharedBatchMemory(memory_fd))
    while True:
        method, arguments = connection.recv()
        connection.send(_answer(state, method, arguments))


class _Rank:
    """The learner of a rank, and the methods that rank 0 calls."""

    learner: Learner

    def __init__(self, rank: int, memory: SharedBatchMemory) -> None:
        from rftcore.sync.transfer.sender import TransferSender

        self.rank = rank
        self.memory = memory
        self.sender = TransferSender(rank)

    def call(self, method: str, arguments: tuple[Any, ...]) -> None:
        from rftcore.trainer.learner import Learner
        from rftcore.trainer.processes.process_group import join_process_group, leave_process_group

        match method, arguments:
            case "make", (rendezvous, rank_arguments):
                if rank_arguments.run_folder is not None:
                    answer_requests(rank_arguments.run_folder)
                join_process_group(rendezvous, self.rank)
                self.learner = Learner(rank_arguments.learner, rank_arguments.build_algorithm())
            case "update", (layout, step):
                self.learner.update(self.memory.read(layout), step)
            case "compile", (part,):
                self.learner.compilation.compile(part)
            case "write_weights", (places, tensors, path):
                self.learner.write_weights(places, tensors, path)
            case "send_weights", (plan,):
                self.sender.send(plan, self.learner.held_rows(plan))
            case "leave_weight_group", ():
                self.sender.leave()
            case "leave", ():
                leave_process_group()
            case "end_checkpoint", ():
                self.learner.writer.end()
            case (("begin_checkpoint" | "load_checkpoint" | "save_pretrained"), (folder,)):
                getattr(self.learner, method)(folder)
            case _:
                raise ValueError(f"unknown call {method}{arguments}")


def _answer(state: _Rank, method: str, arguments: tuple[Any, ...]) -> RftError | None:
    try:
        state.call(method, arguments)
    except RftError as error:
        return error if error.can_be_sent() else RoleFailedError(str(error))
    except BaseException as error:  # noqa: BLE001 - the boundary: rank 0 raises every error
        failed = RoleFailedError(f"{type(error).__name__}: {' '.join(str(error).split())}")
        failed.add_note("".join(traceback.format_exception(error)))
        return failed
    return None


def _end_with_connection(socket_fd: int) -> None:
    """End this process when rank 0 closes the connection or ends, even while another thread hangs in a collective."""
    hung_up = select.poll()
    hung_up.register(socket_fd, 0)  # 0: wait for the hang-up only
    hung_up.poll()
    os._exit(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
