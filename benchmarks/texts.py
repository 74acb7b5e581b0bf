"""Gather English text and code from Debian's and PyPI's packages: ``python -m benchmarks.texts FOLDER``.

Needs apt-get, dpkg-deb and pip. Downloads the packages named here to FOLDER/packages (continues where it stopped), extracts their
documentation and sources, and writes

* prose.jsonl, code.jsonl: the documents, without other languages, duplicates, and lines of navigation (those in many documents
of a package)
* sources.json: size and SHA-256 of every package
* sample.jsonl: ``--megabytes`` of the documents, at most 100,000 characters of each, in an order that the seed determines
* tokenizer.json: byte-pair encoding of ``--vocabulary`` tokens, trained on the first 40 million characters of the sample
"""

from __future__ import annotations

import argparse
import hashlib
import html.parser
import itertools
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import positive

DEBIAN = (
    "anarchism bible-kjv-text sword-text-web debian-handbook developers-reference debian-policy harden-doc debian-faq perl-doc"
    " python3.11-doc rust-doc linux-doc-6.1 libboost1.74-doc sqlite3-doc postgresql-doc-15 llvm-14-doc clang-14-doc emacs-common"
    " apache2-doc maxima-doc octave-doc sagemath-doc python-django-doc python-sqlalchemy-doc python-pandas-doc python-scipy-doc"
    " git-doc cmake-doc gnu-standards tcl8.6-doc erlang-doc openjdk-17-doc ghc-doc lilypond-doc-html kicad-doc-en crawl-common"
).split()
PYPI = (
    "sympy django transformers pandas scikit-learn matplotlib scipy numpy networkx sqlalchemy twisted nltk statsmodels mypy pygments"
    " botocore plotly bokeh setuptools pylint ipython jedi rich fonttools lxml-stubs hypothesis aiohttp tornado werkzeug jinja2"
).split()
TEXT, MARKUP, CODE = {".txt", ".md", ".rst", ".pod", ".info", ".sgml"}, {".html", ".htm", ".xhtml"}, {".py", ".pyi"}
SKIPPED = {"script", "style", "nav", "header", "footer", "head"}
BREAKS = {"p", "div", "li", "tr", "pre", "dt", "dd", "br", "h1", "h2", "h3", "h4", "h5", "td"}
COMMON = re.compile(r"\b(?:the|of|and|to|is|in|that|for)\b")
REPEATED = 4  # documents of a package with the same line that make it navigation
SHORTEST = 500  # characters of a document
LONGEST = 100_000  # characters of a document in the sample
LEARNED = 40_000_000  # characters that the tokenizer is trained on
END = "<|end|>"


