"""The documentation that every CPython carries, as small corpora that need no download.

`python-docs` are the topics of its manual (`pydoc_data.topics`): some 80 long texts. `python-docstrings` are the docstrings
of its standard library, read from the source files without importing any: some 6,000 texts, most of them shorter than a row.
Both are a function of the Python that runs, and differ a little from one version to the next.
"""

from __future__ import annotations

import ast
import gc
import sys
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from gaudi_bert.common.errors import InputError

__all__ = ["docstrings_of_source", "python_texts"]

# Left out: what some distributions pack apart, tests, and modules that are jokes.
_NOT_EVERYWHERE = {"distutils", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "test", "tkinter", "turtledemo"}
_NOT_READ = {"antigravity", "this"}
_TEST_FOLDERS = {"test", "tests"}

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@lru_cache(maxsize=2)
def python_texts(name: str) -> dict[str, str]:
    """The texts that `name`, a key of `BUILT_IN_TEXTS`, stands for, by the name of the topic or of what is documented.

    Raises:
        InputError: this Python has no source files of its standard library.
    """
    if name == "python-docs":
        from pydoc_data import topics

        return dict(topics.topics)
    texts = _standard_docstrings(Path(sysconfig.get_path("stdlib")))
    if not texts:
        raise InputError(f"prepare.text: {name}: this Python has no source files of its library; name files, or python-docs")
    return texts


def _standard_docstrings(library: Path) -> dict[str, str]:
    texts: dict[str, str] = {}
    # Millions of short-lived nodes: the collector would look through them again and again, in vain.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for module, path in _modules(library):
            for name, text in docstrings_of_source(path.read_bytes(), module):
                texts.setdefault(name, text)
    finally:
        if was_enabled:
            gc.enable()
    return texts


def _modules(library: Path) -> Iterator[tuple[str, Path]]:
    """Names and files of the modules that are written in Python, sorted."""
    for name in sorted(sys.stdlib_module_names - _NOT_EVERYWHERE - _NOT_READ):
        if (library / f"{name}.py").is_file():
            yield name, library / f"{name}.py"
        for path in sorted((library / name).rglob("*.py")):
            parts = path.relative_to(library).with_suffix("").parts
            if not _TEST_FOLDERS.intersection(parts):
                yield ".".join(parts).removesuffix(".__init__"), path


def docstrings_of_source(source: bytes, module: str) -> Iterator[tuple[str, str]]:
    """Qualified name and docstring (dedented) of the module and of the classes and functions in it, in their order."""
    yield from _docstrings(ast.parse(source), module)


def _docstrings(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, _Documented):
        text = ast.get_docstring(node)
        if text:
            yield name, text
    for field in ("body", "orelse", "handlers", "finalbody"):
        for child in getattr(node, field, ()):
            own = getattr(child, "name", None) if isinstance(child, _Documented) else None
            yield from _docstrings(child, f"{name}.{own}" if own else name)
