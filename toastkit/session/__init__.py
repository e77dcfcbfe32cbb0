"""THE state directory: a model state on disk that outlives the process that made it. directory.py
is what others use, layout.py the words for what is on disk, caches.py alone imports MLX."""
