"""Machines that are network namespaces: each with an address, a host name and a link of its own, which can be cut.

All links meet at a bridge, which is the machine that the test itself runs on (address `.1`). Needs root, `ip`, `unshare` and `nsenter`; see
`unavailable`. A namespace ends with its last process, and its link with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from functools import cache

from tests.support.session_processes import network_alias

_libc = ctypes.CDLL(None, use_errno=True)


class Machine:
    """A namespace with a link to the network.

    Attributes:
        name: its host name.
        address: IPv4.
        is_cut: whether its link is down.
    """

    def __init__(self, name: str, address: str, link: str, bridge: str) -> None:
        self.name, self.address, self.is_cut = name, address, False
        self._link = link
        keeper = subprocess.Popen(
            ["unshare", "--net", "--uts", "sh", "-c", f"hostname {name} && echo && read _"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert keeper.stdin is not None and keeper.stdout is not None
        try:
            keeper.stdout.readline()  # it is there
            self._spaces = [os.open(f"/proc/{keeper.pid}/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts")]
            peer = f"{link}p"
            _ip("link", "add", link, "type", "veth", "peer", "name", peer, "netns", str(keeper.pid))
            _ip("link", "set", link, "alias", network_alias())
            _ip("link", "set", link, "master", bridge)
            _ip("link", "set", link, "up")
            for command in ("link set lo up", f"addr add {address}/24 dev {peer}", f"link set {peer} up"):
                subprocess.run(["nsenter", "-t", str(keeper.pid), "-n", "ip", *command.split()], check=True)
        finally:
            keeper.stdin.close()
            keeper.stdout.close()
            keeper.wait()

    def enter(self) -> None:
        """Bring the calling process, which has one thread, to this machine for the rest of its life."""
        for space in self._spaces:
            if _libc.setns(space, 0):
                raise OSError(ctypes.get_errno(), "setns")

    def cut(self) -> None:
        """Let no packet through. Nothing is told to either side."""
        _ip("link", "set", self._link, "down")
        self.is_cut = True

    def restore(self) -> None:
        _ip("link", "set", self._link, "up")
        self.is_cut = False

    def part(self, apart: bool) -> None:
        """Keep this machine apart from others that are kept apart, or not; all of them still reach the bridge."""
        _ip("link", "set", self._link, "type", "bridge_slave", "isolated", "on" if apart else "off")

    def remove(self) -> None:
        for space in self._spaces:
            os.close(space)
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "delete", self._link)


class Network:
    """A bridge with machines; a context, which removes all of it.

    Attributes:
        address: of the machine that the test runs on.
        machines: by name.
    """

    def __init__(self, *names: str) -> None:
        number = os.getpid()
        self._bridge = f"rft{number:x}"
        subnet = f"10.{190 + number // 250 % 60}.{number % 250}"
        self.address = f"{subnet}.1"
        self.machines: dict[str, Machine] = {}
        _ip("link", "add", self._bridge, "type", "bridge")
        try:
            _ip("link", "set", self._bridge, "alias", network_alias())
            _ip("addr", "add", f"{self.address}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for index, name in enumerate(names):
                address = f"{subnet}.{index + 2}"
                self.machines[name] = Machine(name, address, f"{self._bridge}m{index}", self._bridge)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for machine in self.machines.values():
            machine.remove()
        self.machines = {}
        _ip("link", "delete", self._bridge)


@cache
def unavailable() -> str | None:
    """Return why there can be no such network on this machine; None if there can."""
    missing = [program for program in ("ip", "unshare", "nsenter") if shutil.which(program) is None]
    if missing:
        return f"this machine lacks {', '.join(missing)}"
    if os.geteuid():
        return "network namespaces need root"
    try:
        with Network("probe") as network:
            network.machines["probe"].part(apart=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or error
        return f"this machine does not permit network namespaces: {str(said).strip()}"
    return None


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
