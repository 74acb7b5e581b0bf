"""Texts of options in the documentation and ``linattn show``."""

from types import SimpleNamespace

import pytest

import linattn
from linattn.mixers.option_texts import ALONE, TEXTS, options

NAMES = linattn.mixers.available()


@pytest.mark.parametrize("name", NAMES)
def test_every_option_has_a_text(name):
    found = options(linattn.mixers.info(name))
    assert [option.name for option in found if not option.text] == []
    assert {*ALONE.get(name, {})} <= {option.name for option in found}
    assert "dim" not in [option.name for option in found]


def test_no_text_is_of_an_option_that_is_not_there():
    used = {option.name for name in NAMES for option in options(linattn.mixers.info(name))}
    assert {*TEXTS} <= used and {*ALONE} <= {*NAMES}


def test_where_texts_come_from():
    gla = {option.name: option for option in options(linattn.mixers.info("gla"))}
    assert (gla["heads"].text, gla["heads"].type, gla["heads"].default) == ("number of heads", "int", "4")  # shared by many
    mom = {option.name: option.text for option in options(linattn.mixers.info("mom"))}
    assert mom["memories"] == "number of memories to choose from"  # from its docstring's Args
    assert {o.name: o.text for o in options(linattn.mixers.info("mamba"))}["rank"].endswith("rounded up")  # of Mamba alone


def test_an_option_without_a_text_is_seen():
    class Bare:
        """A mixer whose option nothing describes."""

        def __init__(self, dim: int, unheard: int = 3) -> None: ...

    (found,) = options(SimpleNamespace(name="bare", cls=Bare))
    assert (found.name, found.text, found.default) == ("unheard", "", "3")
