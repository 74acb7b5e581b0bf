"""Which backend runs a call, and why each other one does not.

A backend is a name, a function that gives a reason to refuse (or None), and a function that runs. Nothing is imported
before it is needed, and the choice follows the tensors alone: their device, their dtypes, the options of the call.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from linattn.arguments import described
from linattn.ops import gpu
from linattn.ops.inputs import Inputs, Outputs

FORMS = ("auto", "parallel", "chunk", "recurrent")
BACKENDS: tuple[str, ...] = ("triton", "cpu", "torch", "reference")  # in the order in which auto asks them
Run = Callable[[Inputs], Outputs]


def linear_attention(inputs: Inputs, form: str, backend: str) -> Run:
    """The function that runs ``inputs``."""
    _known("form", form, FORMS)
    _known("backend", backend, ("auto", *BACKENDS))
    for name in BACKENDS if backend == "auto" else (backend,):
        reason = refusal(name, inputs, form, asked=backend == name)
        if reason is None:
            return _load(name, inputs, form)
    raise ValueError(f"backend {backend!r} cannot run this call: {reason}")


def refusal(name: str, inputs: Inputs, form: str, asked: bool = False) -> str | None:
    """Why ``name`` does not run ``inputs``, or None if it does."""
    if name == "cpu":
        from linattn.ops.cpu import linear_attention as cpu

        return cpu.refusal(inputs, form)
    if name == "triton":
        return _gpu_refusal(inputs, form, asked)
    if name == "reference":
        if form not in ("auto", "recurrent"):
            return f"it is the token by token definition and has no form {form!r}"
        return None if asked else "it is the definition that the others are tested against; it runs when asked for"
    if inputs.v.device.type == "mps" and inputs.compute_dtype.itemsize == 8:
        return "MPS has no float64"
    return None


def explain(*args, form: str = "auto", backend: str = "auto", **kwargs) -> str:
    """Print, for the arguments of :func:`linattn.linear_attention`, which backend and form run and why each other does not,
    and what makes the GPU kernels faster elsewhere and is off here.

    Of a scan, the function comes first: ``linattn.explain(linattn.selective_scan, x, dt, ...)``, and so for ``diagonal_scan`` and
    ``running_max``. Returns the printed text.
    """
    from linattn.ops import checks

    if args and callable(args[0]):
        if form != "auto":
            raise ValueError(f"form is for linear_attention: a scan has none, but it came as {form!r}")
        return _explain_scan(*args, backend=backend, **kwargs)

    inputs, _ = checks.call(*args, **kwargs)
    linear_attention(inputs, form, backend)  # refuses what the op refuses
    chosen, lines = None, []
    for name in BACKENDS:
        reason = refusal(name, inputs, form, asked=backend == name)
        if reason is None and chosen is None and backend in ("auto", name):
            chosen = name
            lines.append(f"{name:>10}: runs, {_form(name, inputs, form)} form")
        else:
            lines.append(f"{name:>10}: no, {reason or ('it was not asked for' if backend != 'auto' else f'{chosen} comes first')}")
    if chosen == "triton":
        from linattn.ops.triton.linear_attention import off

        lines += off(inputs, form)
    q, v = inputs.q, inputs.v
    text = "\n".join([f"linear_attention on {v.device}, {v.dtype}, q {list(q.shape)}, v {list(v.shape)}", *lines])
    print(text)
    return text


def _explain_scan(op: Callable, *args, backend: str, **kwargs) -> str:
    explained = getattr(import_module(op.__module__), "explain", None) if op.__module__.startswith("linattn.ops.") else None
    if explained is None:
        raise ValueError(f"explain knows linear_attention, whose name is left out, and the scans, but came with {op!r}")
    return explained(op, *args, backend=backend, **kwargs)


def _form(name: str, inputs: Inputs, form: str) -> str:
    if name == "triton":
        from linattn.ops.triton import linear_attention as kernels

        return kernels.form_of(inputs, form)
    return portable_form(inputs, form) if name == "torch" else "recurrent"


def portable_form(inputs: Inputs, form: str) -> str:
    """The form that the portable backend takes for ``auto``: a step for one token, chunks for more."""
    if form != "auto":
        return form
    return "recurrent" if inputs.causal and inputs.k.shape[1] == 1 and inputs.cu_seqlens is None else "chunk"


def _gpu_refusal(inputs: Inputs, form: str, asked: bool) -> str | None:
    # On a CPU the kernels only ever run under Triton's interpreter, and only when asked for.
    if (reason := gpu.refusal(inputs.v.device, asked)) is not None:
        return reason
    from linattn.ops.triton import linear_attention as kernels

    return kernels.refusal(inputs, form)


def _load(name: str, inputs: Inputs, form: str) -> Run:
    if name == "triton":
        from linattn.ops.triton import linear_attention as kernels

        return kernels.FORMS[kernels.form_of(inputs, form)]
    if name == "cpu":
        from linattn.ops.cpu import linear_attention as cpu

        return cpu.FORMS["recurrent" if form == "auto" else form]
    if name == "reference":
        from linattn.ops.reference.linear_attention import linear_attention as run

        return run
    from linattn.ops.torch import linear_attention as portable

    return portable.FORMS[portable_form(inputs, form)]


def _known(argument: str, value: str, options: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in options:
        raise ValueError(f"{argument} must be one of {', '.join(map(repr, options))}, but came as {described(value)}")
