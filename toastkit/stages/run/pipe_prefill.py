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

HANDOVER_SECONDS = 2.0  # how long prefill waits for a decode that has not shown up yet
RUNS_AHEAD = 2  # ephemeral sessions that prefill may fill before decode is done with the first


class PrefillEnd(SessionRuns):
    """prefill's side of runs: see `protocol.PrefillRuns`.

    session_name: where to keep the state; the head's session where it is None, and one that
    vanishes with the run where that is None too.
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
        """Waits until decode is done with an earlier run of this session, or with the first of
        several that vanish."""
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
        state.session = None  # it stays open: it is to be handed over
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
        """Gives the state to decode, which may be at work on an earlier run for as long as that
        lasts, or not have read of this one yet. A reader that has read it all and does not come
        for the state, or says that it will not, is no decode."""
        while not server.offer(HANDOVER_SECONDS, 1, until_asked=True):
            busy = any(not earlier.wait_done(0) for _, earlier in self._handed)
            if server.unwanted or reader_gone() or not (busy or unread_bytes()):
                return False
        return True

    def close(self) -> None:
        """Lets go of a run that was not handed over."""
        if self._server is not None:
            self._server.close()
        if self._run is not None:
            self._run.remove()
        if self._session is not None:
            self._session.close()
        self._session = self._run = self._server = None
