"""Plans as their files have them: all groups together, or with a part changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gaudi_bert.artefacts.plan import Plan, part_path


def whole_plan(path: Path) -> dict[str, Any]:
    """plan.json with the `files` and `groups` of all its parts."""
    content = json.loads(path.read_text())
    parts = [json.loads(part_path(path, part).read_text()) for part in range(len(content["parts"]))]
    return {**content, **{key: [entry for part in parts for entry in part[key]] for key in ("files", "groups")}}


def change_part(path: Path, part: int, change: Callable[[dict[str, Any]], object], **listed: Any) -> None:
    """Change a part of a plan, and let the table know its bytes; `listed` are other keys of its entry there."""
    content = json.loads(part_path(path, part).read_text())
    change(content)
    data = json.dumps(content).encode()
    part_path(path, part).write_bytes(data)
    plan = json.loads(path.read_text())
    plan["parts"][part] |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), **listed}
    path.write_text(json.dumps(plan))


def copy_plan(path: Path, folder: Path) -> Path:
    """A copy of a plan with its parts."""
    for part in range(len(Plan.read(path).parts)):
        (folder / part_path(path, part).name).write_bytes(part_path(path, part).read_bytes())
    (folder / path.name).write_bytes(path.read_bytes())
    return folder / path.name
