"""Errors of the public functions name the argument, the value and what was expected."""

import re

import pytest
import torch

import linattn
from tests.ops.cases import Call, make


def refused(call: Call | dict, *words: str, error: type[Exception] = ValueError, **options: object) -> str:
    """The call raises an error that contains all ``words``."""
    arguments = call.arguments() if isinstance(call, Call) else call
    with pytest.raises(error) as caught:
        linattn.linear_attention(**{**arguments, **options})
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"
    return message


def case(kind: str = "plain", rank: str = "BTHK", **sizes: object) -> Call:
    """B 2, T 9, Hk 2, H 4, K 5, V 3: no two sizes are equal but those of B and Hk."""
    return make(kind, rank, H=4, Hk=2, K=5, V=3, **sizes)


@pytest.mark.parametrize(
    ("kind", "name", "shape", "wanted"),
    [
        ("plain", "q", (2, 9, 2), "[B, T, Hk, K]"),
        ("plain", "q", (9, 2, 5), "[B, T, Hk, K]"),
        ("plain", "k", (2, 9, 5), "[B, T, Hk, K]"),
        ("plain", "v", (2, 9, 3), "[B, T, H, V]"),
        ("plain", "k", (2, 9, 2, 4), "[2, 9, 2, 5]"),
        ("plain", "k", (2, 8, 2, 5), "[2, 9, 2, 5]"),
        ("plain", "k", (3, 9, 2, 5), "[2, 9, 2, 5]"),
        ("plain", "k", (2, 9, 4, 5), "[2, 9, 2, 5]"),
        ("plain", "v", (2, 8, 4, 3), "[2, 9]"),
        ("plain", "v", (1, 9, 4, 3), "[2, 9]"),
        ("plain", "v", (2, 9, 3, 3), "Hk = 2"),
        ("plain", "v", (2, 9, 1, 3), "Hk = 2"),
        ("plain", "v", (2, 9, 0, 3), "Hk = 2"),
        ("plain", "decay", (2, 9, 4, 5, 1), "[B, T, H, K]"),
        ("plain", "decay", (), "[H]"),
        ("plain", "decay", (2,), "[4]"),
        ("plain", "decay", (4, 3), "[4, 5]"),
        ("plain", "decay", (2, 9, 2), "[2, 9, 4]"),
        ("plain", "decay", (1, 9, 4), "[2, 9, 4]"),
        ("plain", "decay", (2, 9, 2, 5), "[2, 9, 4, 5]"),
        ("plain", "decay", (2, 9, 4, 1), "[2, 9, 4, 5]"),
        ("beta", "beta", (2, 9, 2), "[2, 9, 4]"),
        ("beta", "beta", (2, 9, 4, 1), "[2, 9, 4]"),
        ("beta", "beta", (2, 9), "[2, 9, 4]"),
        ("erase", "read", (2, 9, 2, 5), "[2, 9, 4, 5]"),
        ("erase", "write", (2, 9, 4, 3), "[2, 9, 4, 5]"),
        ("bonus", "bonus", (2, 5), "[4, 5]"),
        ("bonus", "bonus", (5,), "[4, 5]"),
        ("plain", "S", (2, 2, 5, 3), "[2, 4, 5, 3]"),
        ("plain", "S", (2, 4, 3, 5), "[2, 4, 5, 3]"),
        ("plain", "S", (1, 4, 5, 3), "[2, 4, 5, 3]"),
        ("plain", "S", (4, 5, 3), "[2, 4, 5, 3]"),
        ("normalize", "S", (3, 4, 5, 3), "[2, 4, 5, 3]"),
        ("normalize", "z", (2, 4, 3), "[2, 4, 5]"),
    ],
)
def test_shapes(kind, name, shape, wanted):
    said = {"read": "erase", "write": "erase", "S": "initial_state", "z": "initial_state"}.get(name, name)
    came = str(list(shape)) if name != "v" or "Hk" not in wanted else f"H = {shape[2]}"
    refused(case(kind).with_(**{name: -torch.ones(shape, dtype=torch.float64)}), said, came, wanted)


@pytest.mark.parametrize(("K", "V", "Hk"), [(0, 3, 2), (5, 0, 2), (5, 3, 0)])
def test_sizes_of_zero(K, V, Hk):
    refused({"q": torch.ones(1, 2, Hk, K), "k": torch.ones(1, 2, Hk, K), "v": torch.ones(1, 2, Hk, V)}, "at least 1" if Hk else "Hk = 0")


