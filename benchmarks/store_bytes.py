"""Whether the demo makes the same bytes from and to a bucket as on a disk: by itself and in containers.

    python benchmarks/store_bytes.py [--on local,docker] [--updates 40]

The text is the manual that Python carries, so that containers with another Python read the same. All but what tells when,
where and how fast a run was is compared, byte for byte: examples, plans, packs, proofs, checkpoints, the evaluation. The S3
server (moto) listens on loopback. `docker` needs the images of `make images`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from measuring import show_processor  # noqa: E402

from gaudi_bert.artefacts.store.objects import Objects  # noqa: E402
from tests.builders.s3_server import ENVIRONMENT, contents, quick, s3_server, upload  # noqa: E402

FILES = 8
OF_THE_RUN = ("tensorboard/", ".log", "metrics.jsonl", "training.json", "settings.", "report.html", "examples.json")


def write_text_files(folder: Path) -> None:
    """Python's manual on its own language, dealt to a few files."""
    from pydoc_data.topics import topics

    folder.mkdir()
    names = sorted(topics)
    for number in range(FILES):
        texts = "\n\n".join(topics[name] for name in names[number::FILES])
        (folder / f"topics-{number}.txt").write_text(texts, encoding="utf-8")


def comparable(found: dict[str, bytes]) -> dict[str, bytes]:
    """What does not depend on when and where it was made."""
    kept = {name: content for name, content in found.items() if not any(part in name for part in OF_THE_RUN)}
    return {name: content for name, content in kept.items() if not any(part.startswith(".") for part in name.split("/"))}


def run_demo(folder: Path, text: str, updates: int, *options: str) -> float:
    """Run the demo, with less training; how long it took."""
    training = f"training={{updates: {updates}, warmup_updates: 10, save_every_updates: 20, evaluate_every_updates: 20, "
    training += "loss: token, threads: 1, optimizer: adamw, global_batch_sequences: 64, micro_batch_packs: 32, "
    training += "evaluate_packs: 500, measure_speedup: false}"
    command = [sys.executable, "-m", "gaudi_bert", "run", str(ROOT / "pipelines" / "demo.yaml"), *options]
    command += ["--set", f"prepare.text={text}", "--set", training]
    started = time.monotonic()
    done = subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    assert ENVIRONMENT["AWS_SECRET_ACCESS_KEY"] not in done.stdout + done.stderr, "a credential was printed"
    return time.monotonic() - started


def main() -> None:
    """Read the command line, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", default="local,docker")
    parser.add_argument("--updates", type=int, default=40)
    arguments = parser.parse_args()
    show_processor()
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory() as name, s3_server() as server:
        folder, objects = Path(name), Objects(quick(server.endpoint))
        server.make_bucket("bucket")
        write_text_files(folder / "text")
        upload(folder / "text", "s3://bucket/text", objects)
        seconds = run_demo(folder, str(folder / "text"), arguments.updates, "--work", "disk")
        root = folder / "disk" / "demo"
        paths = [path for path in root.rglob("*") if path.is_file()]
        wanted = comparable({path.relative_to(root).as_posix(): path.read_bytes() for path in paths})
        print(f"on a disk: {len(wanted)} files, {sum(map(len, wanted.values())):,} bytes, {seconds:.0f} s")
        for place in arguments.on.split(","):
            options = ("--on", place, "--work", f"s3://bucket/{place}", "--set", f"store.endpoint_url={server.endpoint}")
            seconds = run_demo(folder, "s3://bucket/text", arguments.updates, *options)
            made = contents(f"s3://bucket/{place}/demo", objects)
            assert ENVIRONMENT["AWS_SECRET_ACCESS_KEY"].encode() not in b"".join(made.values()), "a credential was kept"
            found = comparable(made)
            differing = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
            said = f"{len(found)} objects, differing: {', '.join(differing) or 'none'}, {seconds:.0f} s"
            print(f"--on {place}, from and to a bucket: {said}")
            if differing:
                raise SystemExit(1)


if __name__ == "__main__":
    main()
