"""THE state directory: a model state on disk that outlives the process that made it.

    names.py        where sessions live and what they may be called
    directory.py    Session: open, reusable, restore, commit, close
    layout.py       what is on disk: every field of session.msgpack; toast-session(5) follows it
    header.py       that file, read without trusting it
    extents.py      free space in cache.bin
    blocks.py       tensors <-> extents, copy on write
    savepoints.py   the positions at which a stored state can be resumed
    commit.py       what a commit writes, and in which order
    reading.py      what is read back of it
    caches.py       mlx_lm cache objects <-> tensors (the only file here that imports MLX)
    lock.py         the one writer's lock
    handover.py     that lock, passed from prefill to decode without a gap
    run.py          SESSION/runs/ID: one pipeline over a session
    ring.py         logits by reference                feed.py   tokens back to decode
    gear_state.py   how far the choice of gears had come
    upkeep.py       directories made, removed, swept

Import from the modules: this file imports nothing, so that a stage pays only for what it uses.
"""
