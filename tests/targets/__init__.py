"""The GPU kernels compiled for cards that are not here: what fits their shared memory, and what spills."""
