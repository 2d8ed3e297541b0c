"""Reading YAML that people write, with what could take for ever or hide a mistake refused.

Aliases are followed, but each counts as much as it stands for, so that a few lines of aliases of aliases do not become
millions of values. A key that is given twice is an error: YAML forbids it, and PyYAML takes the last one in silence.
"""

from __future__ import annotations

from typing import Any

import yaml

from gaudi_bert.common.errors import InputError, shortened

MOST_CHARACTERS = 1 << 18
MOST_DEPTH = 32
MOST_VALUES = 10_000


class _Loader(yaml.SafeLoader):
    """`yaml.SafeLoader` with limits, and without repeated keys."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._values = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """As PyYAML's, counting values and depth."""
        before = self._values
        self._depth += 1
        is_alias = self.check_event(yaml.AliasEvent)
        if self._depth > MOST_DEPTH:
            raise yaml.YAMLError(f"nested more than {MOST_DEPTH} deep")
        node = super().compose_node(parent, index)
        if is_alias and id(node) not in self._sizes:
            raise yaml.YAMLError("a value that holds itself")
        self._values += self._sizes[id(node)] if is_alias else 1
        if self._values > MOST_VALUES:
            raise yaml.YAMLError(f"more than {MOST_VALUES:,} values, aliases counted as often as they are used")
        self._sizes.setdefault(id(node), self._values - before)
        self._depth -= 1
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """As PyYAML's, but a key that is given twice is an error."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if key.value in lines:
                    name = shortened(key.value)
                    raise yaml.YAMLError(f"`{name}` is given twice, in lines {lines[key.value]} and {line}; give it once")
                lines[key.value] = line
        return node


def parse_yaml(text: str, source: str) -> Any:
    """The value of a YAML text, which errors call `source`."""
    if len(text) > MOST_CHARACTERS:
        raise InputError(f"{source}: {len(text):,} characters; settings have at most {MOST_CHARACTERS:,}")
    try:
        return _Loader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        raise InputError(
            f"{source}: {where}not valid YAML: {shortened(str(error.problem or error.context), 200)}"
        ) from error
    except (yaml.YAMLError, ValueError) as error:
        # PyYAML raises ValueError for numbers and dates that cannot be.
        raise InputError(f"{source}: not a YAML file: {shortened(str(error), 240)}") from error
