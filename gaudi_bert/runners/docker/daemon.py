"""The Docker daemon: connecting to it, images, containers, networks; each refusal as one line with its remedy.

The official SDK (package `docker`) is imported when it is needed. Errors that a user can fix are recognised by what the
daemon reports; all others are shown in its own words.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gaudi_bert.common.errors import FailedError, GaudiBertError, InputError, install_command
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.places import ImageSettings
from gaudi_bert.runners.docker.containers import WORK_LABEL

_ANSWER_SECONDS = 60
# Messages of the daemon, and what to do about each. The first match counts.
_REMEDIES: tuple[tuple[str, type[GaudiBertError], str], ...] = (
    (
        r"(?i)unknown (or invalid )?runtime",
        InputError,
        "install the Gaudi container runtime and add it to the daemon, or name another one in docker.runtime",
    ),
    (
        r"bind source path does not exist|invalid mount config",
        InputError,
        "the daemon does not see this machine's files; run it on this machine",
    ),
    (
        r"executable file not found|no such file or directory: unknown",
        InputError,
        "that image is not one of this project; build it with `make images`",
    ),
    (r"no space left on device", FailedError, "free some space, for example with `docker system prune`, and run it again"),
    (r"rlimit|ulimit", InputError, "this host does not allow it; set docker.unlimited_memory_lock to false"),
)


class Daemon:
    """A connection to a Docker daemon."""

    def __init__(self) -> None:
        try:
            from docker.client import from_env
            from docker.errors import DockerException
        except ImportError as error:
            raise InputError(
                f"--on docker: the Python package `docker` is not installed; run: {install_command('docker')}"
            ) from error
        try:
            self._client = from_env(timeout=_ANSWER_SECONDS)
            self._client.ping()
        except DockerException as error:
            raise InputError(_unreachable(error)) from error

    @contextmanager
    def _explained(self, action: str) -> Iterator[None]:
        """Turn a refusal while doing `action` into one line."""
        from docker.errors import APIError, DockerException
        from requests.exceptions import RequestException

        try:
            yield
        except APIError as error:
            reason = " ".join(str(error.explanation or error).split())
            kind, remedy = next(
                ((kind, remedy) for pattern, kind, remedy in _REMEDIES if re.search(pattern, reason)),
                (FailedError, "see the daemon's log"),
            )
            raise kind(f"cannot {action}: {reason}; {remedy}") from error
        except (DockerException, RequestException, OSError) as error:
            reason = " ".join(str(error).split())
            raise FailedError(
                f"cannot {action}: the Docker daemon does not answer any more ({reason}); start it, run again"
            ) from error

    def need_image(self, reference: str, images: ImageSettings, reporter: Reporter) -> None:
        """Make sure that an image is present: fetch it from its registry according to `images.pull_policy`."""
        if images.pull_policy != "Always" and self._has_image(reference):
            return
        if images.pull_policy == "Never" or images.registry is None:
            registry = "" if images.registry else ", and images.registry names none to fetch it from"
            raise InputError(f"image {reference}: not on this machine{registry}; build it with `make images`")
        reporter.say(f"docker: fetching {reference}")
        from docker.errors import DockerException
        from requests.exceptions import RequestException

        name, _, tag = reference.rpartition(":")
        try:
            for step in self._client.api.pull(name, tag=tag, stream=True, decode=True):
                if "error" in step:
                    raise DockerException(step["error"])
        except (DockerException, RequestException) as error:
            reason = " ".join(str(error).split())
            raise InputError(
                f"image {reference}: cannot be fetched: {reason}; check images.registry and `docker login`, "
                "or build it with `make images`"
            ) from error

    def _has_image(self, reference: str) -> bool:
        from docker.errors import NotFound

        with self._explained(f"look for image {reference}"):
            try:
                self._client.images.get(reference)
            except NotFound:
                return False
        return True

    def containers_in(self, work: str) -> list[Any]:
        """Containers of the work folder `work`, running or not."""
        with self._explained("list containers"):
            containers: list[Any] = self._client.containers.list(all=True, filters={"label": f"{WORK_LABEL}={work}"})
        return containers

    def create(self, options: dict[str, Any]) -> Any:
        """Make a container; it does not run yet."""
        with self._explained(f"make container {options['name']}"):
            return self._client.containers.create(**options)

    def start(self, container: Any) -> None:
        """Start a container."""
        with self._explained(f"start container {container.name}"):
            container.start()

    def output(self, container: Any) -> Iterator[tuple[bytes | None, bytes | None]]:
        """Pieces of standard output and standard error, from the start to the end; call it before `start`."""
        with self._explained(f"read the output of container {container.name}"):
            pieces: Iterator[tuple[bytes | None, bytes | None]] = container.attach(
                stream=True, stdout=True, stderr=True, demux=True
            )
        return pieces

    def end_state(self, container: Any) -> dict[str, Any]:
        """Wait for a container's end: the daemon's `State`, with `ExitCode`, `OOMKilled`, `Error`."""
        with self._explained(f"wait for container {container.name}"):
            container.wait()
            container.reload()
        state: dict[str, Any] = container.attrs["State"]
        return state

    def stop(self, container: Any, seconds: int) -> None:
        """Ask a container to stop (SIGTERM); kill it after `seconds`."""
        from docker.errors import NotFound

        with self._explained(f"stop container {container.name}"):
            try:
                # The answer comes when the container has ended.
                self._client.api.timeout = _ANSWER_SECONDS + seconds
                container.stop(timeout=seconds)
            except NotFound:
                return
            finally:
                self._client.api.timeout = _ANSWER_SECONDS

    def remove(self, container: Any) -> None:
        """Remove a container, whatever it does."""
        from docker.errors import NotFound

        with self._explained(f"remove container {container.name}"):
            try:
                container.remove(force=True, v=True)
            except NotFound:
                return

    @contextmanager
    def network(self, name: str, labels: dict[str, str], *, way_out: bool = False) -> Iterator[None]:
        """A network of this run's containers alone, without a way out unless they need one."""
        with self._explained(f"make network {name}"):
            network = self._client.networks.create(name, driver="bridge", internal=not way_out, labels=labels)
        try:
            yield
        finally:
            with self._explained(f"remove network {name}"):
                network.remove()


def _unreachable(error: Exception) -> str:
    address = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    reason = " ".join(str(error).split())
    if "Permission denied" in reason or "PermissionError" in reason:
        return (
            f"--on docker: this user may not use the Docker daemon at {address}; add it to the group `docker`, log in again"
        )
    if "FileNotFoundError" in reason or "Connection refused" in reason or "ConnectionRefused" in reason:
        return f"--on docker: no Docker daemon answers at {address}; install Docker and start it, or name one in DOCKER_HOST"
    return f"--on docker: the Docker daemon at {address} cannot be used: {reason}; check DOCKER_HOST and `docker info`"
