"""The GPU kernels compiled for other cards: shared memory and spills."""
