"""Downloads a model from the Hugging Face hub in a process of its own: the threads of
huggingface_hub cannot be stopped, a process can. Run by toastkit.model.hub, which ends it by
closing its stdin.

Downloaded files are checked against their hashes and headers; config.json comes last, because a
snapshot without it does not count as a model.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from toastkit.errors import (
    DataError,
    IOFailure,
    NoInputError,
    ToastError,
    UnavailableError,
    from_os_error,
)
from toastkit.model.files import CONFIG_FILE, SUFFIXES, TEMPLATES_FOLDER, ModelFiles
from toastkit.model.safetensors import read_header

# Other copies of the same weights, and exports for other programs, are in folders or have these
# names.
IGNORE = ["*/*", "consolidated*"]
CHUNK_BYTES = 1 << 18  # granularity of progress, and the most that a broken connection loses
TAG = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
RETRIES = 5  # by huggingface_hub, each after its timeout
LIBRARY = "huggingface_hub"
REFUSED = re.compile(r"HTTP Error ([0-9]{3}) ")  # what it logs of an answer before it retries
KEPT = "the files that are whole are kept: run it again when the network is back"
LATER = "the files that are whole are kept: run it again later"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main() -> NoReturn:
    """Fetch what the arguments name, HUB_ID and REVISION, and answer on stdout: a JSON object,
    either `path` or `code`, `message` and `hint`."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # anything else printed goes to stderr

    def answer(**fields: object) -> NoReturn:
        json.dump(fields, answers)
        answers.flush()
        os._exit(0)  # threads of the library may still be waiting

    threading.Thread(target=_end_with_parent, daemon=True).start()
    hub_id, revision = sys.argv[1:]
    try:
        answer(path=str(fetch(hub_id, revision, answer)))
    except Exception as error:  # offline, a proxy's page, a full disk: many kinds
        failure = what_failed(hub_id, revision, error)
        answer(code=failure.code, message=failure.message, hint=failure.hint)


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def fetch(hub_id: str, revision: str, answer: Callable[..., NoReturn]) -> Path:
    """Download and check a model; return its directory. answer: as `main` defines it, for what
    cannot be raised. Raises what `what_failed` knows, and ToastError for damaged files."""
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.utils import tqdm

    constants.DOWNLOAD_CHUNK_SIZE = CHUNK_BYTES
    patience = (1 + RETRIES) * constants.HF_HUB_DOWNLOAD_TIMEOUT

    def give_up() -> NoReturn:
        message = f"cannot fetch {hub_id}: nothing new has come for {patience} s"
        hint = f"{KEPT}; HF_HUB_DOWNLOAD_TIMEOUT sets the patience"
        if watch.refused:
            message, hint = f"{message}; the hub has answered {_named(watch.refused)}", LATER
        answer(code=UnavailableError.code, message=message, hint=hint)

    watch = _Watch(patience, give_up)
    log = logging.getLogger(f"{LIBRARY}.utils._http")
    log.setLevel(min(logging.WARNING, logging.getLogger(LIBRARY).getEffectiveLevel()))
    log.addFilter(watch.listen)

    class Bar(tqdm):
        """A progress bar that reports to the watchdog."""

        def update(self, n: float | None = 1) -> bool | None:
            watch.add(n or 0)
            return super().update(n)

    def download(revision: str, ignore: list[str], patterns: list[str]) -> Path:
        with watch:
            found = huggingface_hub.snapshot_download(
                hub_id,
                revision=revision or None,
                allow_patterns=patterns,
                ignore_patterns=ignore,
                tqdm_class=Bar,
            )
        return Path(found)

    path = download(revision, [*IGNORE, CONFIG_FILE], [f"*{suffix}" for suffix in SUFFIXES])
    if not path.is_dir():
        raise DataError(f"{hub_id} is not a model: none of its files are those of one")
    download(path.name, [f"{TEMPLATES_FOLDER}/*/*"], [f"{TEMPLATES_FOLDER}/*.jinja"])
    places = [path.iterdir(), (path / TEMPLATES_FOLDER).glob("*.jinja")]
    wanted = sorted(file for place in places for file in place if file.suffix in SUFFIXES)
    with tqdm(
        desc="Checking", total=sum(file.stat().st_size for file in wanted), unit="B",
        unit_scale=True,
    ) as bar:  # fmt: skip
        for file in wanted:
            check_file(file, hub_id, bar.update)
    _ = ModelFiles(path, hub_id).headers  # raises for faults across files
    download(path.name, [], [CONFIG_FILE])
    config = path / CONFIG_FILE
    if not config.is_file():
        raise DataError(f"{hub_id} is not a model: no {CONFIG_FILE} in it")
    check_file(config, hub_id)
    return path


