"""A connection to a cluster by the official client's `DynamicClient` (35 to 37): raw JSON answers, one-line errors.

Every answer is taken as raw JSON, because the client's own types differ between its major versions. What is busy or away for
a while (429, 5xx, no answer) is asked again; a token that has expired (401) is read again once.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.progress import human_seconds
from gaudi_bert.runners.kubernetes.kinds import KINDS

__all__ = ["TIMEOUT", "ClusterError", "Connection", "StreamDroppedError", "response_lines"]

Json = dict[str, Any]

# Seconds for a connection, and for an answer.
TIMEOUT = (10, 60)
# How long a server is asked again that has never answered, and one whose outages nobody has a limit for.
FIRST_ANSWER_SECONDS = 16.0
LONGEST_PAUSE_SECONDS = 30.0
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
        outage_seconds: how long a server that has answered before is asked again while it is busy or away.
        say: told when the server goes away, and when it is back.
        sleep: how to wait between attempts.

    Raises:
        InputError: the client is not installed, or there is no configuration.
    """

    def __init__(
        self,
        outage_seconds: float = FIRST_ANSWER_SECONDS,
        say: Callable[[str], None] = lambda line: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.outage_seconds, self.sleep = outage_seconds, sleep
        self._say = say
        self._has_answered = self._is_away = False
        self._lock = threading.Lock()
        self._client = _new_client()

    def call(self, action: str, verb: str, kind: str, **arguments: Any) -> Json:
        """The JSON answer to one request.

        Args:
            action: what is being done, for errors.
            verb: `get` (with a name or of all), `create`, `replace` or `delete`.
            kind: of `KINDS`.
            arguments: `namespace`, `name`, `body` and what else the dynamic client takes.

        Raises:
            ClusterError: the server refused, or was away for too long.
        """
        return json.loads(self.open(action, verb, kind, read_whole=True, **arguments).data)

    def call_path(self, action: str, path: str) -> Json:
        """The JSON answer to a GET of a path that is no object's, as `call`."""
        return json.loads(self.open_path(action, path, read_whole=True, _request_timeout=TIMEOUT).data)

    def open(
        self, action: str, verb: str, kind: str, *, read_whole: bool = False, timeout: Any = TIMEOUT, **arguments: Any
    ) -> Any:
        """The raw answer, read whole or still to be read; errors as `call`."""

        def ask() -> Any:
            function = getattr(self._client, verb)
            return function(_resource(kind), serialize=False, _request_timeout=timeout, **arguments)

        return self._persistently(action, ask, read_whole)

    def open_path(self, action: str, path: str, *, read_whole: bool = False, **arguments: Any) -> Any:
        """The raw answer to a GET of a path, as `open`."""
        return self._persistently(
            action, lambda: self._client.request("get", path, serialize=False, **arguments), read_whole
        )

    def _persistently(self, action: str, ask: Callable[[], Any], read_whole: bool) -> Any:
        """Ask until there is an answer or a refusal that stays."""
        import urllib3
        from kubernetes.client.exceptions import ApiException

        renewed, attempt, waited = False, 0, 0.0
        while True:
            asked = time.monotonic()
            error: ClusterError
            try:
                response = ask()
                if read_whole:
                    response.read(cache_content=True)
                self._note_answer()
                return response
            except ApiException as refusal:
                if refusal.status == 401 and not renewed:
                    renewed = True
                    self._client = _new_client()
                    continue
                error, pause = _explain(action, refusal), _pause(attempt, refusal)
                if refusal.status not in _BUSY:
                    raise error from refusal
            except urllib3.exceptions.HTTPError as broken:
                said = " ".join(str(broken).split())
                error = ClusterError(f"cannot {action}: no answer from the cluster ({said}); check the network")
                pause = _pause(attempt, None)
            waited += time.monotonic() - asked + pause
            limit = self.outage_seconds if self._has_answered else min(self.outage_seconds, FIRST_ANSWER_SECONDS)
            if waited > limit:
                raise error
            self._note_outage(error, waited)
            attempt += 1
            self.sleep(pause)

    def _note_answer(self) -> None:
        with self._lock:
            self._has_answered = True
            if self._is_away:
                self._is_away = False
                self._say("the cluster answers again")

    def _note_outage(self, error: ClusterError, waited: float) -> None:
        """Say once that the server is away: not at the first refusal, which passes as a rule."""
        with self._lock:
            if self._has_answered and not self._is_away and waited > FIRST_ANSWER_SECONDS / 2:
                self._is_away = True
                self._say(f"{error}; it is asked again for {human_seconds(self.outage_seconds)} at the most")


def _new_client() -> Any:
    """A client with the configuration as it is now."""
    try:
        from kubernetes.client import ApiClient
        from kubernetes.dynamic import DynamicClient
    except ImportError as error:
        raise InputError("kubernetes: the client is not installed; run: pip install 'gaudi-bert[kubernetes]'") from error
    _load_configuration()
    return DynamicClient(ApiClient(), discoverer=lambda client, cache_file: None)


def _resource(kind: str) -> Any:
    from kubernetes.dynamic import Resource

    row = KINDS[kind]
    return Resource(
        prefix="apis" if row.group else "api",
        group=row.group,
        api_version=row.version,
        kind=kind,
        name=row.plural,
        namespaced=row.namespaced,
    )


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
    return min(float(asked) if asked and str(asked).isdigit() else 0.5 * 2 ** min(attempt, 10), LONGEST_PAUSE_SECONDS)


def _explain(action: str, error: Any) -> ClusterError:
    """One line for a refusal: what the server said, and the remedy."""
    try:
        said = json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        said = error.reason or "no reason given"
    remedy = _REMEDIES.get(error.status, "try again later, or ask who runs the cluster")
    return ClusterError(f"cannot {action}: {error.status}: {' '.join(str(said).split())}; {remedy}", error.status)
