"""The process that forks the processes of tests/forked.py: python -m tests.fork_server SOCKET

Each connection is a request: the length of what follows, with standard input, output and error as
rights, then the command's name, its directory, the number of its arguments, these, and its
environment, with null bytes between. What comes back: the process's number, and at its end its
status, a line each.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence

from toastkit.commands import program_name

NOT_PRELOADED = {"huggingface_hub", "transformers"}  # they read the environment when imported


def preload() -> None:
    """Imports what commands import sooner or later, and makes of Python code what each of them
    would make again for the embedded model. It computes nothing: threads do not survive a fork."""
    import pkgutil
    from importlib import import_module

    import tokenizers  # noqa: F401

    import toastkit
    from toastkit.model.architecture import import_architecture
    from toastkit.model.config import load_config
    from toastkit.model.locate import locate
    from toastkit.native.functions import rebuilt_methods
    from toastkit.stages.tokenize import Prompt, PromptOptions, PromptTokenizer, difficulty
    from toastkit.text import library

    for module in pkgutil.walk_packages(toastkit.__path__, "toastkit."):
        import_module(module.name)
    crumb = locate("crumb")
    config = load_config(crumb)
    architecture = import_architecture(config)
    for one in vars(architecture).values():
        if isinstance(one, type) and issubclass(one, architecture.nn.Module):
            rebuilt_methods(one)
    load, words = library.load, crumb.read("tokenizer.json")
    made = load(words)
    library.load = lambda data: made if data == words else load(data)
    tokenizer = PromptTokenizer(crumb, config, PromptOptions())
    greeting = Prompt(messages=[{"role": "user", "content": "Hi!"}])
    tokenizer.render(greeting)  # and no more: to encode it would start a thread
    difficulty(greeting)
    assert not NOT_PRELOADED & set(sys.modules)


def serve(place: str) -> str:
    """Forks for each connection until standard input ends. Returns in the forked process, which is
    set up as was asked: the name of the command."""
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    interrupts = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests end it when they end
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    running: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place)
        listener.listen(100)
        print("listening", flush=True)
        while True:
            ready, _, _ = select.select([listener, ended, 0], [], [])
            if ended in ready:
                os.read(ended, 4096)
                for pid in list(running):
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        answer(running.pop(pid), os.waitstatus_to_exitcode(status))
            if listener in ready:
                connection, _ = listener.accept()
                size, fds, _, _ = socket.recv_fds(connection, 4, 3)
                with connection.makefile("rb") as stream:
                    request = stream.read(int.from_bytes(size, "big"))
                pid = os.fork()
                if not pid:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    signal.signal(signal.SIGINT, interrupts)
                    for other in (ended, wake, *(s.detach() for s in running.values())):
                        os.close(other)
                    connection.close()
                    return become(request, fds)
                for fd in fds:
                    os.close(fd)
                running[pid] = connection
                with contextlib.suppress(OSError):  # whoever asked may be gone
                    connection.sendall(f"{pid}\n".encode())
            if 0 in ready:
                sys.exit()


def answer(connection: socket.socket, status: int) -> None:
    """Tells how a process has ended, if anybody still asks."""
    with connection, contextlib.suppress(OSError):
        connection.sendall(f"{status}\n".encode())


def become(request: bytes, streams: Sequence[int]) -> str:
    """Makes this process what is asked for, with these standard streams; the command's name."""
    name, directory, count, *rest = map(os.fsdecode, request.split(b"\0"))
    sys.argv = [program_name(name), *rest[: int(count)]]
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(variable.split("=", 1) for variable in rest[int(count) :])
    return name


def end_at_once(status: list[int]) -> None:
    """What is shared with the server is not taken apart, which would copy it first. Registered
    before all else, this runs after all else that Python does at its end."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()
    os._exit(status[0])


if __name__ == "__main__":
    import atexit
    import gc
    from importlib import import_module

    status = [1]
    atexit.register(end_at_once, status)
    preload()
    os.fsync = os.fstat  # as in conftest.py
    gc.freeze()
    command = serve(sys.argv[1]).replace("-", "_")
    try:
        import_module(f"toastkit.commands.{command}").main()
    except SystemExit as done:
        status[0] = done.code if isinstance(done.code, int) else 0
