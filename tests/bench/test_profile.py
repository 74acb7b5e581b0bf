"""Times by kind of kernel from a trace like that of torch's profiler."""

import pytest

from benchmarks import profile


def kernel(name, start, duration, op=None, grid=(1, 1, 1)):
    return {"cat": "kernel", "name": name, "ts": start, "dur": duration, "args": {"External id": op, "grid": list(grid)}}


def op(number, name, dims, types):
    return {"cat": "cpu_op", "name": name, "args": {"External id": number, "Input Dims": dims, "Input type": types}}


LOW = "c10::BFloat16"
TRACE = {
    "traceEvents": [
        {"ph": "M", "name": "process_name"},
        op(1, "aten::mm", [[4, 8], [8, 16]], [LOW, LOW]),
        op(2, "triton_poi_fused_mul_0", [[4, 16], [4, 16], []], [LOW, "float", "Scalar"]),
        op(3, "linattn::short_convolution_backward", [[2, 3], [2, 3], [], [3, 1, 4]], [LOW, LOW, "", LOW]),
        op(4, "aten::mm", [[4, 16], [16, 100], [4, 100]], [LOW, LOW, LOW]),  # with a tensor for the result
        kernel("nvjet_a", 0, 10, 1),
        kernel("splitK", 10, 2, 1),
        kernel("triton_poi_fused_mul_0", 20, 5, 2),
        kernel("backward", 22, 5, 3),
        kernel("nvjet_b", 30, 10, 4),
    ]
}


def rows():
    run = profile.launches(TRACE)
    return profile.summed(run, [profile.train_kind(launch, 100) for launch in run], 1, 0.04)


def test_a_moment_belongs_to_the_first_kernel_and_the_rest_to_gaps():
    found = {kind: row["ms"] * 1e3 for kind, row in rows().items()}
    assert found == pytest.approx(
        {"products of the layers": 12, "fused elementwise": 5, "short convolution": 2, "products of the head": 10, "gaps": 11}
    )
    assert sum(found.values()) == pytest.approx(40)


def test_operations_and_bytes_of_an_operation_count_once():
    found = rows()
    assert found["products of the layers"]["flops"] == 2 * 4 * 8 * 16 and found["products of the head"]["flops"] == 2 * 4 * 16 * 100
    assert found["products of the layers"]["launches"] == 2
    assert found["fused elementwise"]["bytes"] == 4 * 16 * (2 + 4)
    assert found["short convolution"]["bytes"] == 2 * (6 + 6 + 12) + 2 * (6 + 12)  # and gradients of x and the weight


def test_operations_of_a_product_that_is_added():
    assert profile.flops(profile.Launch("gemm", 0, 1, "aten::addmm", [[5], [4, 8], [8, 5], [], []])) == 2 * 4 * 8 * 5


def test_bounds_are_the_longer_of_products_and_bytes():
    found = profile.bounded({"a": {"flops": 100, "bytes": 10}, "b": {"flops": 1, "bytes": 10}, "gaps": {}}, (50.0, 5.0))
    assert [row["bound_ms"] for row in found.values()] == [2000, 2000, None]
    assert profile.bounded({"a": {"flops": 200, "bytes": 10}}, (50.0, 5.0))["a"]["bound_ms"] == 4000


def test_the_head_of_a_step_is_its_largest_map():
    trace = {
        "traceEvents": [
            kernel("tile_kernel", 0, 1, None, (4, 88, 1)),
            kernel("tile_kernel", 2, 1, None, (4, 500, 1)),
            kernel("argmax", 4, 1),
        ]
    }
    assert [profile.decode_kind(launch, 2000) for launch in profile.launches(trace)] == ["maps", "head", "choice of the token"]
