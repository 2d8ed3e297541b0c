"""Building kustomizations."""

from tests.builders.kustomize import kustomize  # noqa: F401
