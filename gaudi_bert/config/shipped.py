"""The pipeline files that the package carries: those of `pipelines/`, by their names, and the one that `init` writes."""

from __future__ import annotations

from pathlib import Path

from gaudi_bert.common.files import read_text

_FOLDER = Path(__file__).resolve().parent
SHIPPED = _FOLDER / "pipelines"


def pipeline_path(path: Path) -> Path:
    """`path`, or, where no such file exists and it is a bare name such as `demo`, that pipeline of the package."""
    shipped = SHIPPED / f"{path}.yaml"
    return shipped if path.name == str(path) and not path.exists() and shipped.is_file() else path


def new_pipeline(name: str) -> str:
    """The text of a pipeline file with the keys that most pipelines set; of `retrieval`, with those of embedding models."""
    template = "new-retrieval.yaml" if name == "retrieval" else "new-pipeline.yaml"
    return read_text(_FOLDER / template).replace("NAME", name)
