"""toast: get an answer, from a daemon or in this process.

backend.py         THE seam: a request goes to a backend, replies come back; this process is one
socket_backend.py  toasted, over its Unix socket
turn.py            one request and its answer, and what of it is kept
chats.py           conversations on disk
output.py          replies on stdout and stderr
extract.py         fenced code blocks
repl.py            --chat: turn after turn, from a person or from a pipe

Requests and replies are those of toasted(7), whatever the backend. Start-up time matters: with a
daemon the request is sent within 60 ms of the shell starting us, so nothing here imports numpy,
msgpack, MLX or a tokenizer before that, and the daemon does the work.
"""
