"""Offers of weights to live engines and the engines' answers, which a trainer and its explorers exchange as rows.

offered → acknowledged → sending → applied or failed → ended. Only the trainer that holds the run writes offers; an explorer writes only
its own answers. An explorer that has not acknowledged when the members are fixed is left out, and asks for the version as a file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from psycopg.types.json import Jsonb

from rftdata.attempts.attempt import Attempt
from rftdata.postgres import notify
from rftdata.postgres.database import Connection, execute, fetch, records
from rftdata.postgres.retry import ride_out
from rftdata.run import Run
from rftdata.workers.live_workers import record_exited_workers

T = TypeVar("T")
TensorList = list[dict[str, Any]]
"""The elements of `rft.weight_transfer.tensors`, in the order in which they are sent."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """An offer. Fields that are None are set when it is sent. Its fields are columns of `rft.weight_transfer`."""

    transfer_id: int
    attempt_id: int
    policy_version_id: int
    status: str
    group_id: int | None
    backend: str | None
    address: str | None
    num_ranks: int | None
    dtype: str | None
    in_float32: list[str] | None
    bucket_bytes: int | None
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """An explorer's answer to an offer; its fields are columns of `rft.weight_receipt`.

    Attributes:
        pid_space: that of its process, see `rftdata.processes.pid_space`.
        alive: whether its process sends heartbeats.
    """

    worker_id: int
    status: str
    host: str
    pid_space: str
    device: str
    dtype: str
    in_float32: list[str]
    num_ranks: int
    group_id: int | None
    first_rank: int | None
    error: str | None
    alive: bool


class Offers:
    """The trainer's side.

    Args:
        attempt: must hold the run.
    """

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._run = attempt.run
        self._has_offered = False
        self._listener = notify.Listener(attempt.run.database, notify.WEIGHTS, check=attempt.check)

    def ready_receivers(self) -> dict[int, str]:
        """Return the explorers that take weights now, with the devices of their engines. A process of this machine that has exited does not count."""
        record_exited_workers(self._run)
        return {
            row["worker_id"]: row["device"]
            for row in self._run.database.fetch("ready_receivers", run_id=self._run.run_id)
        }

    def num_busy_receivers(self) -> int:
        """Return the number of explorers that take weights, but not now."""
        return int(self._run.database.fetch("busy_receivers", run_id=self._run.run_id)[0]["num"])

    def late_receivers(self, policy_version_id: int) -> set[int]:
        """Return the explorers that have missed a version, and could take it now."""
        rows = self._run.database.fetch("late_receivers", run_id=self._run.run_id, policy_version_id=policy_version_id)
        return {row["worker_id"] for row in rows}

    def is_file_wanted(self, policy_version_id: int) -> bool:
        """Return whether an explorer has missed a version."""
        rows = self._run.database.fetch("is_file_wanted", run_id=self._run.run_id, policy_version_id=policy_version_id)
        return bool(rows[0]["wanted"])

    def offer(
        self, policy_version_id: int, tensors: TensorList, fingerprint: str, adapters: dict[str, Any] | None = None
    ) -> int:
        """Offer a version to the explorers; return the transfer_id.

        Args:
            tensors: the same in every offer of an attempt; the first stores them.
            adapters: peft's configuration, if the tensors are adapters; stored with them.
        """
        is_first = not self._has_offered
        row = self._write(
            lambda connection: fetch(
                connection,
                "insert_transfer",
                run_id=self._run.run_id,
                attempt_id=self._attempt.attempt_id,
                policy_version_id=policy_version_id,
                fingerprint=fingerprint,
                tensors=Jsonb(tensors) if is_first else None,
                adapters=Jsonb(adapters) if is_first and adapters is not None else None,
            )[0],
            notify.POLICY,
        )
        self._has_offered = True
        return int(row["transfer_id"])

    def receipts(self, transfer_id: int) -> list[Receipt]:
        """Return the answers so far."""
        return records(Receipt, self._run.database.fetch("transfer_receipts", transfer_id=transfer_id))

    def close(self, transfer_id: int) -> list[Receipt]:
        """Close an offer to further explorers; return the answers so far."""
        return records(
            Receipt,
            self._write(
                lambda connection: (
                    execute(connection, "close_transfer", transfer_id=transfer_id),
                    fetch(connection, "transfer_receipts", transfer_id=transfer_id),
                )[1]
            ),
        )

    def begin(self, transfer_id: int, ranks: dict[int, int], left_out: dict[int, str], **group: Any) -> None:
        """Fix the group of a closed offer.

        Args:
            ranks: the first rank of every member.
            left_out: explorers that acknowledged and are not members, with the reason.
            group: the columns group_id, backend, address, num_ranks, dtype, in_float32 and bucket_bytes.
        """

        def fix(connection: Connection) -> None:
            for worker_id, first_rank in ranks.items():
                execute(
                    connection, "set_transfer_rank", transfer_id=transfer_id, worker_id=worker_id, first_rank=first_rank
                )
            for worker_id, reason in left_out.items():
                execute(connection, "leave_out_of_transfer", transfer_id=transfer_id, worker_id=worker_id, error=reason)
            execute(connection, "begin_transfer", transfer_id=transfer_id, **group)

        self._write(fix, notify.WEIGHTS)

    def end(
        self,
        transfer_id: int,
        *,
        num_bytes: int | None = None,
        send_seconds: float | None = None,
        error: str | None = None,
    ) -> None:
        """Record how a transfer ended."""
        self._write(
            lambda connection: execute(
                connection,
                "end_transfer",
                transfer_id=transfer_id,
                num_bytes=num_bytes,
                send_seconds=send_seconds,
                error=error,
            ),
            notify.WEIGHTS,
        )

    def locate(self, policy_version_id: int, *, uri: str, num_bytes: int, checksum: str) -> None:
        """Record where a published version is, and wake the explorers."""
        self._write(
            lambda connection: execute(
                connection,
                "locate_policy_version",
                policy_version_id=policy_version_id,
                uri=uri,
                num_bytes=num_bytes,
                checksum=checksum,
            ),
            notify.POLICY,
        )

    def _write(self, work: Callable[[Connection], T], *topics: str) -> T:
        def write() -> T:
            with self._attempt.transaction() as connection:
                return work(connection)

        result = ride_out(write)
        if topics:
            notify.notify(self._run.database, *{*topics, notify.WEIGHTS})
        return result

    def wait(self, timeout_s: float) -> None:
        """Wait until an explorer answers, or until the timeout.

        Raises:
            FencedError: another attempt holds the run.
        """
        self._listener.wait(timeout_s)

    def leave(self) -> None:
        """Close the connection that listens."""
        self._listener.close()


class Answers:
    """The side of one explorer."""

    def __init__(self, run: Run, worker_id: int) -> None:
        self._run = run
        self._worker_id = worker_id
        self._listener = notify.Listener(run.database, notify.WEIGHTS)

    def set_state(self, *, device: str, ready: bool, wanted_version: int | None = None) -> None:
        """Record whether this explorer takes weights now, and which version it needs as a file."""
        self._write(
            "set_weight_receiver", run_id=self._run.run_id, device=device, ready=ready, wanted_version=wanted_version
        )

    def newest(self, policy_version_id: int) -> Transfer | None:
        """Return the last offer of a version."""
        rows = self._run.database.fetch("newest_transfer", run_id=self._run.run_id, policy_version_id=policy_version_id)
        return next(iter(records(Transfer, rows)), None)

    def tensors(self, attempt_id: int) -> tuple[TensorList, dict[str, Any] | None]:
        """Return what the transfers of an attempt send, and peft's configuration if they are adapters."""
        row = self._run.database.fetch("transfer_tensors", attempt_id=attempt_id)[0]
        return row["tensors"], row["adapters"]

    def acknowledge(
        self,
        transfer_id: int,
        *,
        host: str,
        device: str,
        dtype: str,
        in_float32: Sequence[str],
        num_ranks: int,
        group_id: int | None,
        kv_cache: str,
    ) -> None:
        """Ask to be a member, unless the offer is closed."""
        self._write(
            "acknowledge_transfer",
            transfer_id=transfer_id,
            host=host,
            device=device,
            dtype=dtype,
            in_float32=[*in_float32],
            num_ranks=num_ranks,
            group_id=group_id,
            kv_cache=kv_cache,
        )

    def own(self, transfer_id: int) -> Receipt | None:
        """Return this explorer's answer as it stands now; None if it came too late."""
        rows = records(Receipt, self._run.database.fetch("transfer_receipts", transfer_id=transfer_id))
        return next((row for row in rows if row.worker_id == self._worker_id), None)

    def end(
        self, transfer_id: int, status: str, *, pause_seconds: float | None = None, error: str | None = None
    ) -> None:
        """Record that the weights were applied, or why not."""
        self._write("end_receipt", transfer_id=transfer_id, status=status, pause_seconds=pause_seconds, error=error)

    def _write(self, name: str, **parameters: Any) -> None:
        ride_out(lambda: self._run.database.run(name, worker_id=self._worker_id, **parameters))
        notify.notify(self._run.database, notify.WEIGHTS)

    def wait(self, timeout_s: float) -> None:
        """Wait until the trainer acts, or until the timeout."""
        self._listener.wait(timeout_s)

    def leave(self) -> None:
        """Close the connection that listens."""
        self._listener.close()
