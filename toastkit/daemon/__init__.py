"""toasted: the process that keeps a model loaded and serves requests over a Unix socket.

The front (life.py, server.py and what they import) speaks the protocol of toasted(7) and manages
the process; the worker behind it owns the device. The front imports no MLX, so that it can fork
first and load the model in the process that uses it.
"""
