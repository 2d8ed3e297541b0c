"""A connection to a cluster by the official client (35 to 37): raw JSON answers, errors as one line with a remedy.

Every answer is taken as raw JSON, because the client's own types differ between its major versions. What is busy or broken
for a moment (429, 5xx, a dropped connection) is tried again; a token that has expired (401) is read again once.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from gaudi_bert.common.errors import FailedError, InputError

__all__ = ["TIMEOUT", "ClusterError", "Connection", "StreamDroppedError", "response_lines"]

Json = dict[str, Any]

# Seconds for a connection, and for an answer.
TIMEOUT = (10, 60)
_ATTEMPTS = 6
_BUSY = (429, 500, 502, 503, 504)
_REMEDIES = {
    400: "the manifest does not suit this cluster's version: see `gaudi-bert doctor --cluster`",
    401: "your credentials have expired or are wrong: log in to the cluster again",
    403: "your account lacks this right: ask for the Role in k8s/in-cluster, or choose another kubernetes.namespace",
    404: "check kubernetes.namespace, and for an MPIJob that the MPI operator is installed",
    409: "something of that name is there already: `gaudi-bert k8s status` and `k8s delete`",
    422: "the manifest was refused: correct the setting that it names",
}


class ClusterError(FailedError):
    """The API server refused, or could not be reached."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class StreamDroppedError(Exception):
    """The connection broke while a log or a watch was read; it can be opened again."""


class Connection:
    """The cluster of the current kubeconfig context, or the one that this pod runs in.

    Args:
        sleep: how to wait between attempts.

    Raises:
        InputError: the client is not installed, or there is no configuration.
    """

    def __init__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        self.sleep = sleep
        try:
            import kubernetes  # noqa: F401
        except ImportError as error:
            raise InputError("kubernetes: the client is not installed; run: pip install 'gaudi-bert[kubernetes]'") from error
        _load_configuration()

    def call(self, action: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Json:
        """The JSON answer of a function of the client.

        Raises:
            ClusterError: the server refused, or could not be reached in several attempts.
        """
        response = self.open(action, function, *arguments, read_whole=True, _request_timeout=TIMEOUT, **keywords)
        return json.loads(response.data)

    def open(
        self, action: str, function: Callable[..., Any], *arguments: Any, read_whole: bool = False, **keywords: Any
    ) -> Any:
        """The raw answer, read whole or still to be read; what may pass is tried again.

        Raises:
            ClusterError: as `call`.
        """
        import urllib3
        from kubernetes.client.exceptions import ApiException

        renewed = False
        for attempt in range(_ATTEMPTS):
            last = attempt == _ATTEMPTS - 1
            try:
                response = function(*arguments, _preload_content=False, **keywords)
                if read_whole:
                    response.read(cache_content=True)
                return response
            except ApiException as error:
                if error.status == 401 and not renewed:
                    # The functions hold the credentials they were made with, so a fresh one of the same name is taken.
                    renewed = True
                    function = self._renew(function)
                elif error.status not in _BUSY or last:
                    raise _explain(action, error) from error
                else:
                    self.sleep(_pause(attempt, error))
            except urllib3.exceptions.HTTPError as error:
                if last:
                    said = " ".join(str(error).split())
                    raise ClusterError(f"cannot {action}: no answer from the cluster ({said}); check the network") from error
                self.sleep(_pause(attempt, None))
            except ValueError as error:
                # Client 36 and later check what they send: pydantic's ValidationError is a ValueError.
                raise ClusterError(f"cannot {action}: the client refuses it: {' '.join(str(error).split())}") from error
        raise AssertionError("unreachable")

    def _renew(self, function: Callable[..., Any]) -> Callable[..., Any]:
        _load_configuration()
        owner = getattr(function, "__self__", None)
        return function if owner is None else getattr(type(owner)(), function.__name__)


def _load_configuration() -> None:
    """Take the kubeconfig file where there is one, and the pod's own account where there is none."""
    import yaml
    from kubernetes import config

    try:
        # The client looks at this variable only once, when it is imported.
        config.load_kube_config(config_file=os.environ.get("KUBECONFIG"))
    except (config.ConfigException, OSError, TypeError, yaml.YAMLError) as error:
        try:
            config.load_incluster_config()
        except config.ConfigException:
            said = " ".join(str(error).split()).rstrip(".")
            raise InputError(
                f"no cluster: {said}; set KUBECONFIG to your kubeconfig file, and see `kubectl cluster-info`"
            ) from error


def response_lines(response: Any) -> Iterator[str]:
    """The lines of a streamed answer as they come.

    Raises:
        StreamDroppedError: the connection broke.
    """
    import urllib3

    waiting = b""
    try:
        for chunk in response.stream(amt=None, decode_content=False):
            *lines, waiting = (waiting + chunk).split(b"\n")
            yield from (line.decode("utf-8", "replace") for line in lines if line)
        if waiting:
            yield waiting.decode("utf-8", "replace")
    except urllib3.exceptions.HTTPError as error:
        raise StreamDroppedError(str(error)) from error
    finally:
        response.close()
        response.release_conn()


def _pause(attempt: int, error: Any) -> float:
    """Seconds before the next attempt: what the server asks for, or twice as long each time."""
    asked = (getattr(error, "headers", None) or {}).get("Retry-After")
    return min(float(asked), 30.0) if asked and str(asked).isdigit() else 0.5 * 2**attempt


def _explain(action: str, error: Any) -> ClusterError:
    """One line for a refusal: what the server said, and the remedy."""
    try:
        said = json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        said = error.reason or "no reason given"
    remedy = _REMEDIES.get(error.status, "try again later, or ask who runs the cluster")
    return ClusterError(f"cannot {action}: {error.status}: {' '.join(str(said).split())}; {remedy}", error.status)
