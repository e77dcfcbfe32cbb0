"""SESSION/gears.msgpack: how far the choice of gears had come when a session was committed.

It is no part of a commit: without it, or with one that does not belong to the last commit, the
choice begins anew. Which commit it belongs to is told by the number of tokens and their checksum,
which a reader finds in the session's header without the lock. The fields are in toast-session(5).
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
    """Number and checksum of the tokens of a session's last commit, from its header alone and
    without the lock; None where there is no commit that can be read."""
    from toastkit.session.header import MAX_HEADER_BYTES, decode_header
    from toastkit.session.layout import Damaged

    try:
        header = decode_header(read_file(session_dir / HEADER_FILE, MAX_HEADER_BYTES))
    except (OSError, Damaged):
        return None
    return header.count, header.tokens.crc


def save(session_dir: Path, count: int, tokens_crc: int, state: dict[str, Any]) -> None:
    """Keeps the state for the commit with these tokens, in one step, in place of any other. It is
    not synced: after a power failure the choice of gears begins anew, and that is all.

    state: plain data, less than 64 KiB as msgpack. Raises DataError if it is more,
    CannotCreateError, IOFailure, with the former file as it was.
    """
    import msgpack

    data = msgpack.packb({"toastkit": "gears", "count": count, "crc": tokens_crc, "state": state})
    doing = f"cannot save the gears of session {display_name(session_dir)}"
    if len(data) > MAX_BYTES:
        raise DataError(f"{doing}: their state takes {len(data)} bytes, of {MAX_BYTES} at most")
    with reported_as(doing, creating=True):
        # Streams that are replayed may name one session at the same time.
        replace_file(session_dir / GEAR_FILE, data, sync=False, contended=True)


def load(session_dir: Path, count: int, tokens_crc: int) -> dict[str, Any] | None:
    """The state kept for the commit with these tokens. None where there is none, where it belongs
    to another commit, and where the file is not one that `save` wrote."""
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