class _Watch:
    """Watchdog: calls give_up if, inside its `with`, the byte count's maximum has not grown for
    some seconds. A file that restarts again and again does not count as growing. refused: the HTTP
    status of the last error answer after which the library retries, 0 for none."""

    def __init__(self, seconds: float, give_up: Callable[[], NoReturn]):
        self._seconds = seconds
        self._give_up = give_up
        self._lock = threading.Lock()
        self._now = self._most = 0.0
        self.refused = 0

    def add(self, count: float) -> None:
        """Add bytes received; a negative count means bytes discarded."""
        with self._lock:
            self._now += count
            if self._now > self._most:
                self._most, self._since = self._now, time.monotonic()

    def listen(self, record: logging.LogRecord) -> bool:
        """Filter the library's log, the only place where retries show. Returns whether to show the
        record."""
        if found := REFUSED.search(record.getMessage()):
            self.refused = int(found[1])
        return logging.getLogger(LIBRARY).isEnabledFor(record.levelno)

    def _run(self, done: threading.Event) -> None:
        while not done.wait(0.5):
            if time.monotonic() - self._since > self._seconds:
                self._give_up()

    def __enter__(self) -> None:
        self._since = time.monotonic()
        self._done = threading.Event()
        threading.Thread(target=self._run, args=(self._done,), daemon=True).start()

    def __exit__(self, *rest: object) -> None:
        self._done.set()


# ------------------------------------------------------------------------------- what has come


def check_file(file: Path, hub_id: str, progress: Callable[[int], object] = int) -> None:
    """Check one file of a snapshot, which is a link to a blob named by the hub's ETag: the SHA-256
    of a large file, git's SHA-1 of a small one. Without an ETag, weights must at least have a valid
    header. progress: called with the bytes read.

    Raises IOFailure for a damaged file, DataError for invalid weights: both are removed, so that
    the next download fetches them again.
    """
    tag = os.path.basename(os.readlink(file)) if file.is_symlink() else ""
    if TAG.fullmatch(tag) is None:
        try:
            if file.suffix == ".safetensors":
                read_header(file, hub_id)
        except DataError:
            _remove(file)
            raise
    elif tag not in _hashes(file, len(tag), progress):
        _remove(file)
        raise IOFailure(
            f"cannot fetch {hub_id}: {file.name} came damaged: its hash is not the hub's",
            hint="it has been removed: run it again",
        )


def _hashes(file: Path, length: int, progress: Callable[[int], object]) -> list[str]:
    """Return the hex digests that a tag of that length may be; a mirror's is not always git's."""
    digests = [hashlib.sha256()]
    if length == 40:
        digests = [hashlib.sha1(b"blob %d\0" % file.stat().st_size), hashlib.sha1()]
    with open(file, "rb") as source:
        while piece := source.read(1 << 20):
            progress(len(piece))
            for digest in digests:
                digest.update(piece)
    return [digest.hexdigest() for digest in digests]


def _remove(file: Path) -> None:
    """Delete a file of a snapshot and the blob it links to."""
    for path in (file.resolve(), file):
        path.unlink(missing_ok=True)


# ----------------------------------------------------------------------------- what went wrong


def what_failed(hub_id: str, revision: str, error: Exception) -> ToastError:
    """Convert an error to one line; the library's own text can be a paragraph."""
    if isinstance(error, ToastError):
        return error
    if isinstance(error, ImportError):
        return UnavailableError(f"cannot fetch {hub_id}: huggingface_hub is broken: {error}")
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return UnavailableError(
            f"cannot fetch {hub_id}: its licence has to be accepted first",
            hint=f"accept it at https://huggingface.co/{hub_id}, then: hf auth login",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        at = f" at {revision}" if revision else ""
        return NoInputError(f"no such revision on the hub: {hub_id}{at}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return NoInputError(
            f"no such model on the hub: {hub_id}", hint="a private one needs: hf auth login"
        )
    cause: BaseException | None = error
    while cause is not None:
        name = type(cause).__name__
        if status := getattr(getattr(cause, "response", None), "status_code", 0):
            return _refused(hub_id, status)
        if isinstance(cause, json.JSONDecodeError):
            return UnavailableError(
                f"cannot fetch {hub_id}: what came is not from a hub", hint="is a proxy in between?"
            )
        if isinstance(cause, OSError) and (cause.filename is not None or cause.errno in FULL):
            return from_os_error(cause, f"cannot fetch {hub_id}", creating=True)
        if "Connect" in name or isinstance(cause, ConnectionError):
            return UnavailableError(f"cannot fetch {hub_id}: the hub cannot be reached", hint=KEPT)
        if "Timeout" in name:
            return UnavailableError(f"cannot fetch {hub_id}: the hub stopped answering", hint=KEPT)
        cause = cause.__cause__
    reason = (str(error).strip().split("\n")[0] or type(error).__name__)[:200].rstrip(".")
    return UnavailableError(f"cannot fetch {hub_id}: {reason}")


def _refused(hub_id: str, status: int) -> UnavailableError:
    """Return the error for an HTTP error status."""
    hint = None
    if status in (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN):
        hint = "hf auth login says who you are"
    elif status == http.HTTPStatus.TOO_MANY_REQUESTS or status >= 500:
        hint = LATER
    return UnavailableError(f"cannot fetch {hub_id}: the hub answered {_named(status)}", hint=hint)


def _named(status: int) -> str:
    """Format an HTTP status with its phrase, if it has one."""
    return f"{status} {http.client.responses.get(status, '')}".rstrip()
