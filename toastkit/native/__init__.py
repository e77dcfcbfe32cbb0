"""What models compute on CPUs in place of MLX, inside its lazy graphs. From the bottom up:

kernels/     C++ on pointers, for each instruction set; knows neither MLX nor Python
glue/        MLX primitives over them
building/    compiles both, probes the result, and locates it
interface.py declares its functions; library.py is the library in this process
operations.py replaces functions of MLX
forms/       recognises an architecture's modules by their source, whatever their names
modules/     native products, norms, RoPE, networks, mixtures and recurrences
layers/      whole layers in one operation
known.py     the classes of mlx_lm that are recognised by their source
replacing.py makes modules native
"""
