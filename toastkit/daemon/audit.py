"""The audit log: one JSON line per request: who asked what of which model, and the outcome.

Auditing never fails a request: if the disk is full, the line is dropped and a warning given once.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from toastkit.errors import from_os_error, reported_as
from toastkit.private_files import Descriptor, make_private_directories, open_private

MAX_BYTES = 10 << 20  # per file
MAX_FILES = 5  # the current one and FILE.1 to FILE.4


class Audit(Descriptor):
    """The audit log at a path, mode 0600. keep_text: log prompts and answers too. say: called for
    the first line that could not be written.

    Raises CannotCreateError if the file cannot be created or is not a regular file. Thread-safe.
    """

    def __init__(self, path: str, keep_text: bool, say: Callable[[str], None]):
        super().__init__(path, -1)
        self._keep_text = keep_text
        self._say = say
        self._lock = threading.Lock()
        self._warned = False
        with reported_as(f"cannot write {path}", creating=True):
            make_private_directories(Path(path).parent)
            self._open()

    def write(self, record: dict[str, Any], texts: dict[str, Any] | None = None) -> None:
        """Append a record, preceded by the UTC time, with its texts if these are kept. Never
        raises."""
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        whole = {"time": now, **record, **((texts or {}) if self._keep_text else {})}
        line = json.dumps(whole, ensure_ascii=False, default=str).encode("utf-8", "replace") + b"\n"
        with self._lock:
            try:
                self._follow()
                self._rotate(len(line))
                self._append(line)
            except OSError as error:
                self._complain(error)

    def reopen(self) -> None:
        """Continue in the file that is at the path now, a new one if it was moved away."""
        with self._lock:
            self._warned = False
            try:
                self._open()
            except OSError as error:
                self._complain(error)

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            super().close()

    def _open(self) -> None:
        super().close()
        self._fd = open_private(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        os.fchmod(self._fd, 0o600)

    def _follow(self) -> None:
        """Open the file if it is not open, or another program has moved it away."""
        with suppress(FileNotFoundError):
            if self._fd >= 0 and os.path.samestat(os.fstat(self._fd), os.stat(self.path)):
                return
        self._open()

    def _rotate(self, size: int) -> None:
        """Start a new file if the line would exceed MAX_BYTES."""
        here = os.fstat(self._fd).st_size
        if not here or here + size <= MAX_BYTES:
            return
        for number in range(MAX_FILES - 1, 0, -1):
            older = f"{self.path}.{number - 1}" if number > 1 else self.path
            try:
                os.replace(older, f"{self.path}.{number}")
            except FileNotFoundError:
                continue
        self._open()

    def _append(self, line: bytes) -> None:
        """Append the whole line or nothing."""
        written = os.write(self._fd, line)
        if written < len(line):
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _complain(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            self._say(from_os_error(error, f"cannot write the audit log {self.path}").message)
