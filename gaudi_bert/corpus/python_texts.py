"""The documentation that is bundled with CPython, as small text corpora that need no download.

`python-docs` contains the topics of the manual (`pydoc_data.topics`), about 80 long texts. `python-docstrings` contains the
docstrings of the standard library, about 6,000 texts, most of which are shorter than a row. Both differ a little between
versions of Python. The docstrings are also provided as labelled rows for tasks.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from gaudi_bert.common.errors import InputError

# The docstrings of these modules are left out. Some distributions ship some of these modules separately, and some modules
# contain only tests or jokes.
_SKIPPED_MODULES = {
    "antigravity",
    "distutils",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "test",
    "this",
    "tkinter",
    "turtledemo",
}
_TEST_FOLDERS = {"test", "tests"}

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

# The first line and the rest of a docstring form a training pair if the rest has at least this many words.
_LEAST_WORDS = 3

# The number of labels in the classification rows. Each label is a package, and the packages with the most docstrings are
# chosen.
LABELS = 12
# On average, one row in five is held out for evaluation.
HELD_OUT_OF = 5


# --- texts


@lru_cache(maxsize=2)
def load_python_texts(corpus_name: str) -> dict[str, str]:
    """Load a built-in corpus. Return a dictionary of its texts, where the keys are topics or qualified names.

    Args:
        corpus_name: A key of `BUILT_IN_TEXTS`.

    Returns:
        Each text by the name of its topic, or by the qualified name of the module, class or function that it documents.

    Raises:
        InputError: This Python was installed without the source files of its standard library.
    """
    if corpus_name == "python-docs":
        from pydoc_data import topics

        return dict(topics.topics)
    texts = _read_library_docstrings(Path(sysconfig.get_path("stdlib")))
    if not texts:
        raise InputError(
            f"prepare.text: {corpus_name}: this Python lacks the source files of its standard library; use python-docs"
        )
    return texts


def _read_library_docstrings(library_folder: Path) -> dict[str, str]:
    """Read the docstrings of the standard library. Return a dictionary from qualified names to docstrings, in the order of
    packages and files.
    """
    texts: dict[str, str] = {}
    # Parsing creates millions of nodes. Disable the garbage collector, which would repeatedly search them without freeing
    # any.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for package in sorted(sys.stdlib_module_names - _SKIPPED_MODULES):
            for path in (library_folder / f"{package}.py", *sorted((library_folder / package).rglob("*.py"))):
                parts = path.relative_to(library_folder).with_suffix("").parts
                if path.is_file() and not _TEST_FOLDERS.intersection(parts):
                    module = ".".join(parts).removesuffix(".__init__")
                    for name, text in _find_docstrings(ast.parse(path.read_bytes()), module):
                        texts.setdefault(name, text)
    finally:
        if was_enabled:
            gc.enable()
    return texts


def _find_docstrings(node: ast.AST, qualified_name: str) -> Iterator[tuple[str, str]]:
    """Find all docstrings in a syntax tree. Yield (qualified name, dedented docstring) in source order."""
    if isinstance(node, _Documented):
        text = ast.get_docstring(node)
        if text:
            yield qualified_name, text
    for field in ("body", "orelse", "handlers", "finalbody"):
        for child in getattr(node, field, ()):
            child_name = getattr(child, "name", None) if isinstance(child, _Documented) else None
            yield from _find_docstrings(child, f"{qualified_name}.{child_name}" if child_name else qualified_name)


# --- rows of a task
#
# Whether a row is held out depends only on the name of its text.

# A list of (row, whether the row is held out for evaluation). Each row maps column names to values.
HeldOutRows = list[tuple[dict[str, str], bool]]


def make_labelled_docstring_rows(documents: Mapping[str, Sequence[str]]) -> HeldOutRows:
    """Make rows for text classification from docstrings. The label of each row is the package of the docstring.

    Only the `LABELS` packages with the most docstrings are used. Each text occurs only once, so that no held-out row is also
    a training row.

    Args:
        documents: The sentences of each docstring by qualified name, from `convert_texts_to_documents`.

    Returns:
        Rows with the columns `text` and `label`, each with whether it is held out, sorted by name.
    """
    by_text: dict[str, str] = {}
    for name, sentences in documents.items():
        by_text.setdefault(" ".join(sentences), name)
    counts = Counter(map(_find_package, by_text.values()))
    chosen = set(sorted(counts, key=lambda label: (-counts[label], label))[:LABELS])
    return [
        ({"text": text, "label": _find_package(name)}, _is_held_out(name))
        for text, name in sorted(by_text.items(), key=lambda item: item[1])
        if _find_package(name) in chosen
    ]


def make_titled_docstring_rows(docstrings: Mapping[str, str]) -> HeldOutRows:
    """Make pairs for training an embedding model from docstrings. In each pair, the first line is the anchor and the rest is
    the positive.

    Docstrings with too few words after the first line are left out. Each anchor and each positive occurs only once.

    Args:
        docstrings: The docstrings by qualified name, from `load_python_texts`.

    Returns:
        Rows with the columns `anchor` and `positive`, each with whether it is held out, sorted by name.
    """
    titles: set[str] = set()
    bodies: set[str] = set()
    rows = []
    for name, text in sorted(docstrings.items()):
        title, _, rest = text.strip().partition("\n")
        title, body = " ".join(title.split()), " ".join(rest.split())
        if title and len(body.split()) >= _LEAST_WORDS and title not in titles and body not in bodies:
            titles.add(title)
            bodies.add(body)
            rows.append(({"anchor": title, "positive": body}, _is_held_out(name)))
    return rows


def _find_package(qualified_name: str) -> str:
    """Return the top-level package of a qualified name without leading underscores, such as `xml` for
    `xml.dom.minidom.Node`.
    """
    return qualified_name.split(".")[0].lstrip("_")


def _is_held_out(qualified_name: str) -> bool:
    """Return whether a docstring is held out for evaluation. The decision depends only on a hash of the qualified name."""
    return int.from_bytes(hashlib.sha256(qualified_name.encode()).digest()[:8], "big") % HELD_OUT_OF == 0
