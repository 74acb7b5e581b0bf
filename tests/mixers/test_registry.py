"""Names, options and third parties."""

import math
import re
import sys

import numpy as np
import pytest
import torch

import linattn
from linattn import mixers
from linattn.mixers import available, create, info, registry
from linattn.mixers.taxonomy import families

NINE = {"softmax", "linear", "linear_transformer", "retnet", "gla", "mamba2", "deltanet", "gated_deltanet", "lstm"}


@pytest.fixture
def own_register(monkeypatch):
    """Registry restored after the test, with plugins not yet loaded."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(registry, "_loaded", False)


def test_the_first_nine_are_there():
    assert set(available()) >= NINE
    assert available() == sorted(available())


@pytest.mark.parametrize("name", sorted(NINE))
def test_info_is_complete(name):
    known = info(name)
    assert known.cls.info is known and known.name == name
    assert all((known.title, known.paper, known.equation, known.oracle))
    assert 1990 < known.year < 2030 and (known.arxiv is None) == (name == "lstm")
    assert known.recurrent == (name != "softmax") and known.linear_in_values == (name != "lstm")


def test_an_unknown_name_says_which_there_are():
    with pytest.raises(ValueError, match=r"no mixer is called 'glaa'; did you mean 'gla'\?$"):
        create("glaa", dim=32)
    with pytest.raises(ValueError, match=r"no mixer is called 'gal'; did you mean 'gla'\?$"):
        create("gal", dim=32)
    with pytest.raises(ValueError, match=r"no mixer is called 'qqqq'; `linattn list` and linattn.mixers.available\(\) show all of them$"):
        info("qqqq")


def test_an_unknown_option_says_which_there_are():
    with pytest.raises(TypeError, match=r"mixer 'retnet' has no option 'head'; did you mean 'heads'\?$"):
        create("retnet", dim=32, head=2)
    with pytest.raises(TypeError, match="'lstm' has no option 'heads'; its options are: dim$"):
        create("lstm", dim=32, heads=2)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gla", {"heads": "4"}, "heads must be an integer, but came as '4'"),
        ("gla", {"heads": True}, "heads must be an integer, but came as True"),
        ("gla", {"rank": 2.5}, "rank must be an integer, but came as 2.5"),
        ("gla", {"tau": math.nan}, "tau must be a number, but came as nan"),
        ("softmax", {"kv_heads": "1"}, "kv_heads must be an integer or None, but came as '1'"),
        ("softmax", {"causal": "no"}, "causal must be True or False, but came as 'no'"),
        ("s4d", {"init": 3}, "init must be a string, but came as 3"),
        ("mlstm", {"soft_cap": 0.0}, "soft_cap must be positive, but came as 0.0"),
        ("gla", {"tau": -1.0}, "tau must be positive, but came as -1.0"),
        ("gated_deltanet", {"key_size": 0}, "key_size must be at least 1, but came as 0"),
        ("mamba2", {"state_size": -1}, "state_size must be at least 1, but came as -1"),
        ("s4", {"dt_min": 0.2, "dt_max": 0.1}, "must be 0 < dt_min <= dt_max, both finite, but came as dt_min 0.2 and dt_max 0.1"),
        ("retnet", {"eps": -1.0}, "eps must be at least 0, but came as -1.0"),
        ("softmax", {"base": 0.0}, "base must be positive, but came as 0.0"),
        ("gla", {"value_ratio": -1.0}, "dim * value_ratio must be a positive multiple of its heads, but came as -32"),
        ("comba", {"value_ratio": -1.0}, "dim * value_ratio must be a positive multiple of its heads, but came as -32"),
        ("lru", {"max_phase": -1.0}, "max_phase must be positive, but came as -1.0"),
        ("rwkv6", {"eps": -1.0}, "eps must be at least 0, but came as -1.0"),
        ("rwkv7", {"eps": -1.0}, "eps must be at least 0, but came as -1.0"),
        ("longformer", {"dilations": 2}, "dilations must be a list of integers, but came as 2"),
        ("mamba2", {"step_limits": 0.1}, "step_limits must be a list of numbers or None, but came as 0.1"),
        ("swiglu", {"hidden": -1}, "hidden must be at least 1, but came as -1"),
    ],
)
def test_a_value_that_an_option_cannot_have_is_refused_by_name(name, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        create(name, dim=32, **options)


def test_numbers_of_numpy_and_whole_ones_for_fractions_are_numbers():
    assert create("gla", dim=32, heads=np.int64(2), tau=16, key_ratio=np.float32(0.5)).heads == 2
    assert create("comba", dim=32, correction=0).correction.is_floating_point()


def test_options_of_a_strangers_type_are_his_own_matter(own_register):
    """Annotations other than numbers, strings and booleans, and missing ones, are not checked."""

    @registry.register("strange", title="Strange")
    class Strange(linattn.Mixer):
        def __init__(self, dim: int, sizes: set[int] | int = 3, other=None, heads: "int" = 1):
            super().__init__(dim)
            self.sizes, self.other, self.heads = sizes, other, heads

    assert create("strange", dim=4, sizes="3", other=1.5, heads=2).sizes == "3"
    with pytest.raises(ValueError, match="heads must be an integer, but came as None"):
        create("strange", dim=4, heads=None)


@pytest.mark.parametrize("name", sorted(NINE - {"lstm", "mamba2"}))
def test_heads_that_do_not_divide_are_refused(name):
    with pytest.raises(ValueError, match="must be a positive multiple of its heads"):
        create(name, dim=32, heads=5)


def test_mamba2_sizes_are_refused():
    with pytest.raises(ValueError, match="expand \\* dim must be a multiple of head_dim = 60, but is 64"):
        create("mamba2", dim=32, head_dim=60)
    with pytest.raises(ValueError, match="but came as 2 with 3 heads"):
        create("mamba2", dim=64, groups=3)


def test_a_name_is_taken_once(own_register):
    class Other(linattn.Mixer):
        pass

    with pytest.raises(ValueError, match=r"a mixer 'gla' is registered already, by linattn\.mixers\.decay\.gla\.GLA"):
        linattn.register("gla", title="mine")(Other)
    linattn.register("test_other", title="mine")(Other)
    linattn.register("test_other", title="mine, once more")(Other)  # a notebook cell is run twice
    assert info("test_other").title == "mine, once more"


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="kind must be one of sequence, cross"):
        linattn.register("x", title="x", kind="sequenz")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"sedes": ("000",)}, "register has no argument 'sedes'; it has: name, title, paper, arxiv"),
        ({"year": "2020"}, "year must be an integer, but came as '2020'"),
        ({"exemptions": 3}, "exemptions must be a dict, but came as 3"),
        ({"title": 3}, "title must be a string, but came as 3"),
    ],
)
def test_what_is_told_of_a_mixer_is_checked_by_name(wrong, says):
    with pytest.raises(TypeError, match=re.escape(says)):
        linattn.register("x", **{"title": "x", **wrong})


def test_what_is_not_told_of_a_mixer_has_a_default(own_register):
    class Mine(linattn.Mixer):
        pass

    known = registry.register("mine", title="Mine", recurrent=False, exemptions=None, families=["softmax attention"])(Mine).info
    assert (known.growth, known.exemptions, known.kind, known.causal) == ("n^2", {}, "sequence", True)
    assert known.families == ("softmax attention",)


MODULE = """
import linattn

