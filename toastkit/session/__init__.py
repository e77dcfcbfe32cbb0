"""THE state directory: a model state on disk that outlives its process. directory.py is the
interface, layout.py defines what is on disk, only caches.py and mapped.py use MLX."""
