"""prefill's side of runs between processes: the state goes through a session directory."""

from __future__ import annotations

import dataclasses
from collections import deque
from pathlib import Path

from toastkit.descriptors import is_pipe, reader_gone, unread_bytes
from toastkit.engine.step_engine import State
from toastkit.frames import Array, Head
from toastkit.session.directory import Session
from toastkit.session.handover import HandoverServer
from toastkit.session.names import resolve
from toastkit.session.run import RunDirectory
from toastkit.stages.run.protocol import SessionRuns

HANDOVER_SECONDS = 2.0  # for a decode that has not connected yet
RUNS_AHEAD = 2  # ephemeral sessions prefilled before decode is done with the first


class PrefillEnd(SessionRuns):
    """prefill's side of runs: see `protocol.PrefillRuns`.

    session_name: where to keep the state; if None, the head's session; if that is None too, an
    ephemeral one.
    """

    def __init__(self, session_name: str | None):
        self._name = session_name
        self._session: Session | None = None
        self._run: RunDirectory | None = None
        self._server: HandoverServer | None = None
        self._handed: deque[tuple[Path, HandoverServer]] = deque()

    def begin(self, head: Head) -> Head:
        name = self._name or head.session
        path = None if name is None else resolve(name)
        self._await_decode(path)
        if path is None:
            self._session = Session.create_ephemeral(head.fingerprint)
        else:
            self._session = Session.open(path, head.fingerprint)
        assert self._session.lock is not None
        self._run = RunDirectory.create(self._session.path)
        self._server = HandoverServer(self._run.path, self._session.lock)
        return dataclasses.replace(head, session=str(self._session.path), run=str(self._run.path))

    def _await_decode(self, path: Path | None) -> None:
        """Wait until decode is done with an earlier run of this session, or with the first of
        several ephemeral ones."""
        while self._handed:
            earlier, server = self._handed[0]
            if path is None and len(self._handed) < RUNS_AHEAD:
                return
            while not server.wait_done(0.2):
                if reader_gone():
                    raise BrokenPipeError
            server.close()
            self._handed.popleft()

    def abandoned(self) -> bool:
        return reader_gone()

    def announce(self, state: State) -> Array:
        values = state.values()
        logits = Array("float32", (len(values),), values.tobytes())
        state.session = None  # it stays open for the hand-over
        state.close()
        return logits

    def hand_over(self, state: State) -> None:
        assert self._session is not None and self._server is not None and self._run is not None
        if is_pipe(1) and self._offer(self._server):
            self._handed.append((self._session.path, self._server))
            self._run.close()
            self._session.close()
            self._session = self._run = self._server = None
        else:
            self.close()

    def _offer(self, server: HandoverServer) -> bool:
        """Hand the state to decode, which may be busy with an earlier run for as long as that
        lasts, or not have read of this one yet. A reader that has read everything and does not come
        for the state, or declines it, is no decode."""
        while not server.offer(HANDOVER_SECONDS, 1):
            busy = any(not earlier.wait_done(0) for _, earlier in self._handed)
            if server.unwanted or reader_gone() or not (busy or unread_bytes()):
                return False
        return True

    def close(self) -> None:
        """Release a run that was not handed over."""
        if self._server is not None:
            self._server.close()
        if self._run is not None:
            self._run.remove()
        if self._session is not None:
            self._session.close()
        self._session = self._run = self._server = None
