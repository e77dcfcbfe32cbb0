"""SESSION/gears.msgpack: the state of gear selection when a session was committed.

It is not part of a commit: if it is missing, or belongs to another commit, selection starts anew.
Its commit is identified by the number of tokens and their checksum, which a reader finds in the
session's header without the lock. The fields are in toast-session(5).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toastkit.errors import DataError, reported_as
from toastkit.private_files import read_file, replace_file
from toastkit.session.names import HEADER_FILE, display_name

GEAR_FILE = "gears.msgpack"
MAX_BYTES = 64 << 10


def committed(session_dir: Path) -> tuple[int, int] | None:
    """Number and checksum of the tokens of a session's last commit, from its header alone, without
    the lock; None if no commit can be read."""
    from toastkit.session.header import MAX_HEADER_BYTES, decode_header
    from toastkit.session.layout import Damaged

    try:
        header = decode_header(read_file(session_dir / HEADER_FILE, MAX_HEADER_BYTES))
    except (OSError, Damaged):
        return None
    return header.count, header.tokens.crc


def save(session_dir: Path, count: int, tokens_crc: int, state: dict[str, Any]) -> None:
    """Store the state for the commit with these tokens, atomically replacing any other. It is not
    synced: losing it in a power failure only restarts gear selection.

    state: plain data, less than 64 KiB as msgpack. Raises DataError if it is more,
    CannotCreateError, IOFailure, leaving the former file unchanged.
    """
    import msgpack

    data = msgpack.packb({"toastkit": "gears", "count": count, "crc": tokens_crc, "state": state})
    doing = f"cannot save the gears of session {display_name(session_dir)}"
    if len(data) > MAX_BYTES:
        raise DataError(f"{doing}: their state takes {len(data)} bytes, of {MAX_BYTES} at most")
    with reported_as(doing, creating=True):
        # Replayed streams may name one session at the same time.
        replace_file(session_dir / GEAR_FILE, data, sync=False, contended=True)


def load(session_dir: Path, count: int, tokens_crc: int) -> dict[str, Any] | None:
    """The state for the commit with these tokens. None if there is none, it belongs to another
    commit, or `save` did not write the file."""
    import msgpack

    try:
        data = read_file(session_dir / GEAR_FILE, MAX_BYTES)
        if len(data) > MAX_BYTES:
            return None
        fields = msgpack.unpackb(data, strict_map_key=True)
    except Exception:  # OSError; msgpack raises ValueError, StackError, UnicodeDecodeError, ...
        return None
    if type(fields) is not dict or fields.get("toastkit") != "gears":
        return None
    if (fields.get("count"), fields.get("crc")) != (count, tokens_crc):
        return None
    state = fields.get("state")
    return state if type(state) is dict else None
