"""Which types of `transformers` are trained on packs correctly: the table of docs/pytorch.md#models-targets-heads.

    python benchmarks/pytorch_models.py [TYPE...]

Without types it tries all that are installed (eight minutes of one core) and writes the table; with types it prints their
verdicts. *right*: each packed sequence gets what its class gives it alone. *refused*: in words of ours. *WRONG*: neither,
which is a defect. *not built*: no small random model of the type can be made here.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.type_scan import scan, table, types

PAGE = Path(__file__).resolve().parent.parent / "docs" / "pytorch.md"
BLOCK = re.compile(r"(?<=<!-- types -->\n).*?(?=\n<!-- end of types -->)", re.DOTALL)


def main() -> None:
    """Print verdicts as they come; write the table when all are known."""
    verdicts = []
    for verdict in scan(sys.argv[1:] or types()):
        verdicts.append(verdict)
        print(*verdict, sep=" | ", flush=True)
    if not sys.argv[1:]:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(BLOCK.sub(lambda _: table(verdicts), page), encoding="utf-8")


if __name__ == "__main__":
    main()
