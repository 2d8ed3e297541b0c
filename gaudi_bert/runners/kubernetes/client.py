"""One namespace of a cluster: plain dictionaries in and out, whatever the version of the official client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from gaudi_bert.common.errors import InputError
from gaudi_bert.runners.kubernetes.connection import (
    TIMEOUT,
    ClusterError,
    Connection,
    StreamDroppedError,
    response_lines,
)

__all__ = ["Cluster"]

Json = dict[str, Any]

_CORE = {
    "ConfigMap": "config_map",
    "PersistentVolumeClaim": "persistent_volume_claim",
    "Pod": "pod",
    "ServiceAccount": "service_account",
}


class Cluster:
    """One namespace of a cluster.

    Args:
        namespace: where everything is made and looked for.
        connection: how to reach the cluster; by default as the kubeconfig file says.

    Raises:
        InputError: there is no cluster to reach.
    """

    def __init__(self, namespace: str, connection: Connection | None = None) -> None:
        self.namespace = namespace
        self.connection = connection or Connection()

    def call(self, action: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Json:
        """The JSON answer of a function of the client, as `Connection.call`."""
        return self.connection.call(action, function, *arguments, **keywords)

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
            "_request_timeout": (TIMEOUT[0], seconds + 5),
        }
        if item["kind"] == "MPIJob":
            response = self._custom_open("list", "", **keywords)
        else:
            function = getattr(self._api(item["kind"]), f"list_namespaced_{self._snake(item['kind'])}")
            response = self.connection.open(f"watch {item['kind']}", function, self.namespace, **keywords)
        with suppress(StreamDroppedError):
            next(response_lines(response), None)

    def log_lines(self, pod: str, container: str, since_seconds: int | None = None, follow: bool = True) -> Iterator[str]:
        """The lines of a container's log, each with its time, until the container ends.

        Raises:
            StreamDroppedError: the connection broke.
        """
        from kubernetes import client

        options: Json = {} if since_seconds is None else {"since_seconds": since_seconds}
        response = self.connection.open(
            f"read the log of {pod}",
            client.CoreV1Api().read_namespaced_pod_log,
            pod,
            self.namespace,
            container=container,
            follow=follow,
            timestamps=True,
            _request_timeout=(TIMEOUT[0], 3600),
            **options,
        )
        yield from response_lines(response)

    def _api(self, kind: str) -> Any:
        from kubernetes import client

        return client.BatchV1Api() if kind == "Job" else client.CoreV1Api()

    def _snake(self, kind: str) -> str:
        return "job" if kind == "Job" else _CORE[kind]

    def _custom(self, verb: str, item: Json, **keywords: Any) -> Json:
        if verb == "create":
            keywords["body"] = item
        name = "" if verb in ("create", "list") else item["metadata"]["name"]
        return json.loads(self._custom_open(verb, name, _request_timeout=TIMEOUT, **keywords).data)

    def _custom_open(self, verb: str, name: str, **keywords: Any) -> Any:
        from kubernetes import client

        function = getattr(client.CustomObjectsApi(), f"{verb}_namespaced_custom_object")
        place = ("kubeflow.org", "v2beta1", self.namespace, "mpijobs", *((name,) if name else ()))
        return self.connection.open(f"{verb} MPIJob {name}".strip(), function, *place, **keywords)


def _title(item: Json) -> str:
    return f"{item['kind']} {item['metadata']['name']}"
