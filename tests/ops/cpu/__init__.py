"""The native kernels: each instruction set that this machine has, against the reference."""
