"""Service managers: inherited listening sockets, and status notifications.

systemd passes sockets as descriptors from 3 on (sd_listen_fds(3)) and takes notifications as
datagrams (sd_notify(3)). launchd is asked for sockets by name; that part follows its headers and
has not been run on macOS yet.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from contextlib import suppress

from toastkit.errors import UsageError

FIRST_FD = 3
LAUNCHD_NAME = "Listeners"  # the key under Sockets in the property list


def inherited_sockets() -> list[socket.socket]:
    """Return the listening sockets passed by the service manager; empty if there are none. Removes
    its environment variables, so that no child takes them for its own. Raises UsageError."""
    if sys.platform == "darwin":
        fds = _from_launchd()
    else:
        fds = _from_systemd()
    return [_listener(fd) for fd in fds]


def is_activated() -> bool:
    """True if systemd has passed sockets to this very process."""
    return bool(_count())


def _count() -> int:
    pid, count = os.environ.get("LISTEN_PID", ""), os.environ.get("LISTEN_FDS", "")
    return int(count) if pid == str(os.getpid()) and count.isascii() and count.isdigit() else 0


def _from_systemd() -> list[int]:
    fds = list(range(FIRST_FD, FIRST_FD + _count()))
    for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
        os.environ.pop(name, None)
    return fds


def _from_launchd() -> list[int]:
    """launch_activate_socket(3); it fails if launchd did not start us, which is no error."""
    import ctypes

    system = ctypes.CDLL(None)
    fds, count = ctypes.POINTER(ctypes.c_int)(), ctypes.c_size_t()
    activate = getattr(system, "launch_activate_socket", None)
    if activate is None or activate(LAUNCHD_NAME.encode(), ctypes.byref(fds), ctypes.byref(count)):
        return []
    found = [fds[n] for n in range(count.value)]
    system.free(fds)
    return found


def _listener(fd: int) -> socket.socket:
    try:
        os.set_inheritable(fd, False)
        listener = socket.socket(fileno=fd)
        listens = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise UsageError(f"socket activation: descriptor {fd} is no socket") from error
    if listener.family != socket.AF_UNIX or listener.type != socket.SOCK_STREAM or not listens:
        raise UsageError(
            f"socket activation: descriptor {fd} is not a listening Unix stream socket",
            hint="ListenStream= has to be a path",
        )
    return listener


def notify(*lines: str) -> None:
    """Notify the service manager, if it listens: READY=1, STOPPING=1 and the like."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    # If nobody listens, that is the manager's business.
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.setblocking(False)
        out.sendto("\n".join(lines).encode(), address)


def notify_reloading() -> None:
    """Send RELOADING=1 with the timestamp that systemd requires."""
    usec = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    notify("RELOADING=1", f"MONOTONIC_USEC={usec}")
