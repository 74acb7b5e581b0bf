// The kernels of linears.cpp with the dot products of bytes that processors with bfloat16 products have too (byte_dots.h).
#include "linears.cpp"
