"""Native CPU kernels: C++ in ``native``, compiled by ``build``, loaded by ``library``."""
