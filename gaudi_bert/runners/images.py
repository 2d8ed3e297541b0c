"""The full names of container images."""

from __future__ import annotations

from gaudi_bert import __version__
from gaudi_bert.config import ImageSettings
from gaudi_bert.runners.stage_table import Stage

__all__ = ["image_reference", "stage_image"]


def image_reference(images: ImageSettings, name: str) -> str:
    """`registry/name:tag` as container engines take it; unless the pipeline names a tag, it is this program's version."""
    prefix = f"{images.registry}/" if images.registry else ""
    return f"{prefix}{name}:{images.tag or __version__}"


def stage_image(images: ImageSettings, stage: Stage) -> str:
    """The full name of the image that `stage` runs in."""
    return image_reference(images, images.train if stage.trains else images.data)
