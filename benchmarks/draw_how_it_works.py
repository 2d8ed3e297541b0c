"""Draw docs/how-it-works.svg, the picture of the README.

python benchmarks/draw_how_it_works.py
"""

from __future__ import annotations

from pathlib import Path

from gaudi_bert.common.files import write_text
from gaudi_bert.reporting.how_it_works import draw_how_it_works

if __name__ == "__main__":
    path = Path(__file__).resolve().parent.parent / "docs" / "how-it-works.svg"
    write_text(path, draw_how_it_works())
    print(f"{path}: {path.stat().st_size:,} bytes")
