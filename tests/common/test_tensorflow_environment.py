"""The variables that TensorFlow reads, and a log for what is written below Python."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.tensorflow_environment import native_lines_to, prepare_tensorflow
from tests.builders.command_line import run_python


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


NATIVE = """
import os, sys
from pathlib import Path
from gaudi_bert.common.progress import Reporter
from gaudi_bert.common.tensorflow_environment import native_lines_to

reporter = Reporter()
reporter.say("before")
with native_lines_to(Path(sys.argv[1])):
    os.write(2, b"native\\n")
    reporter.say("inside")
    print("error: inside", file=sys.stderr)
    if len(sys.argv) > 2:
        raise SystemExit("stopped")
os.write(2, b"native again\\n")
reporter.say("after")
"""


@pytest.mark.parametrize("ending", [[], ["stop"]])
def test_only_what_is_below_python_goes_to_the_log(tmp_path: Path, ending: list[str]) -> None:
    log = tmp_path / "native.log"
    log.write_text("of the run before\n", encoding="utf-8")
    done = run_python(NATIVE, log, *ending)
    last = ["stopped"] if ending else ["native again", "after"]
    assert done.stderr.splitlines() == ["before", "inside", "error: inside", *last]
    assert log.read_text(encoding="utf-8").splitlines() == ["of the run before", "native"]
    assert done.returncode == len(ending)


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no-folder"), native_lines_to(tmp_path / "no-folder" / "native.log"):
        pass