@linattn.register("stranger", title="From elsewhere")
class Stranger(linattn.mixers.info("linear").cls):
    pass
"""


@pytest.fixture
def distribution(tmp_path, monkeypatch, own_register):
    """A simulated installed package: modules and a metadata folder."""

    def install(module, code, *points):
        (tmp_path / f"{module}.py").write_text(code)
        meta = tmp_path / f"{module}-1.0.dist-info"
        meta.mkdir()
        (meta / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (meta / "entry_points.txt").write_text("\n".join(["[linattn.mixers]", *points]))
        monkeypatch.syspath_prepend(str(tmp_path))

    yield install
    for module in [m for m in sys.modules if m.startswith("linattn_test_")]:
        del sys.modules[module]


def test_a_package_registers_by_its_entry_point(distribution):
    distribution("linattn_test_good", MODULE, "stranger = linattn_test_good")
    assert "stranger" in available()
    assert create("stranger", dim=32)(torch.zeros(1, 2, 32)).shape == (1, 2, 32)
    assert linattn.cost("stranger", dim=32, tokens=10).parameters > 0


def test_a_package_that_fails_takes_nobody_down(distribution):
    distribution("linattn_test_bad", "raise RuntimeError('no luck')", "bad = linattn_test_bad")
    distribution("linattn_test_good", MODULE, "stranger = linattn_test_good")
    with pytest.warns(UserWarning, match="mixer plugin bad \\(linattn_test_bad\\) did not load: no luck"):
        assert set(available()) >= NINE | {"stranger"}


@pytest.mark.parametrize("dim", [0, -32, "32", 32.0, True])
def test_a_dim_that_is_no_width_is_refused(dim):
    with pytest.raises(ValueError, match="dim must be an integer of at least 1, but came as"):
        create("hgrn", dim=dim)


def test_a_call_refuses_what_is_no_tensor_or_state():
    mixer = create("rwkv6", dim=32)
    with pytest.raises(TypeError, match="x must be a tensor, but came as list"):
        mixer([1.0])
    with pytest.raises(ValueError, match=r"x must be floating point, but came as torch\.int32"):
        mixer(torch.zeros(1, 2, 32, dtype=torch.int32))
    for state in (linattn.State([]), torch.zeros(1), "S"):
        with pytest.raises(TypeError, match=f"state must be a dict of tensors.*{type(state).__name__}"):
            mixer(torch.zeros(1, 2, 32), state)


def test_routing_takes_a_batch_without_rows():
    assert create("routing", dim=32)(torch.zeros(0, 4, 32)).shape == (0, 4, 32)


@pytest.mark.parametrize("name", [n for n in available() if info(n).kind == "grid"])
def test_a_grid_without_places_costs_no_operations(name):
    assert linattn.cost(name, dim=32, tokens=0).flops == 0


def test_a_feed_forward_of_others_needs_no_inner_width(own_register):
    @linattn.register("third_ffn", title="Third", kind="feed-forward", causal=False, linear_in_values=False)
    class Third(linattn.mixers.kinds.FeedForward):
        def forward(self, x):
            return x

    config = linattn.LMConfig(vocab_size=8, dim=32, layers=1, mixer="gla", ffn="third_ffn")
    assert linattn.LanguageModel(config)(torch.zeros(1, 3, dtype=torch.int64)).shape == (1, 3, 8)


def test_a_file_in_a_folder_is_all_that_a_mixer_needs(own_register, monkeypatch, tmp_path):
    folder = tmp_path / "house" / "family"
    folder.mkdir(parents=True)
    (tmp_path / "house" / "__init__.py").touch()
    (folder / "__init__.py").write_text('FAMILY = "kernels"\n')
    (folder / "mine.py").write_text(
        "from linattn.mixers import register\nfrom linattn.mixers.kernel.linear import Linear\n\n"
        '@register("in_a_folder", title="Mine")\nclass Mine(Linear):\n    pass\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_PACKAGES", ("house",))
    assert "in_a_folder" in available() and families(info("in_a_folder")) == ("kernels",)


def test_importing_the_mixers_loads_none_of_them(programs):
    code = "import sys, linattn.mixers as m; print('linattn.mixers.decay.gla' in sys.modules, m.info('gla').name, m.info('swiglu').name)"
    assert programs.python("-c", code).stdout.split() == ["False", "gla", "swiglu"]


def test_unknown_families_are_refused():
    with pytest.raises(ValueError, match="families must be one of softmax attention, .*, but came as 'kernel'"):
        registry.register("x", title="x", families=("kernel",))


def test_classes_are_names_of_the_module():
    assert mixers.GLA is info("gla").cls and mixers.SwiGLU is info("swiglu").cls
    assert {"GLA", "create"} <= set(dir(mixers))
    for wrong, hint in (("Gla", "did you mean 'GLA'"), ("creat", "did you mean 'create'")):
        with pytest.raises(AttributeError, match=f"has no attribute '{wrong}'; {hint}"):
            getattr(mixers, wrong)