@pytest.mark.parametrize("name", ["k", "v", "beta", "read", "write", "bonus", "decay", "S", "z"])
def test_dtypes(name):
    """One dtype for q, k, v; the rest that or float32; states float32."""
    kind = {"beta": "beta", "read": "erase", "write": "erase", "bonus": "bonus", "z": "normalize"}.get(name, "plain")
    said = {"read": "erase", "write": "erase", "S": "initial_state", "z": "initial_state"}.get(name, name)
    call = case(kind)
    for dtype, others in (
        (torch.float32, [torch.float64, torch.float16, torch.int32]),
        (torch.bfloat16, [torch.float64, torch.float16, torch.complex64]),
        (torch.float64, [torch.float32, torch.bfloat16]),
    ):
        own = call.to(dtype)
        wanted = torch.float32 if dtype != torch.float64 and name not in ("k", "v") else dtype
        for other in others:
            refused(own.with_(**{name: own.tensors[name].to(other)}), said, str(other), str(wanted))
    if name in ("S", "z"):
        refused(call.to(torch.bfloat16).with_(**{name: call.tensors[name].bfloat16()}), "initial_state", "torch.bfloat16", "torch.float32")


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_dtypes_without_arithmetic(dtype):
    x = torch.zeros(1, 2, 1, 2).to(dtype)
    refused({"q": x, "k": x, "v": x}, "q", str(dtype), "torch.float32", "torch.bfloat16")


@pytest.mark.parametrize("name", ["k", "v", "decay", "beta", "read", "write", "bonus", "S", "z", "cu_seqlens"])
def test_devices(name):
    kind = {"beta": "beta", "read": "erase", "write": "erase", "bonus": "bonus", "z": "normalize"}.get(name, "plain")
    said = {"read": "erase", "write": "erase", "S": "initial_state", "z": "initial_state"}.get(name, name)
    if name == "cu_seqlens":
        refused(case(lengths=(3, 6)).set(cu_seqlens=torch.tensor([0, 3, 9], device="meta")), said, "meta", "cpu")
    else:
        call = case(kind)
        refused(call.with_(**{name: call.tensors[name].to("meta")}), said, "meta", "cpu")


@pytest.mark.parametrize("name", ["q", "k", "v", "decay", "beta", "bonus", "cu_seqlens"])
def test_what_is_no_tensor(name):
    kind = name if name in ("beta", "bonus") else "plain"
    refused({**case(kind).arguments(), name: [1.0, 2.0]}, name, "list", "tensor", error=(TypeError, ValueError))


def test_erase_is_a_pair():
    call = case("erase")
    read = call.tensors["read"]
    for wrong in (read, (read,), (read, read, read), 3):
        refused({**call.arguments(), "erase": wrong}, "erase", "(read, write)")
    for wrong in ((read, None), (None, read), (read, 1.0)):
        refused({**call.arguments(), "erase": wrong}, "erase", error=(TypeError, ValueError))


def test_a_state_is_a_pair_exactly_with_normalize():
    normalized, plain = case("normalize"), case()
    s, z = normalized.tensors["S"], normalized.tensors["z"]
    for wrong in (s, (s,), (s, z, z)):
        refused({**normalized.arguments(), "initial_state": wrong}, "initial_state", "(S, z)", "normalize")
    refused({**plain.arguments(), "initial_state": (s, z)}, "initial_state", "[N, H, K, V]")
    refused({**normalized.arguments(), "initial_state": (s, None)}, "initial_state", "z", error=(TypeError, ValueError))
    refused({**normalized.arguments(), "initial_state": (None, z)}, "initial_state", error=(TypeError, ValueError))


COMBINATIONS = [
    ("beta", "erase"),
    ("bonus", "normalize"),
    ("beta", "normalize"),
    ("erase", "normalize"),
    ("bonus", "beta"),
    ("bonus", "erase"),
]


@pytest.mark.parametrize(("one", "other"), COMBINATIONS)
def test_combinations_without_a_meaning(one, other):
    """Each names both and gives a reason."""
    a, b = (case(kind, initial=False) for kind in (one, other))
    message = refused({**a.arguments(), **b.arguments()}, one, other)
    assert ":" in message and len(message.split(":", 1)[1].split()) >= 5


@pytest.mark.parametrize("name", ["decay", "beta", "erase", "bonus"])
def test_without_causality(name):
    call = case(name if name != "decay" else "plain", "H" if name == "decay" else "none")
    message = refused(call.set(causal=False), "causal=False", name)
    assert ":" in message


def test_a_query_length_of_its_own_needs_causal_false():
    call = case(rank="none")
    longer = call.with_(q=torch.zeros(2, 12, 2, 5, dtype=torch.float64))
    refused(longer, "k", "[2, 9, 2, 5]", "[2, 12, 2, 5]")
    assert longer.set(causal=False)()["o"].shape == (2, 12, 4, 3)
    refused(call.set(causal=False).with_(q=torch.zeros(3, 12, 2, 5, dtype=torch.float64)), "k", "[2, 9, 2, 5]")
    packed = case(rank="none", lengths=(3, 6)).set(causal=False)
    refused(packed.with_(q=torch.zeros(1, 12, 2, 5, dtype=torch.float64)), "cu_seqlens", "12", "9")


@pytest.mark.parametrize("rank", ["H", "HK", "BTH", "BTHK"])
@pytest.mark.parametrize("value", [1e-12, 0.5, float("inf")])
def test_positive_decays(rank, value):
    call = case(rank=rank)
    decay = call.tensors["decay"].clone()
    decay[(-1,) * decay.ndim] = value
    refused(call.with_(decay=decay), "decay", "<= 0", f"{value:g}")


