"""The documentation that every CPython carries, as small corpora that need no download: documents, and labelled rows.

`python-docs` are the topics of its manual (`pydoc_data.topics`): some 80 long texts. `python-docstrings` are the docstrings
of its standard library: some 6,000 texts, most of them shorter than a row. Both differ a little from one version of Python
to the next. A paragraph that several texts have stays in the shortest of them alone, so that no held-out document is also
part of a training document.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from gaudi_bert.common.errors import InputError
from gaudi_bert.corpus.sentences import split_sentences

# Omitted: modules that some distributions ship separately, tests, and modules that are jokes.
_NOT_EVERYWHERE = {"distutils", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "test", "tkinter", "turtledemo"}
_NOT_READ = {"antigravity", "this"}
_TEST_FOLDERS = {"test", "tests"}

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

_RULER = re.compile(r"\s*([*=~^+|\-])[*=~^+|\-\s]*")
_MARKER = re.compile(r"(?:[*\-•]|\d+\.|\[\d+\])\s+")
# Shorter paragraphs ("For example:", "Note:") occur in many texts anyway.
_SHORTEST_REPEATED_PARAGRAPH = 40
# Of what follows the first line of a docstring.
_LEAST_WORDS = 3

LABELS = 12
"""Packages that are labels: those with the most docstrings."""
HELD_OUT_OF = 5
"""One row in so many is held out."""


# --- texts


@lru_cache(maxsize=2)
def python_texts(name: str) -> dict[str, str]:
    """The texts that `name`, a key of `BUILT_IN_TEXTS`, stands for, by the name of the topic or of what is documented."""
    if name == "python-docs":
        from pydoc_data import topics

        return dict(topics.topics)
    texts = _standard_docstrings(Path(sysconfig.get_path("stdlib")))
    if not texts:
        raise InputError(f"prepare.text: {name}: this Python has no source files of its library; name files, or python-docs")
    return texts


def _standard_docstrings(library: Path) -> dict[str, str]:
    """Docstrings of the modules that are written in Python, in the order of their names and files."""
    texts: dict[str, str] = {}
    # Millions of short-lived nodes: the collector would look through them again and again, in vain.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for package in sorted(sys.stdlib_module_names - _NOT_EVERYWHERE - _NOT_READ):
            for path in (library / f"{package}.py", *sorted((library / package).rglob("*.py"))):
                parts = path.relative_to(library).with_suffix("").parts
                if path.is_file() and not _TEST_FOLDERS.intersection(parts):
                    module = ".".join(parts).removesuffix(".__init__")
                    for name, text in _docstrings(ast.parse(path.read_bytes()), module):
                        texts.setdefault(name, text)
    finally:
        if was_enabled:
            gc.enable()
    return texts


def _docstrings(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """Qualified name and docstring (dedented) of a module and of the classes and functions in it, in their order."""
    if isinstance(node, _Documented):
        text = ast.get_docstring(node)
        if text:
            yield name, text
    for field in ("body", "orelse", "handlers", "finalbody"):
        for child in getattr(node, field, ()):
            own = getattr(child, "name", None) if isinstance(child, _Documented) else None
            yield from _docstrings(child, f"{name}.{own}" if own else name)


# --- documents


def documentation_documents(texts: Mapping[str, str]) -> dict[str, list[str]]:
    """One document (a list of sentences) per text, in the order of their names; a text without a sentence gives none."""
    seen: set[str] = set()
    documents: dict[str, list[str]] = {}
    for name in sorted(texts, key=lambda name: (len(texts[name]), name)):
        sentences = _sentences_of_text(texts[name], seen)
        if sentences:
            documents[name] = sentences
    return dict(sorted(documents.items()))


def _sentences_of_text(text: str, seen: set[str]) -> list[str]:
    sentences: list[str] = []
    after_colon = False
    outer_indent = 0
    for paragraph in re.split(r"\n\s*\n", text):
        lines = [line for line in paragraph.splitlines() if line.strip() and not _RULER.fullmatch(line)]
        if not lines:
            continue
        indent = len(lines[0]) - len(lines[0].lstrip())
        is_example = (after_colon and indent > outer_indent) or lines[0].lstrip().startswith(">>>")
        content = " ".join(" ".join(lines).split())
        if not is_example:
            after_colon, outer_indent = content.endswith(":"), indent
        if content in seen:
            continue
        if len(content) >= _SHORTEST_REPEATED_PARAGRAPH:
            seen.add(content)
        if is_example:
            sentences += [" ".join(line.split()) for line in lines]
        elif all("|" in line for line in lines):
            sentences += [" ".join(line.replace("|", " ").split()) for line in lines if line.replace("|", " ").strip()]
        else:
            marker = _MARKER.match(content)
            sentences += split_sentences(content[marker.end() :] if marker else content)
    return sentences


# --- rows of a task, as its files have them, and whether each is held out, which depends on the name of the text alone

HeldOutRows = list[tuple[dict[str, str], bool]]


def labelled_docstrings(texts: Mapping[str, str]) -> HeldOutRows:
    """Docstrings (by qualified name, from `python_texts`) of the `LABELS` packages with the most, in the order of the names.

    The label is the package. A text appears once, so no held-out row is also among the others.
    """
    by_text: dict[str, str] = {}
    for name, sentences in documentation_documents(texts).items():
        by_text.setdefault(" ".join(sentences), name)
    counts = Counter(map(_package, by_text.values()))
    chosen = set(sorted(counts, key=lambda label: (-counts[label], label))[:LABELS])
    return [
        ({"text": text, "label": _package(name)}, _is_held_out(name))
        for text, name in sorted(by_text.items(), key=lambda item: item[1])
        if _package(name) in chosen
    ]


def titled_docstrings(texts: Mapping[str, str]) -> HeldOutRows:
    """Docstrings (by qualified name, from `python_texts`) that have a first line and more, in the order of the names.

    The anchor is the first line, the positive the rest; each appears once.
    """
    titles: set[str] = set()
    bodies: set[str] = set()
    rows = []
    for name, text in sorted(texts.items()):
        title, _, rest = text.strip().partition("\n")
        title, body = " ".join(title.split()), " ".join(rest.split())
        if title and len(body.split()) >= _LEAST_WORDS and title not in titles and body not in bodies:
            titles.add(title)
            bodies.add(body)
            rows.append(({"anchor": title, "positive": body}, _is_held_out(name)))
    return rows


def _package(name: str) -> str:
    """`xml` of `xml.dom.minidom.Node`, `pydecimal` of `_pydecimal.Decimal`."""
    return name.split(".")[0].lstrip("_")


def _is_held_out(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % HELD_OUT_OF == 0
