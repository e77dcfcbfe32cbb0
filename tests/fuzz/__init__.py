"""Random attacks on frames, sessions and the socket: `make fuzz SECONDS=60`.

A case is made of one number, and of nothing else: `make fuzz SEED=frames-123` repeats it.
"""

from __future__ import annotations

from toastkit.errors import RemoteError, ToastError

CODES = {64, 65, 66, 69, 73, 74, 75}  # of sysexits(3), but for 70, which is a bug


def check_error(error: ToastError) -> None:
    """Fails unless an error is one that a user may be shown."""
    if isinstance(error, RemoteError):  # its words are those of the stream
        assert 0 < error.code < 256, error.code
    else:
        assert error.code in CODES, f"{error.code}: {error}"
        assert error.message
