"""Native kernels for the CPU: C++ in ``native``, compiled by ``build``, loaded by ``library``."""
