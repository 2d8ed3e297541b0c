"""Pages of the documentation site that are not files in docs/: the home page, CONTRIBUTING and others, and the API
reference.

MkDocs calls the functions `on_files` and `on_page_markdown` (see `hooks` in mkdocs.yml). The pages in docs/ are written for
a code host, where they can link to every file of the repository. The site contains only some of these files, so links to the
others become plain text. A public name without a docstring ends the build.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]

HOME = "index.md"
_ADDED = {
    "README.md": HOME,
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
"""Files of the repository's root, and the names of their pages."""

_REFERENCES = {
    "api/gaudi_bert.md": (
        "gaudi_bert",
        "The packer as a library. It reads and writes no files, and its results are numpy arrays.",
    ),
    "api/pytorch.md": ("gaudi_bert.pytorch", "Packs in PyTorch. These names need the extra `pytorch`."),
}
"""The page of each package whose names are public, and the sentence with which the page begins."""

# Links in Markdown: `[text](target)`, and `[name]: target` for the links `[text][name]`.
_INLINE = re.compile(r"(!?)\[([^\]]+)\]\(([^)\s]+)\)")
_DEFINED = re.compile(r"^\[([^\]]+)\]: (\S+)$", re.M)
_USED = re.compile(r"\[([^\]]+)\]\[([^\]]+)\]")
_PICTURE = re.compile(r'(<img src=")([^"]+)"')


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in docs/ to the files of the site."""
    for source, page in _ADDED.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for page, (package, sentence) in _REFERENCES.items():
        files.append(File.generated(config, page, content=reference_page(package, sentence)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite the links of a page for the site."""
    del config
    source = next((name for name, added in _ADDED.items() if added == page.file.src_uri), f"docs/{page.file.src_uri}")
    return links_for_site(markdown, source, page.file.src_uri, {file.src_uri for file in files})


def reference_page(package: str, sentence: str) -> str:
    """Write the page of a package: one heading and one entry for each of its public names.

    Raises:
        PluginError: a public function, class or method has no docstring.
    """
    entries, missing = [], []
    functions_first = sorted(public_names(package).items(), key=lambda entry: (entry[0][0].isupper(), entry[0]))
    for name, module in functions_first:
        missing += undocumented(name, module)
        entries.append(f"::: {module}.{name}\n    options:\n      heading_level: 2\n")
    if missing:
        raise PluginError(f"{package}: write a docstring for each of: {', '.join(missing)}")
    return f"# {package}\n\n{sentence}\n\n" + "\n".join(entries)


def public_names(package: str) -> dict[str, str]:
    """Return the public names of a package and the module that defines each, as its imports for type checkers state them."""
    tree = ast.parse((ROOT / package.replace(".", "/") / "__init__.py").read_text(encoding="utf-8"))
    return {
        alias.name: node.module
        for guarded in tree.body
        if isinstance(guarded, ast.If) and ast.unparse(guarded.test) == "TYPE_CHECKING"
        for node in guarded.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def undocumented(name: str, module: str) -> list[str]:
    """Return `name` and its public methods, as far as they have no docstring in the file of `module`."""
    path = ROOT / f"{module.replace('.', '/')}.py"
    defined = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if getattr(node, "name", "") == name]
    if not defined:
        raise PluginError(f"{path}: does not define {name}")
    methods = [
        node
        for node in getattr(defined[0], "body", [])
        if isinstance(node, ast.FunctionDef) and isinstance(defined[0], ast.ClassDef) and not node.name.startswith("_")
    ]
    return [
        name if node is defined[0] else f"{name}.{node.name}"
        for node in (defined[0], *methods)
        if not ast.get_docstring(node)
    ]


def links_for_site(markdown: str, source: str, page: str, pages: set[str]) -> str:
    """Rewrite links of a page that is in the file `source` of the repository, and `page` of the site.

    A link to a file that is a page becomes a link to that page. A link to any other file of the repository becomes plain
    text.
    """

    def rewrite(target: str) -> str | None:
        if re.match(r"[a-z]+:|#", target):
            return target
        path, _, anchor = target.partition("#")
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        linked = HOME if file == "docs/README.md" else _ADDED.get(file, file.removeprefix("docs/"))
        if not (ROOT / file).exists():
            return target  # MkDocs then reports it as broken
        if linked not in pages or (linked == file and file not in _ADDED):
            return None
        return posixpath.relpath(linked, posixpath.dirname(page) or ".") + (f"#{anchor}" if anchor else "")

    def replace_inline(match: re.Match[str]) -> str:
        target = rewrite(match[3])
        return match[2] if target is None else f"{match[1]}[{match[2]}]({target})"

    definitions = {name: rewrite(target) for name, target in _DEFINED.findall(markdown)}
    parts = re.split(r"(```.*?```)", markdown, flags=re.S)
    for number in range(0, len(parts), 2):
        text = _INLINE.sub(replace_inline, parts[number])
        text = _USED.sub(lambda match: match[1] if definitions.get(match[2], "") is None else match[0], text)
        text = _PICTURE.sub(lambda match: f'{match[1]}{rewrite(match[2]) or match[2]}"', text)
        parts[number] = _DEFINED.sub(
            lambda match: f"[{match[1]}]: {definitions[match[1]]}" if definitions[match[1]] else "", text
        )
    return "".join(parts)
