"""Who is at the other end of a Unix socket: the kernel says, and cannot be lied to.

Linux has SO_PEERCRED; macOS LOCAL_PEERCRED and LOCAL_PEERPID, written after its headers and not yet
run there. Elsewhere nothing is known, and the modes of socket and directory have to do.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from typing import NamedTuple

_UCRED = struct.Struct("iII")  # Linux: pid, uid, gid
_XUCRED = struct.Struct("IIh2x16I")  # macOS: version, uid, number of groups, groups
_SOL_LOCAL, _LOCAL_PEERCRED, _LOCAL_PEERPID = 0, 1, 2


class Peer(NamedTuple):
    """uid: the user who connected. pid: the process that did, 0 where that is not known."""

    uid: int
    pid: int


def peer_of(connection: socket.socket) -> Peer:
    """The other end of a connected Unix socket. Raises OSError where it has gone already."""
    if hasattr(socket, "SO_PEERCRED"):
        data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        pid, uid, _ = _UCRED.unpack(data)
        return Peer(uid, pid)
    if sys.platform == "darwin":
        data = connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED.size)
        pid = connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERPID)
        return Peer(_XUCRED.unpack(data.ljust(_XUCRED.size, b"\0"))[1], pid)
    return Peer(os.geteuid(), 0)


def may_connect(peer: Peer) -> bool:
    """The daemon is one user's: it serves that user, and root."""
    return peer.uid in (os.geteuid(), 0)
