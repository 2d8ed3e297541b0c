"""Talking to a cluster with the official client (35 to 37): plain dictionaries in and out, errors as one line with a remedy.

Every answer is taken as raw JSON, because the client's own types differ between its major versions. What is busy or broken
for a moment (429, 5xx, a dropped connection) is tried again; a token that has expired (401) is read again once.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from gaudi_bert.common.errors import FailedError, InputError

__all__ = ["Cluster", "ClusterError", "StreamDroppedError", "connect"]

Json = dict[str, Any]

# Seconds for a connection, and for an answer.
_TIMEOUT = (10, 60)
_ATTEMPTS = 6
_BUSY = (429, 500, 502, 503, 504)
_CORE = {
    "ConfigMap": "config_map",
    "PersistentVolumeClaim": "persistent_volume_claim",
    "Pod": "pod",
    "ServiceAccount": "service_account",
}
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


def connect(namespace: str) -> Cluster:
    """The cluster of the current kubeconfig context, or the one that this pod runs in.

    Raises:
        InputError: the client is not installed, or there is no configuration.
    """
    try:
        import kubernetes  # noqa: F401
    except ImportError as error:
        raise InputError("kubernetes: the client is not installed; run: pip install 'gaudi-bert[kubernetes]'") from error
    _load_configuration()
    return Cluster(namespace)


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


class Cluster:
    """One namespace of a cluster.

    Args:
        namespace: where everything is made and looked for.
        sleep: how to wait between attempts.
    """

    def __init__(self, namespace: str, sleep: Callable[[float], None] = time.sleep) -> None:
        self.namespace = namespace
        self._sleep = sleep

    def version(self) -> tuple[int, int]:
        """The server's version, for example (1, 31)."""
        from kubernetes import client

        answer = self.call("ask for the version", client.VersionApi().get_code)
        return int(answer["major"]), int(str(answer["minor"]).rstrip("+"))

    def check_namespace(self) -> None:
        """See that the namespace is there.

        Raises:
            InputError: it is not, or it is being removed.
        """
        from kubernetes import client

        try:
            answer = self.call(f"look for namespace {self.namespace}", client.CoreV1Api().read_namespace, self.namespace)
        except ClusterError as error:
            if error.status == 404:
                raise InputError(
                    f"namespace {self.namespace} does not exist on this cluster; make it with "
                    f"`kubectl create namespace {self.namespace}`, or set kubernetes.namespace"
                ) from error
            if error.status == 403:
                return  # An account may use a namespace that it may not look at.
            raise
        if answer["status"].get("phase") == "Terminating":
            raise InputError(
                f"namespace {self.namespace} is being removed; wait until it is gone, or set kubernetes.namespace"
            )

    def create(self, item: Json) -> Json:
        """Make an object."""
        if item["kind"] == "MPIJob":
            return self._custom("create", item)
        function = getattr(self._api(item["kind"]), f"create_namespaced_{self._snake(item['kind'])}")
        return self.call(f"create {_title(item)}", function, self.namespace, item)

    def replace(self, item: Json) -> Json:
        """Replace an object."""
        function = getattr(self._api(item["kind"]), f"replace_namespaced_{self._snake(item['kind'])}")
        return self.call(f"replace {_title(item)}", function, item["metadata"]["name"], self.namespace, item)

    def read(self, kind: str, name: str) -> Json | None:
        """An object, or None where there is none of that name."""
        try:
            if kind == "MPIJob":
                return self._custom("get", {"kind": kind, "metadata": {"name": name}})
            function = getattr(self._api(kind), f"read_namespaced_{self._snake(kind)}")
            return self.call(f"read {kind} {name}", function, name, self.namespace)
        except ClusterError as error:
            if error.status == 404:
                return None
            raise

    def delete(self, kind: str, name: str) -> bool:
        """Remove an object and all that belongs to it; False where there was none."""
        try:
            if kind == "MPIJob":
                self._custom("delete", {"kind": kind, "metadata": {"name": name}})
            else:
                function = getattr(self._api(kind), f"delete_namespaced_{self._snake(kind)}")
                self.call(f"delete {kind} {name}", function, name, self.namespace, propagation_policy="Background")
        except ClusterError as error:
            if error.status == 404:
                return False
            raise
        return True

    def find(self, kind: str, label_selector: str) -> list[Json]:
        """The objects with these labels; none where the cluster does not know the kind."""
        try:
            if kind == "MPIJob":
                answer = self._custom("list", {"kind": kind, "metadata": {"name": ""}}, label_selector=label_selector)
            else:
                function = getattr(self._api(kind), f"list_namespaced_{self._snake(kind)}")
                answer = self.call(f"list {kind}s", function, self.namespace, label_selector=label_selector)
        except ClusterError as error:
            if error.status == 404:
                return []
            raise
        return answer.get("items") or []

    def events(self, name: str) -> list[Json]:
        """What the cluster noted about the object called `name`, oldest first."""
        from kubernetes import client

        function = client.CoreV1Api().list_namespaced_event
        answer = self.call(f"list events of {name}", function, self.namespace, field_selector=f"involvedObject.name={name}")
        return sorted(answer.get("items") or [], key=lambda event: event.get("lastTimestamp") or "")

    def wait_for_change(self, item: Json, seconds: int) -> None:
        """Return when `item` changes, when the watch is dropped, or after `seconds`; read it again to see what it is now."""
        keywords = {
            "field_selector": f"metadata.name={item['metadata']['name']}",
            "resource_version": item["metadata"].get("resourceVersion"),
            "timeout_seconds": seconds,
            "watch": True,
            "_request_timeout": (_TIMEOUT[0], seconds + 5),
        }
        if item["kind"] == "MPIJob":
            response = self._custom_open("list", "", **keywords)
        else:
            function = getattr(self._api(item["kind"]), f"list_namespaced_{self._snake(item['kind'])}")
            response = self._open(f"watch {item['kind']}", function, self.namespace, **keywords)
        with suppress(StreamDroppedError):
            next(_response_lines(response), None)

    def log_lines(self, pod: str, container: str, since_seconds: int | None = None, follow: bool = True) -> Iterator[str]:
        """The lines of a container's log, each with its time, until the container ends.

        Raises:
            StreamDroppedError: the connection broke.
        """
        from kubernetes import client

        options = {} if since_seconds is None else {"since_seconds": since_seconds}
        response = self._open(
            f"read the log of {pod}",
            client.CoreV1Api().read_namespaced_pod_log,
            pod,
            self.namespace,
            container=container,
            follow=follow,
            timestamps=True,
            _request_timeout=(_TIMEOUT[0], 3600),
            **options,
        )
        yield from _response_lines(response)

    def call(self, action: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Json:
        """The JSON answer of a function of the client.

        Raises:
            ClusterError: the server refused, or could not be reached in several attempts.
        """
        response = self._open(action, function, *arguments, _request_timeout=_TIMEOUT, **keywords)
        return json.loads(response.data)

    def _open(self, action: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """The raw answer; what may pass is tried again."""
        import urllib3
        from kubernetes.client.exceptions import ApiException

        renewed = False
        for attempt in range(_ATTEMPTS):
            last = attempt == _ATTEMPTS - 1
            try:
                return function(*arguments, _preload_content=False, **keywords)
            except ApiException as error:
                if error.status == 401 and not renewed:
                    # The functions hold the credentials they were made with, so a fresh one of the same name is taken.
                    renewed = True
                    function = self._renew(function)
                elif error.status not in _BUSY or last:
                    raise _explain(action, error) from error
                else:
                    self._sleep(_pause(attempt, error))
            except urllib3.exceptions.HTTPError as error:
                if last:
                    said = " ".join(str(error).split())
                    raise ClusterError(f"cannot {action}: no answer from the cluster ({said}); check the network") from error
                self._sleep(_pause(attempt, None))
            except ValueError as error:
                # Client 36 and later check what they send: pydantic's ValidationError is a ValueError.
                raise ClusterError(f"cannot {action}: the client refuses it: {' '.join(str(error).split())}") from error
        raise AssertionError("unreachable")

    def _renew(self, function: Callable[..., Any]) -> Callable[..., Any]:
        _load_configuration()
        owner = getattr(function, "__self__", None)
        return function if owner is None else getattr(type(owner)(), function.__name__)

    def _api(self, kind: str) -> Any:
        from kubernetes import client

        return client.BatchV1Api() if kind == "Job" else client.CoreV1Api()

    def _snake(self, kind: str) -> str:
        return "job" if kind == "Job" else _CORE[kind]

    def _custom(self, verb: str, item: Json, **keywords: Any) -> Json:
        if verb == "create":
            keywords["body"] = item
        name = "" if verb in ("create", "list") else item["metadata"]["name"]
        return json.loads(self._custom_open(verb, name, _request_timeout=_TIMEOUT, **keywords).data)

    def _custom_open(self, verb: str, name: str, **keywords: Any) -> Any:
        from kubernetes import client

        function = getattr(client.CustomObjectsApi(), f"{verb}_namespaced_custom_object")
        place = ("kubeflow.org", "v2beta1", self.namespace, "mpijobs", *((name,) if name else ()))
        return self._open(f"{verb} MPIJob {name}".strip(), function, *place, **keywords)


def _response_lines(response: Any) -> Iterator[str]:
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


def _title(item: Json) -> str:
    return f"{item['kind']} {item['metadata']['name']}"
