"""Inspects the other end of a descriptor, for filters that wait or compute."""

from __future__ import annotations

import fcntl
import os
import select
import stat
import struct
import termios

GONE = select.POLLERR | select.POLLHUP | select.POLLNVAL


def is_pipe(descriptor: int) -> bool:
    """True if it is a pipe or a socket, whose other end can go away."""
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def reader_gone(descriptor: int = 1) -> bool:
    """True if a descriptor, by default stdout, is a pipe without a reader."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & GONE for _, events in poll.poll(0))


def unread_bytes(descriptor: int = 1) -> int:
    """Return how many bytes wait in a pipe for its reader; 0 if unknown."""
    try:
        return struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))[0]
    except OSError:
        return 0
