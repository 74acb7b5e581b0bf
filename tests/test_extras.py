"""A missing package is named with the requirement that installs it, never by linattn's extra."""

from linattn import extras


def test_the_requirement_is_named(monkeypatch):
    monkeypatch.setattr(extras, "requires", lambda name: [
        "torch>=2.11", 'gguf>=0.17; extra == "gguf"', "linattn[hf]; extra == 'train'", "transformers<6,>=5.17; extra == 'hf'",
        "rich>=13; extra == 'train'", "absent; extra == 'train'", "scikit-learn>=1.6; extra == 'vision'",
    ])  # fmt: skip
    monkeypatch.setattr(extras, "_installed", lambda name: name == "rich")
    told = "transformers is not installed; this command needs it: pip install 'transformers<6,>=5.17' absent"
    assert extras.missing("transformers") == told
    assert extras.missing("gguf", "a GGUF file") == "gguf is not installed; a GGUF file needs it: pip install 'gguf>=0.17'"
    assert extras.missing("sklearn").endswith("pip install 'scikit-learn>=1.6'")
    assert extras.missing("wandb").endswith("pip install wandb")


def test_the_metadata_of_the_package_have_the_extras():
    assert {"transformers", "accelerate", "rich"} <= dict(extras.requirements("train")).keys()
    assert all("linattn" not in words for words in dict(extras.requirements("train")).values())
