"""Publishes versions straight into live engines, and decides when a version falls back to a file (`sync.method` nccl or auto).

A version is written as a file, by another method, if

- no engine is ready to take it, and none becomes ready while a file would be written and read,
- `sync.method: auto` finds no fast way to the engines' devices,
- an explorer missed it and does not take it in a repeated transfer either,
- an evaluation, or `sync.check_weights`, reads it.

Otherwise it is only in the engines. An explorer misses a version while it stores a batch or answers an evaluation, and asks for it afterwards.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress

from rftcore.sync.base import LIVE_URI, Publication
from rftcore.sync.device_names import choose_backend
from rftcore.sync.tensors import AdaptersConfig
from rftcore.sync.transfer.trainer_side import LiveTransfers, WeightSource
from rftdata.attempts.attempt import Attempt
from rftdata.attempts.transfers import Offers
from rftdata.config import SyncConfig
from rftdata.errors import RoleFailedError

logger = logging.getLogger(__name__)

_TRIES = 3


class LivePublisher:
    """Publishes one version after the other.

    Args:
        attempt: the attempt that holds the run.
        source: the ranks that have the weights.
        write_file: writes the weights as they are now as a file.
        report: receives how weights travel and why, whenever that changes.
        adapters: peft's configuration, if adapters travel alone.

    Attributes:
        publication: the last version.
        first_sent_step: the step after which weights went straight into an engine for the first time; None before.
        live_since: the step from which on no version has been written as a file, so that engines have what was sent; None if the last has a file.
    """

    def __init__(
        self,
        attempt: Attempt,
        config: SyncConfig,
        source: WeightSource,
        write_file: Callable[[str], Publication],
        report: Callable[[str], None] = lambda route: None,
        adapters: AdaptersConfig | None = None,
    ) -> None:
        self._attempt = attempt
        self._config = config
        self._source = source
        self._write_file = write_file
        self._report = report
        self._offers = Offers(attempt)
        self._transfers = LiveTransfers(attempt, config, self._offers, source, self._report_route, adapters)
        self._file_name = ""
        self._route = ""
        self._step = 0
        self._num_repeats = 0  # transfers of the last version to explorers that missed it
        self._file_s = 0.0  # of writing the last file
        self._waited_in_vain = False
        self.first_sent_step: int | None = None
        self.live_since: int | None = None
        self.publication = Publication("", 0, "")

    @property
    def in_float32(self) -> tuple[str, ...]:
        """Names of weights that engines keep in float32, of those that took part last."""
        return self._transfers.in_float32

    def publish(self, step: int) -> int:
        """Publish the weights after `step` as a new version: to the engines that are there, or as a file.

        Returns:
            The policy_version_id.

        Raises:
            FencedError: another attempt holds the run.
        """
        self._step, self._file_name, self._num_repeats = step, f"step-{step:06d}", 0
        receivers = self._await_receivers()
        waiting = set(receivers)
        if not receivers or not self._may_send(receivers):
            self._publish_file()
            return self._announce(self._config.file_method)
        self.publication = Publication(LIVE_URI, 0, "")
        version = self._announce("nccl")
        for _ in range(_TRIES):
            # Engines that a transfer left in the middle do not sample until they have all of it.
            waiting = self._send(version, waiting) & set(self._offers.ready_receivers())
            if not waiting:
                break
        self._locate_sent(version)
        if self._config.check_weights:
            self.as_file(version)
        self.serve_missed(version)
        return version

    def serve_missed(
        self, version: int, device: Callable[[], AbstractContextManager[bool]] = lambda: nullcontext(True)
    ) -> None:
        """Send the last version again to explorers that have missed it and ask for it now; write it as a file if they do not take it so either.

        Args:
            version: its policy_version_id.
            device: context in which the weights may be read; nothing is served if it yields False. It is entered only if an explorer
                has missed the version.
        """
        if not self._is_missed(version):
            return
        with device() as has_device:
            while has_device and self._is_missed(version):
                late = self._offers.late_receivers(version)
                if not late or self._num_repeats == _TRIES or not self._may_send(self._offers.ready_receivers()):
                    logger.info("an explorer missed policy version %d, which is written as a file for it", version)
                    self.as_file(version)
                    return
                self._num_repeats += 1
                logger.info("an explorer missed policy version %d, which is sent again", version)
                self._send_again(version, late)

    def as_file(self, version: int) -> Publication:
        """Return the last version as a file, which is written unless it exists."""
        if self.publication.uri == LIVE_URI:
            self._publish_file()
            self._locate(version)
        return self.publication

    def close(self) -> None:
        """Leave the group."""
        with suppress(RoleFailedError):  # a rank that has died is in no group
            self._source.leave_weight_group()
        self._offers.leave()

    def _await_receivers(self) -> dict[int, str]:
        """Return the explorers that take weights now. If they all are busy, as with an evaluation, wait as long as a file would take."""
        receivers, waits_until = self._offers.ready_receivers(), time.monotonic() + 2 * self._file_s
        if self._waited_in_vain and not receivers:  # the same evaluation may last much longer
            return receivers
        while (
            not receivers
            and self.first_sent_step is not None
            and time.monotonic() < waits_until
            and self._offers.num_busy_receivers()
        ):
            self._offers.wait(0.05)
            receivers = self._offers.ready_receivers()
        self._waited_in_vain = not receivers
        return receivers

    def _publish_file(self) -> None:
        started = time.monotonic()
        self.publication, self.live_since = self._write_file(self._file_name), None
        self._file_s = time.monotonic() - started

    def _may_send(self, receivers: dict[int, str]) -> bool:
        """Return whether weights go into the engines, and not into a file; report files as the route."""
        if self._config.method == "nccl":
            return True
        backend, reason = choose_backend(self._source.weight_devices(), [*receivers.values()])
        if backend in ("nccl", "ipc"):
            return True
        self._report_route(f"through files ({self._config.file_method}): {reason}")
        return False

    def _is_missed(self, version: int) -> bool:
        """Return whether an explorer has missed the last version, which is in no file."""
        return self.publication.uri == LIVE_URI and self._offers.is_file_wanted(version)

    def _send(self, version: int, waiting: set[int]) -> set[int]:
        """Send the version once; return the explorers that took part and have not applied it."""
        result = self._transfers.send(version, waiting)
        if self.first_sent_step is None and result.was_applied:
            self.first_sent_step = self._step
        if result.sent is not None:
            self.publication = Publication(LIVE_URI, result.sent.num_bytes, result.sent.checksum)
        return result.missing

    def _send_again(self, version: int, late: set[int]) -> None:
        before = self.publication
        self._send(version, late)
        if before.checksum:
            self.publication = before  # the row's, whatever type the late ones were sent
        else:
            self._locate_sent(version)

    def _announce(self, method: str) -> int:
        published = self.publication
        return self._attempt.publish(
            self._step,
            method=method,
            uri=published.uri,
            num_bytes=published.num_bytes,
            checksum=published.checksum,
        )

    def _locate(self, version: int) -> None:
        """Store where the version is."""
        published = self.publication
        self._offers.locate(version, uri=published.uri, num_bytes=published.num_bytes, checksum=published.checksum)

    def _locate_sent(self, version: int) -> None:
        """Store that the version is in engines, if a transfer of it has ended."""
        if self.publication.checksum:
            self._locate(version)
            self.live_since = self._step if self.live_since is None else self.live_since

    def _report_route(self, route: str) -> None:
        """Log and report how weights travel if that has changed."""
        if route != self._route:
            logger.info("weights go %s", route)
            self._route = route
            self._report(route)
