"""A daemon's weights for toast-prefill and toast-decode: their stages run here, the model there.

Pipes, sessions and locks stay in this process; what it computes with is in the daemon, which may
have loaded it long ago. `RemoteEngine` and `RemoteState` are to the stages what `engine.Engine` and
`state.ModelState` are, so that nothing else changes. MLX is never imported.

One connection; it has one run at a time. Each op is a line, and one line answers it: see RUNS OF
OTHER PROCESSES in toasted(7). A session's lock goes along as a descriptor, as in a hand-over
(session/handover.py): the daemon writes the session under the lock that this process holds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from toastkit.errors import ToastError, UnavailableError, UsageError

if TYPE_CHECKING:
    import socket

    import numpy as np

    from toastkit.session.directory import Session

MAX_ANSWER = 64 << 20  # bytes of a line; the longest holds the logits of one step
READ_BYTES = 1 << 18
ANSWERS = {
    "attach": "attached", "restore": "restored", "read": "read", "step": "step",
    "commit": "committed", "release": "released",
}  # fmt: skip


def attach(
    path: str,
    fingerprint: str,
    device: str,
    dtype: str | None,
    say: Callable[[str], None] | None = None,
) -> RemoteEngine | None:
    """The engine of the daemon that listens at a path, or None: there is none, or it would not
    compute what this process would.

    fingerprint: of the model. device, dtype: as --device and --dtype have them; the daemon must use
    what they would give here. say: takes a line on what a daemon that is there has answered.
    """
    wire = _connected(path)
    if wire is None:
        return None
    try:
        fields = {"fingerprint": fingerprint, "device": device, "dtype": dtype}
        engine = RemoteEngine(wire, wire.ask("attach", fields))
    except ToastError as error:
        wire.close()
        if say is not None:
            say(f"{error.message}: loading the model here")
        return None
    except BaseException:
        wire.close()
        raise
    if say is not None:
        say(f"using the weights of the daemon at {path}")
    return engine


def _connected(path: str) -> Wire | None:
    """A connection to whoever listens there, if that is this user, or root: anybody else would read
    what is asked."""
    import socket

    from toastkit.daemon.peer import may_connect, peer_of

    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
        if may_connect(peer_of(connection)):
            return Wire(connection, path)
    except OSError:
        pass  # nobody listens, or only for others
    except BaseException:
        connection.close()
        raise
    connection.close()
    return None


class Wire:
    """Ops to the daemon and their answers, in turn. waiting: the op whose answer is due."""

    def __init__(self, connection: socket.socket, path: str):
        self.waiting: str | None = None
        self._socket = connection
        self._path = path
        self._buffer = bytearray()
        self._broken = False

    def ask(self, op: str, fields: dict[str, Any], fd: int | None = None) -> dict[str, Any]:
        """What the daemon answers to an op. Raises the error that it answers with, and
        UnavailableError where it is not there any more."""
        self.send(op, fields, fd)
        return self.answer()

    def send(self, op: str, fields: dict[str, Any], fd: int | None = None) -> None:
        """Sends an op; its answer is to be fetched before the next one. fd: a descriptor that goes
        along."""
        import json
        import socket

        if self._broken:
            raise _went_away()
        assert self.waiting is None  # or answers would be taken for those of other ops
        line = json.dumps({"op": op, **fields}).encode() + b"\n"
        self.waiting = op
        try:
            sent = 0 if fd is None else socket.send_fds(self._socket, [line], [fd])
            self._socket.sendall(memoryview(line)[sent:])
        except OSError:
            pass  # it has gone, perhaps after saying why: that is what answer reads

    def answer(self) -> dict[str, Any]:
        """The answer to the op that was sent last. Raises as `ask` does."""
        import json

        op = self.waiting
        assert op is not None  # something was sent
        line = self._line()
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):  # not UTF-8 is a ValueError too
            reply = None
        if not isinstance(reply, dict):
            self.refuse()
        self.waiting = None
        if "error" in reply:
            from toastkit.client.backend import remote_error

            raise remote_error(reply["error"])
        answer = reply.get(ANSWERS[op])
        return answer if isinstance(answer, dict) else self.refuse()

    def refuse(self) -> NoReturn:
        """Raises UnavailableError for an answer that is none; nothing can be asked any more."""
        self._broken = True
        raise UnavailableError(
            f"what the daemon at {self._path} sent is not a reply", hint="is it toasted?"
        )

    def close(self) -> None:
        """Ends the connection, and with it whatever the daemon was doing for it."""
        self._socket.close()

    def _line(self) -> bytes:
        """The next line. Raises UnavailableError at the end."""
        scanned = 0
        while (end := self._buffer.find(b"\n", scanned)) < 0:
            scanned = len(self._buffer)
            try:
                data = self._socket.recv(READ_BYTES)
            except OSError:
                data = b""
            if not data:
                self._broken = True
                raise _went_away()
            self._buffer += data
            if len(self._buffer) > MAX_ANSWER:
                self.refuse()
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line


def _went_away() -> UnavailableError:
    return UnavailableError("the daemon went away", hint="--no-daemon does without it")


class RemoteEngine:
    """A model that a daemon has loaded; see `engine.Engine`.

    vocab: entries in the logits. context: tokens that the model can read, or None. device, dtype:
    that it computes with, None for the checkpoint's own dtype. chunk: tokens of a pass over the
    prompt, where nobody says otherwise. gears: a daemon's model has none.
    """

    gears = None

    def __init__(self, wire: Wire, attached: dict[str, Any]):
        self._wire = wire
        self.vocab: int = self._number(attached, "vocab")
        self.context: int | None = None
        if attached.get("context") is not None:
            self.context = self._number(attached, "context")
        self.chunk: int = self._number(attached, "chunk")
        self._state: RemoteState | None = None
        self.device = attached.get("device")
        self.dtype = attached.get("dtype")

    def restore(
        self, session: Session | None, ids: Sequence[int], source: Session | None = None
    ) -> tuple[RemoteState, int]:
        """The state from which a prompt can be continued: see state.restore_state. The daemon opens
        the sessions itself; the lock of `session` is lent to it."""
        lock = None if session is None else session.lock
        answer = self._wire.ask(
            "restore",
            {"session": _path_of(session), "source": _path_of(source), "ids": list(ids)},
            None if lock is None else lock.fileno(),
        )
        count = answer.get("cached")
        if type(count) is not int or not 0 <= count <= len(ids):
            self._wire.refuse()
        logits = self.logits_of(answer)
        self._state = RemoteState(self, self._wire, list(ids[:count]), logits, session)
        return self._state, count

    def reading(
        self,
        state: RemoteState,
        ids: Sequence[int],
        chunk: Callable[[], int | None] = lambda: None,
    ) -> Iterator[int]:
        """Prefills what the state does not hold of the prompt yet; yields the number of tokens it
        holds after each pass. A pass may be shorter than asked for, where others wait as well."""
        held = len(state.tokens)
        while held < len(ids):
            part = list(ids[held : held + (chunk() or self.chunk)])
            answer = self._wire.ask("read", {"ids": part})
            now = answer.get("held")
            if type(now) is not int or not held < now <= held + len(part):
                self._wire.refuse()
            state.hold(ids[held:now], self.logits_of(answer))
            held = now
            yield held

    def logits_of(self, answer: dict[str, Any]) -> np.ndarray | None:
        """The logits in an answer, float32 (vocab,), read-only; None where there are none."""
        text = answer.get("logits")
        if text is None:
            return None
        import binascii

        import numpy as np

        try:
            values = np.frombuffer(binascii.a2b_base64(text), "<f4")
        except (TypeError, ValueError):
            self._wire.refuse()
        if values.size != self.vocab:
            self._wire.refuse()
        return values.astype(np.float32, copy=False)

    def close(self) -> None:
        """Ends the connection. A state that was not closed is let go first: whoever writes the
        session next must not find it locked."""
        if self._state is not None:
            self._state.release()
        self._wire.close()

    def _number(self, attached: dict[str, Any], name: str) -> int:
        value = attached.get(name)
        return value if type(value) is int and value > 0 else self._wire.refuse()


class RemoteState:
    """What the daemon's model has read for this process; see `state.ModelState`.

    tokens: ids the caches hold. session: where `commit` puts it, opened and locked here.
    savepoints: always empty; the daemon keeps them.
    """

    def __init__(
        self,
        engine: RemoteEngine,
        wire: Wire,
        tokens: list[int],
        logits: np.ndarray | None,
        session: Session | None,
    ):
        self.tokens = tokens
        self.session = session
        self.savepoints: list = []
        self._engine = engine
        self._wire = wire
        self._logits = logits
        self._open = True

    @property
    def logits(self) -> np.ndarray | None:
        """The logits (vocab,) float32 after the last token; waits for them."""
        if self._wire.waiting == "step":
            self._logits = self._engine.logits_of(self._wire.answer())
        return self._logits

    def hold(self, ids: Sequence[int], logits: np.ndarray | None) -> None:
        """Notes that the caches hold these tokens too."""
        self.tokens.extend(ids)
        self._logits = logits

    def consume(self, engine: RemoteEngine, token: int) -> None:
        """Has the daemon run one more token; its answer is not waited for."""
        _ = self.logits  # of the step before, if nobody has asked for them
        self._wire.send("step", {"token": token})
        self.tokens.append(token)

    def submit(self) -> None:
        """Nothing: the daemon has begun."""

    def look_ahead(self, engine: RemoteEngine) -> None:
        """Nothing: the daemon does that by itself."""

    def settle(self) -> None:
        """Nothing: the daemon does that by itself."""

    def values(self) -> np.ndarray:
        """The logits (vocab,) float32 after the last token; waits for them."""
        logits = self.logits
        return self._wire.refuse() if logits is None else logits

    def commit(self) -> None:
        """Has the daemon write the state into its session, if it has one."""
        if self.session is not None:
            _ = self.logits
            self._wire.ask("commit", {})

    def close(self) -> None:
        """Lets the state go, and the session; an ephemeral one vanishes. The daemon's copy of the
        lock is closed first, so that the session is free when this returns."""
        try:
            self.release()
        finally:
            if self.session is not None:
                self.session.close()
                self.session = None

    def release(self) -> None:
        """Has the daemon let the state go, and waits for that; not while an answer is due, when it
        was a signal that ended us: the end of the connection does it then. May be called again."""
        if self._open and self._wire.waiting is None:
            self._open = False
            try:
                self._wire.ask("release", {})
            except ToastError:
                pass  # it has gone itself, and holds nothing


def _path_of(session: Session | None) -> str | None:
    """The path, as the daemon is told of it. Raises UsageError for one that is not UTF-8."""
    if session is None:
        return None
    path = os.path.abspath(session.path)
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the daemon cannot be told of {path!r}: it is not UTF-8",
            hint="--no-daemon does without it",
        ) from error
    return path
