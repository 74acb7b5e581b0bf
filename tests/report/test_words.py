import pytest

from linattn.report import words


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.00123456, "0.00123"), (1.234, "1.23"), (9.999, "10.0"), (12345.6, "12,300"), (999.9, "1,000")]
)
def test_figure(value, text):
    assert words.figure(value) == text


def test_units():
    assert [words.tick(v) for v in (0.05, 2, 500, 20_000, 5e6, -3)] == ["0.05", "2", "500", "20k", "5M", "−3"]
    assert [words.tokens(v) for v in (100, 256, 1024, 1500, 16384)] == ["100", "256", "1k", "1,500", "16k"]
    assert [words.memory(v) for v in (512, 98304, 1.5 * 2**20)] == ["512 B", "96.0 KiB", "1.50 MiB"]
    assert [words.memory_tick(v) for v in (512, 65536, 4 * 2**20)] == ["512 B", "64 KiB", "4 MiB"]
    assert [words.times(v) for v in (1.44, 63.7, 2048.0)] == ["1.4 times", "64 times", "2,048 times"]
