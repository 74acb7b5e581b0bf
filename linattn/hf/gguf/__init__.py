"""GGUF files of llama.cpp: their models, weights and tokenizers. Quantised weights are dequantised by the ``gguf`` package."""

from linattn.hf.gguf.file import SUFFIX as SUFFIX
from linattn.hf.gguf.file import GGUFFile as GGUFFile
from linattn.hf.gguf.models import config_of as config_of
from linattn.hf.gguf.models import weights_of as weights_of
from linattn.hf.gguf.tokenizer import tokenizer_of as tokenizer_of
