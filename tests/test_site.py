"""The documentation site: which names its reference has, and where the links of its pages lead."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.builders.pages import ROOT, load_module


@pytest.fixture(scope="module")
def site() -> Any:
    """The hooks of mkdocs.yml, docs/site.py."""
    pytest.importorskip("mkdocs", reason="the documentation site needs MkDocs; pip install '.[docs]'")
    return load_module(ROOT / "docs" / "site.py")


def test_links_lead_to_pages_of_the_site_and_other_files_become_text(site: Any) -> None:
    pages = {"index.md", "start.md", "pack.md", "CONTRIBUTING.md", "report.png"}
    rewritten = site.links_for_site(
        "[a](docs/start.md#install), [`b`](gaudi_bert/__init__.py), [c][d], [e][f], [g](https://host.invalid)\n"
        '<img src="docs/report.png">\n\n[d]: docs/pack.md\n[f]: LICENSE\n\n```\n[h](docs/start.md)\n```\n',
        "README.md",
        "index.md",
        pages,
    )
    assert rewritten == (
        "[a](start.md#install), `b`, [c][d], e, [g](https://host.invalid)\n"
        '<img src="report.png">\n\n[d]: pack.md\n\n\n```\n[h](docs/start.md)\n```\n'
    )
    assert site.links_for_site("[all](README.md) [us](../CONTRIBUTING.md)", "docs/start.md", "start.md", pages) == (
        "[all](index.md) [us](CONTRIBUTING.md)"
    )
    # MkDocs reports what is nowhere.
    assert site.links_for_site("[x](nothing.md)", "docs/start.md", "start.md", pages) == "[x](nothing.md)"


@pytest.mark.parametrize(("package", "count"), [("gaudi_bert", 5), ("gaudi_bert.pytorch", 11)])
def test_the_reference_has_every_public_name(site: Any, package: str, count: int) -> None:
    module = importlib.import_module(package)
    documented = sum(vars(module)["_NAMES"].values(), ()) if "_NAMES" in vars(module) else module.__all__
    names = set(documented) - {"__version__"}
    assert len(names) == count
    assert set(site.public_names(package)) == names
    assert site.reference_page(package, "A sentence.").count("\n::: gaudi_bert.") == count


def test_a_public_name_without_a_docstring_is_named(site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "part.py").write_text(
        'class Shown:\n    """A class."""\n\n    def method(self): ...\n\n    def _hidden(self): ...\n'
    )
    monkeypatch.setattr(site, "ROOT", tmp_path)
    assert site.undocumented("Shown", "part") == ["Shown.method"]
    with pytest.raises(site.PluginError, match="does not define Other"):
        site.undocumented("Other", "part")
