"""toast: asks for an answer, wherever it comes from.

    backend.py         THE seam: a request goes to a backend, replies come back; which one is chosen
    socket_backend.py  toasted, over its Unix socket
    local_backend.py   this process, where there is no daemon
    turn.py            one request and its answer; what of it is worth keeping
    chats.py           conversations on disk
    output.py          what of the replies goes to stdout and stderr, in which form
    extract.py         fenced code blocks
    repl.py            --chat: turn after turn, from a person or from a pipe

Requests and replies are those of toasted(7), whoever answers. Start-up is the point: with a daemon
the request is on its way 60 ms after the shell started us, so nothing here imports numpy, msgpack,
MLX or a tokenizer before that, and the daemon does the work.
"""
