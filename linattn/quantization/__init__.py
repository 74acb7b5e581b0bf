"""Weight-only quantisation of language models: rounding, error compensation, and the choice of layers."""

from linattn.quantization.folder import save as save
from linattn.quantization.quantize import quantize as quantize
