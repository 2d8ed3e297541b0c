"""The rule for comparing what was computed, read from the syntax of all tests: `agree` to a bound, or `identical`.

Two computations of different shape never agree to the last digit on every processor. So a test compares losses, metrics,
scores and the like with `agree`; or, where one computation is run twice or a value is copied, with `identical`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
HOME = TESTS / "builders" / "agree.py"
OTHER_WAYS = {"approx", "allclose", "assert_allclose", "assert_almost_equal", "assert_array_almost_equal", "isclose"}
COMPUTED = re.compile(
    r"(?<![a-z])(loss(es)?|perplexit(y|ies)|accurac(y|ies)|metrics|probabilities|scores?|logits|gradients?|moments?"
    r"|norms?|embeddings?|vectors?|describe)(?![a-z])"
)
# What is asked of a computed thing and is exact.
EXACT = {"keys", "len", "list", "set", "sorted"}


def computed(node: ast.AST, names: set[str]) -> bool:
    """Whether an expression speaks of something computed, by a name of its own or one of `names`."""
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func).rpartition(".")[2]
        owner = node.func.value if isinstance(node.func, ast.Attribute) else node.func
        return name not in EXACT and any(computed(part, names) for part in (owner, *node.args))
    if isinstance(node, ast.Attribute):
        return bool(COMPUTED.search(node.attr))
    if isinstance(node, ast.Name):
        return node.id in names or bool(COMPUTED.search(node.id))
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and len(node.value) < 40 and bool(COMPUTED.search(node.value))
    return any(computed(child, names) for child in ast.iter_child_nodes(node))


def is_literal(node: ast.AST) -> bool:
    return all(not isinstance(inner, ast.Name | ast.Call) for inner in ast.walk(node))


def names_of_computed(function: ast.FunctionDef) -> set[str]:
    """The variables of a function that hold something computed."""
    names: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and computed(node.value, names):
            names |= {inner.id for target in node.targets for inner in ast.walk(target) if isinstance(inner, ast.Name)}
    return names


def offences(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            if name in OTHER_WAYS:
                yield f"{node.lineno}: {name}: use tests.builders.agree"
        if not isinstance(node, ast.FunctionDef):
            continue
        names = names_of_computed(node)
        for inner in ast.walk(node):
            if not isinstance(inner, ast.Compare) or not any(isinstance(operator, ast.Eq) for operator in inner.ops):
                continue
            sides = [inner.left, *inner.comparators]
            if all(computed(side, names) and not is_literal(side) for side in sides):
                yield f"{inner.lineno}: {ast.unparse(inner)}: use agree, or identical where one computation is run twice"


@pytest.mark.parametrize("folder", sorted(path.name for path in TESTS.iterdir() if path.is_dir() or path.suffix == ".py"))
def test_what_was_computed_is_compared_by_agree_or_identical(folder: str) -> None:
    files = [path for path in [TESTS / folder, *(TESTS / folder).rglob("*.py")] if path.suffix == ".py" and path != HOME]
    wrong = {
        f"{path.relative_to(TESTS)}:{offence}" for path in files for offence in offences(ast.parse(path.read_text("utf-8")))
    }
    assert not wrong, "\n".join(sorted(wrong))


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("assert one.loss == other.loss", True),
        ("printed = [describe_finetuning(folder) for folder in folders]\n    assert printed[0] == printed[1]", True),
        ("ours, theirs = (read(each)['metrics'] for each in folders)\n    assert ours == theirs", True),
        ("assert value == pytest.approx(3)", True),
        ("np.testing.assert_allclose(one, other)", True),
        ("assert len(losses) == len(other_losses)", False),
        ("assert losses.keys() == scores.keys()", False),
        ("assert metrics == {'f1': 1.0}", False),
        ("identical(one.loss, other.loss)", False),
    ],
)
def test_the_rule_is_seen(line: str, wrong: bool) -> None:
    assert bool(list(offences(ast.parse(f"def test():\n    {line}\n")))) == wrong