class Page(html.parser.HTMLParser):
    """Text of an HTML page without scripts and navigation."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.skipping: list[str] = []
        self.verbatim = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        """Track skipped parts, verbatim text and line breaks."""
        if tag in SKIPPED:
            self.skipping.append(tag)
        self.verbatim += tag == "pre"
        if tag in BREAKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        """End what the tag had begun."""
        if self.skipping and self.skipping[-1] == tag:
            self.skipping.pop()
        self.verbatim -= tag == "pre" and self.verbatim > 0
        if tag in BREAKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        """Keep text, with single spaces outside verbatim parts."""
        if not self.skipping:
            self.parts.append(data if self.verbatim else re.sub(r"\s+", " ", data))

    @property
    def text(self) -> str:
        """Text read so far."""
        return re.sub(r"\n\s*\n+", "\n\n", "".join(self.parts)).strip()


def members(path: Path) -> Iterator[tuple[str, bytes]]:
    """Iterate over the names and contents of the documents in a .deb or a wheel."""
    wanted = TEXT | MARKUP | CODE
    if path.suffix == ".deb":
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
                for member in archive:
                    name = member.name.removesuffix(".gz")
                    if member.isfile() and Path(name).suffix in wanted and (stream := archive.extractfile(member)) is not None:
                        yield member.name, stream.read()
    else:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if Path(name).suffix in wanted:
                    yield name, archive.read(name)


def document(name: str, content: bytes) -> str | None:
    """Return the text of a document, or None if it is short, no UTF-8 or not English."""
    if name.endswith(".gz"):
        import gzip

        name, content = name.removesuffix(".gz"), gzip.decompress(content)
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return None
    suffix = Path(name).suffix
    if suffix in MARKUP:
        page = Page()
        page.feed(text)
        text = page.text
    if len(text) < SHORTEST or sum(map(str.isascii, text[:100_000])) < 0.97 * min(len(text), 100_000):
        return None
    if suffix not in CODE and len(COMMON.findall(text)) < len(text) / 200:
        return None
    return text


def extracted(path: Path) -> tuple[list[str], list[str]]:
    """Extract the prose and the code of the package ``path``."""
    found: list[tuple[bool, str]] = []
    seen: set[bytes] = set()
    for name, content in members(path):
        text = document(name, content)
        key = b"" if text is None else hashlib.sha256(text.encode()).digest()
        if text is not None and key not in seen:
            seen.add(key)
            found.append((Path(name).suffix in CODE, text))
    lines = Counter(line for code, text in found if not code for line in set(text.splitlines()))
    prose = [
        "\n".join(line for line in text.splitlines() if not line.strip() or lines[line] < REPEATED) for code, text in found if not code
    ]
    return [text for text in prose if len(text) >= SHORTEST], [text for code, text in found if code]


def download(packages: Path) -> list[Path]:
    """Download missing packages to ``packages``; returns all files."""
    packages.mkdir(parents=True, exist_ok=True)

    def path_of(name: str, suffix: str) -> Path | None:
        return next(
            (p for p in sorted(packages.glob(f"*{suffix}")) if p.name.lower().replace("_", "-").startswith(name.lower() + "-")), None
        )

    for name in DEBIAN:
        if next(packages.glob(f"{name}_*.deb"), None) is None:
            subprocess.run(["apt-get", "download", name], cwd=packages, check=True)
    for name in PYPI:
        if path_of(name, ".whl") is None:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet", "-d", str(packages), name]
            subprocess.run(command, check=True)
    return sorted([*packages.glob("*.deb"), *packages.glob("*.whl")])


def extract(folder: Path) -> None:
    """Extract all packages to prose.jsonl, code.jsonl and sources.json."""
    paths = download(folder / "packages")
    sources: list[dict[str, Any]] = []
    seen: set[int] = set()  # hashes of documents
    with (
        ThreadPoolExecutor(2) as pool,
        (folder / "prose.jsonl").open("w", encoding="utf-8") as prose,
        (folder / "code.jsonl").open("w", encoding="utf-8") as code,
    ):
        for path, texts in zip(paths, pool.map(extracted, paths), strict=True):
            sizes = []
            for out, documents in zip((prose, code), texts, strict=True):
                fresh = [text for text in dict.fromkeys(documents) if hash(text) not in seen]
                seen.update(map(hash, fresh))
                out.writelines(_line(text) for text in fresh)
                sizes.append(sum(map(len, fresh)))
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            sources.append({"package": path.name, "sha256": digest, "prose": sizes[0], "code": sizes[1]})
            print(f"{path.name}: {sizes[0] / 1e6:.1f} million characters of prose, {sizes[1] / 1e6:.1f} of code", flush=True)
    (folder / "sources.json").write_text(json.dumps(sources, indent=1) + "\n")
    print(f"in all {sum(s['prose'] for s in sources) / 1e6:.0f} of prose, {sum(s['code'] for s in sources) / 1e6:.0f} of code")


def sample(folder: Path, characters: int, seed: int) -> None:
    """Write documents to sample.jsonl until they have so many ``characters``."""
    lines = [line for name in ("prose", "code") for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").split("\n") if line]
    lines.sort(key=lambda line: hashlib.sha256(f"{seed} {line}".encode()).digest())
    total = 0
    with (folder / "sample.jsonl").open("w", encoding="utf-8") as out:
        for line in lines:
            text = json.loads(line)["text"][:LONGEST]
            out.write(_line(text))
            total += len(text)
            if total >= characters:
                break
    print(f"{total / 1e6:.0f} million characters in the sample")


def learn(folder: Path, vocabulary: int) -> None:
    """Train tokenizer.json on the beginning of sample.jsonl."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_first(folder / "sample.jsonl", LEARNED), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def _first(path: Path, characters: int) -> Iterator[str]:
    """Iterate over the first documents of ``path`` up to ``characters`` in total."""
    with path.open(encoding="utf-8") as file:
        lengths, texts = itertools.tee(json.loads(line)["text"] for line in file)
        sums = itertools.accumulate(map(len, lengths))
        yield from (text for text, total in itertools.takewhile(lambda pair: pair[1] < characters, zip(texts, sums, strict=False)))


def _line(text: str) -> str:
    return json.dumps({"text": text}, ensure_ascii=False) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Download, extract, draw a sample and train a tokenizer on it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.texts", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--megabytes", type=positive, default=250, help="millions of characters in the sample")
    parser.add_argument("--vocabulary", type=positive, default=8192)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    if not (asked.folder / "sources.json").exists():
        extract(asked.folder)
    sample(asked.folder, asked.megabytes * 10**6, asked.seed)
    learn(asked.folder, asked.vocabulary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
