"""Fixtures that all rooms share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gaudi_bert.common.tensorflow_environment import prepare_tensorflow
from tests.builders.properties import register_profiles

register_profiles()
prepare_tensorflow()  # tests that import TensorFlow themselves run as the product does

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Optional real data (`GAUDI_BERT_SHARED`, default `../shared` beside the checkout); skips loudly without it."""
    folder = Path(os.environ.get("GAUDI_BERT_SHARED", ROOT.parent / "shared")) / "data"
    if not (folder / "wiki-sample").is_dir():
        pytest.skip(f"REAL DATA MISSING: {folder / 'wiki-sample'} is not there; set GAUDI_BERT_SHARED to test on it")
    return folder
