"""A real S3 server on loopback (moto), in a process and an environment of its own, and buckets in it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gaudi_bert.artefacts.store.objects import Objects
from gaudi_bert.config.places import StoreSettings

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv" / "s3-server" / "bin" / "python"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "name-of-the-tests",
    "AWS_SECRET_ACCESS_KEY": "secret-of-the-tests",
    "AWS_DEFAULT_REGION": "eu-west-1",
}
_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address=sys.argv[1], port=0, verbose=False)
server.start()
print(server._server.server_port, flush=True)
sys.stdin.read()
server.stop()
"""


@dataclass(frozen=True)
class S3Server:
    port: int
    address: str = "127.0.0.1"

    @property
    def endpoint(self) -> str:
        return f"http://{self.address}:{self.port}"

    def make_bucket(self, name: str) -> None:
        import s3fs

        key, secret, region = ENVIRONMENT.values()
        where = {"endpoint_url": self.endpoint, "client_kwargs": {"region_name": region}, "skip_instance_cache": True}
        s3fs.S3FileSystem(key=key, secret=secret, **where).mkdir(name)


@contextmanager
def s3_server(address: str = "127.0.0.1") -> Iterator[S3Server]:
    """The server; it ends with the block."""
    with subprocess.Popen(
        [PYTHON, "-c", _SERVER, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        yield S3Server(int(process.stdout.readline()), address)
        process.stdin.close()
        process.wait(30)


def quick(endpoint: str, **values: object) -> StoreSettings:
    """Settings for a server on loopback: short pauses."""
    return StoreSettings(
        **{"endpoint_url": endpoint, "first_pause_seconds": 0.01, "longest_pause_seconds": 0.05, "attempts": 20, **values}
    )


def upload(folder: Path, url: str, objects: Objects) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            objects.put(path, f"{url}/{path.relative_to(folder).as_posix()}")


def contents(url: str, objects: Objects) -> dict[str, bytes]:
    return {name: objects.read(f"{url}/{name}") for name in objects.list(url)}
