"""The variables that TensorFlow reads."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import pytest

from gaudi_bert.engines.tensorflow import prepare_tensorflow


def test_onednn_is_used_on_every_processor_unless_the_user_says_otherwise() -> None:
    unset: dict[str, str] = {}
    prepare_tensorflow(unset)
    assert unset == {"TF_ENABLE_ONEDNN_OPTS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    chosen = {"TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPP_MIN_LOG_LEVEL": "1"}
    before = dict(chosen)
    prepare_tensorflow(chosen)
    assert chosen == before


def test_on_gaudi_the_vendor_chooses_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("habana_frameworks")
    package.__spec__ = types.SimpleNamespace(name="habana_frameworks")
    monkeypatch.setitem(sys.modules, "habana_frameworks", package)
    environment: dict[str, str] = {}
    prepare_tensorflow(environment)
    assert environment == {"TF_CPP_MIN_LOG_LEVEL": "3"}


@pytest.mark.parametrize("module", ["gaudi_bert.engines.tensorflow.bert", "gaudi_bert.engines.tensorflow.engine"])
def test_it_is_set_before_tensorflow_is_loaded(module: str) -> None:
    """The import is stopped where it comes to TensorFlow, which would read its variables there."""
    code = (
        "import importlib, os, sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'tensorflow':\n"
        "            print(os.environ.get('TF_ENABLE_ONEDNN_OPTS'))\n"
        "            sys.exit()\n"
        "sys.meta_path.insert(0, Watch())\n"
        f"importlib.import_module({module!r})\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TF_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.split() == ["1"], done.stderr