def test_decays_of_zero_and_minus_infinity_are_no_error():
    call = case(rank="H")
    call.with_(decay=torch.tensor([0.0, -0.0, -torch.inf, -1.0], dtype=torch.float64))()


@pytest.mark.parametrize("ends", [[1, 9], [0, 8], [0, 10], [0, 5, 3, 9], [-1, 9], [0, 9, 5], [9], [0], [0, 0], [0, -3, 9], [2, 5, 9]])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_cu_seqlens_that_fit_nothing(ends, dtype):
    """Not starting at 0, not ending at T, falling."""
    call = make("plain", "BTH", lengths=(9,), initial=False)
    refused(call.set(cu_seqlens=torch.tensor(ends, dtype=dtype)), "cu_seqlens", "T = 9", str(ends))


def test_cu_seqlens_of_the_wrong_make():
    call = make("plain", "BTH", lengths=(4, 5))
    cu = call.options["cu_seqlens"]
    for dtype in (torch.float32, torch.float64, torch.bool, torch.int16, torch.uint8):
        refused(call.set(cu_seqlens=cu.to(dtype)), "cu_seqlens", str(dtype), "torch.int32", "torch.int64")
    refused(call.set(cu_seqlens=cu[None]), "cu_seqlens", "[1, 3]", "[N + 1]")
    refused(call.set(cu_seqlens=cu[0]), "cu_seqlens", "[]", "[N + 1]")
    refused(call.set(cu_seqlens=cu[:0]), "cu_seqlens", "[0]", "[N + 1]")
    refused(make("plain", "BTH", T=9).without("S").set(cu_seqlens=cu), "cu_seqlens", "B", "1", "2")
    refused(call.with_(S=call.tensors["S"][:1]), "initial_state", "[1, 2, 4, 3]", "[2, 2, 4, 3]")


def test_long_cu_seqlens_are_shortened_in_the_message():
    call = make("plain", "BTH", lengths=(9,), initial=False)
    message = refused(call.set(cu_seqlens=torch.arange(1000)), "cu_seqlens")
    assert len(message) < 300


@pytest.mark.parametrize("value", [-1.0, -1e-9, "yes", "True", float("nan"), (1,), object()])
def test_normalizers(value):
    refused({**case(rank="none", initial=False).arguments(), "normalize": value}, "normalize", "return")


@pytest.mark.parametrize(
    ("argument", "value"), [("form", "chunked"), ("form", ""), ("backend", "cuda"), ("backend", "fla"), ("form", None), ("backend", 3)]
)
def test_forms_and_backends(argument, value):
    message = refused(case(), argument, repr(value), "auto", **{argument: value})
    assert re.search(r"one of", message)


@pytest.mark.parametrize(("backend", "form"), [("triton", "auto"), ("cpu", "auto"), ("reference", "chunk"), ("reference", "parallel")])
def test_backends_that_cannot_say_why(backend, form):
    message = refused(case(), repr(backend), backend=backend, form=form)
    assert len(message.split(":", 1)[1].split()) >= 4


@pytest.mark.parametrize("keyword", ["g", "gk", "mask", "head_first", "output_final_state", "Decay", "scales"])
def test_unknown_keywords(keyword):
    refused({**case().arguments(), keyword: None}, keyword, error=TypeError)


def test_only_q_k_and_v_go_without_a_name():
    t = case(rank="BTH").tensors
    with pytest.raises(TypeError):
        linattn.linear_attention(t["q"], t["k"], t["v"], t["decay"])


@pytest.mark.parametrize("value", ["1", torch.ones(2), torch.ones((), requires_grad=True)])
def test_scale_is_a_number(value):
    """Not a tensor, which would silently lose its gradient."""
    refused({**case().arguments(), "scale": value}, "scale", error=(TypeError, ValueError))


def test_a_subclass_and_a_parameter_are_tensors():
    call = case("normalize")
    call.with_(**{n: torch.nn.Parameter(t) for n, t in call.tensors.items()})()
    refused(call.with_(decay=torch.nn.Parameter(-call.tensors["decay"])), "decay", "<= 0")


@pytest.mark.parametrize("causal", ["no", 0, None, torch.tensor(True)])
def test_a_causal_that_is_neither_true_nor_false_is_refused(causal):
    refused(case(), "causal", "True or False", causal=causal)


def test_tensors_that_are_not_dense_are_refused():
    call = case().arguments()
    refused({**call, "q": call["q"].to_sparse()}, "q must be a dense tensor", "sparse")


def test_explaining_a_scan_refuses_a_form():
    decay = -torch.rand(1, 3, 4)
    with pytest.raises(ValueError, match="form must be .auto. for diagonal_scan, because it is only for linear_attention"):
        linattn.explain(linattn.diagonal_scan, decay, decay, form="chunk")


@pytest.mark.parametrize("lengths", [[3, 7], [-1, 2], [3.0, 2.0]])
def test_lti_refuses_lengths_that_are_none(lengths):
    a = -torch.rand(4, 3)
    with pytest.raises(ValueError, match="lengths must be"):
        linattn.lti(torch.randn(2, 5, 4), a, a, a, lengths=torch.tensor(lengths))
