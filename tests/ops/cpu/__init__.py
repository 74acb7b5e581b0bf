"""The native kernels: each instruction set of this machine, against the reference."""
