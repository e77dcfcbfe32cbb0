"""What models compute on CPUs in place of MLX, inside its lazy graphs. From the ground up:

kernels/     C++ over pointers, for each set of instructions; knows neither MLX nor Python
glue/        MLX primitives over them
building/    compiles both, probes what comes of it, and says where it lies
library.py   the library in this process; operations.py has what stands for functions of MLX
forms/       what the modules of an architecture are by their source, whatever their names
modules/     products, norms, rotations, networks, mixtures and recurrences that are native
layers/      whole layers in one operation
known.py     which classes of mlx_lm are known by their source
replacing.py has modules compute natively
"""
