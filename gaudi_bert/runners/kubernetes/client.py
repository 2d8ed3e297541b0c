"""One namespace of a cluster: plain dictionaries in and out, whatever the version of the official client."""

from __future__ import annotations

from collections.abc import Iterator
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
from gaudi_bert.runners.kubernetes.kinds import Right

__all__ = ["Cluster"]

Json = dict[str, Any]


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

    def version(self) -> tuple[int, int]:
        """The server's version, for example (1, 31)."""
        answer = self.connection.call_path("ask for the version", "/version")
        return int(answer["major"]), int(str(answer["minor"]).rstrip("+"))

    def check_namespace(self) -> None:
        """See that the namespace is there.

        Raises:
            InputError: it is not, or it is being removed.
        """
        try:
            answer = self.read_namespace()
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

    def read_namespace(self) -> Json:
        """The namespace itself."""
        return self.connection.call(f"look for namespace {self.namespace}", "get", "Namespace", name=self.namespace)

    def serves(self, kind: str) -> bool | None:
        """Whether the cluster knows `kind`; None where this account may not list it."""
        try:
            self._call(f"list {kind}s", "get", kind, limit=1)
        except ClusterError as error:
            if error.status in (403, 404):
                return None if error.status == 403 else False
            raise
        return True

    def create(self, item: Json) -> Json:
        """Make an object."""
        return self._call(f"create {_title(item)}", "create", item["kind"], body=item)

    def replace(self, item: Json) -> Json:
        """Replace an object."""
        return self._call(f"replace {_title(item)}", "replace", item["kind"], name=item["metadata"]["name"], body=item)

    def read(self, kind: str, name: str) -> Json | None:
        """An object, or None where there is none of that name."""
        try:
            return self._call(f"read {kind} {name}", "get", kind, name=name)
        except ClusterError as error:
            if error.status == 404:
                return None
            raise

    def delete(self, kind: str, name: str) -> bool:
        """Remove an object and all that belongs to it; False where there was none."""
        try:
            self._call(f"delete {kind} {name}", "delete", kind, name=name, propagation_policy="Background")
        except ClusterError as error:
            if error.status == 404:
                return False
            raise
        return True

    def find(self, kind: str, label_selector: str) -> list[Json]:
        """The objects with these labels; none where the cluster does not know the kind."""
        try:
            answer = self._call(f"list {kind}s", "get", kind, label_selector=label_selector)
        except ClusterError as error:
            if error.status == 404:
                return []
            raise
        return answer.get("items") or []

    def find_everywhere(self, kind: str) -> list[Json] | None:
        """All objects of a kind, of all namespaces; None where this account may not see them."""
        try:
            return self.connection.call(f"list all {kind}s", "get", kind).get("items") or []
        except ClusterError as error:
            if error.status in (403, 404):
                return None
            raise

    def is_allowed(self, right: Right) -> bool:
        """Whether this account has a right in the namespace."""
        resource, _, part = right.resource.partition("/")
        attributes = {"namespace": self.namespace, "group": right.group, "resource": resource, "verb": right.verb}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes | ({"subresource": part} if part else {})},
        }
        answer = self.connection.call("ask for rights", "create", "SelfSubjectAccessReview", body=review)
        return bool(answer.get("status", {}).get("allowed"))

    def events(self, name: str) -> list[Json]:
        """What the cluster noted about the object called `name`, oldest first."""
        answer = self._call(f"list events of {name}", "get", "Event", field_selector=f"involvedObject.name={name}")
        return sorted(answer.get("items") or [], key=lambda event: event.get("lastTimestamp") or "")

    def wait_for_change(self, item: Json, seconds: int) -> None:
        """Return when `item` changes, when the watch is dropped, or after `seconds`; read it again to see what it is now."""
        response = self.connection.open(
            f"watch {item['kind']}",
            "get",
            item["kind"],
            namespace=self.namespace,
            timeout=(TIMEOUT[0], seconds + 5),
            field_selector=f"metadata.name={item['metadata']['name']}",
            resource_version=item["metadata"].get("resourceVersion"),
            timeout_seconds=seconds,
            watch=True,
        )
        with suppress(StreamDroppedError):
            next(response_lines(response), None)

    def log_lines(self, pod: str, container: str, since_seconds: int | None = None, follow: bool = True) -> Iterator[str]:
        """The lines of a container's log, each with its time, until the container ends.

        Raises:
            StreamDroppedError: the connection broke.
        """
        query = [("container", container), ("follow", str(follow).lower()), ("timestamps", "true")]
        query += [("sinceSeconds", str(since_seconds))] if since_seconds is not None else []
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/log"
        timeout = (TIMEOUT[0], 3600)
        yield from response_lines(
            self.connection.open_path(f"read the log of {pod}", path, query_params=query, _request_timeout=timeout)
        )

    def _call(self, action: str, verb: str, kind: str, **arguments: Any) -> Json:
        return self.connection.call(action, verb, kind, namespace=self.namespace, **arguments)


def _title(item: Json) -> str:
    return f"{item['kind']} {item['metadata']['name']}"
