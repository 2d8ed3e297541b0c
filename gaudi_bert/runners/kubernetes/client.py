"""A client for one namespace of a Kubernetes cluster, with the requests that a run needs.

`Cluster` creates, reads, lists, watches and deletes objects, and reads logs. Objects are plain dictionaries, because the
types of the official client differ between its major versions (35 to 37). The kinds of objects are listed here in `KINDS`
and not discovered from the server, because an account may have no rights to see other kinds. Requests that fail because the
server is busy or away are retried. A request that fails for good raises a `ClusterError` with a one-line message.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from types import MappingProxyType
from typing import Any

from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.progress import format_seconds
from gaudi_bert.runners.kubernetes.remedies import find_advice

# --- the kinds of objects, and the rights on them that the account of a run needs
#
# The Role in `k8s/in-cluster/account.yaml` must grant exactly these rights, and `gaudi-bert doctor --cluster` checks them.


@dataclass(frozen=True)
class _Kind:
    """One kind of Kubernetes object.

    Attributes:
        name: The kind.
        plural: The name of the resource in URLs.
        group: The API group, or "" for the core group.
        version: The version of the API group.
        verbs: The verbs that a run uses on this kind. Empty if a run works without any right on it.
        namespaced: Whether objects of this kind are in a namespace.
    """

    name: str
    plural: str
    group: str = ""
    version: str = "v1"
    verbs: tuple[str, ...] = ()
    namespaced: bool = True


_JOB_VERBS = ("create", "get", "list", "watch", "delete")
_OWN_VERBS = ("create", "get", "delete")
_ROWS = (
    _Kind("Job", "jobs", "batch", verbs=_JOB_VERBS),
    _Kind("MPIJob", "mpijobs", "kubeflow.org", "v2beta1", verbs=_JOB_VERBS),
    _Kind("TrainJob", "trainjobs", "trainer.kubeflow.org", "v1alpha1", verbs=_JOB_VERBS),
    _Kind("TrainingRuntime", "trainingruntimes", "trainer.kubeflow.org", "v1alpha1", verbs=(*_OWN_VERBS, "update")),
    _Kind("Service", "services", verbs=_OWN_VERBS),
    _Kind("ConfigMap", "configmaps", verbs=("create", "get", "list", "update", "delete")),
    _Kind("PersistentVolumeClaim", "persistentvolumeclaims", verbs=("create", "get", "delete")),
    _Kind("NetworkPolicy", "networkpolicies", "networking.k8s.io", verbs=("create", "get", "update", "delete")),
    _Kind("ServiceAccount", "serviceaccounts", verbs=("create", "get", "delete")),
    _Kind("Workload", "workloads", "kueue.x-k8s.io", "v1beta2", verbs=("list",)),
    _Kind("OlderWorkload", "workloads", "kueue.x-k8s.io", "v1beta1", verbs=("list",)),
    _Kind("Pod", "pods", verbs=("list",)),
    _Kind("Event", "events", verbs=("list",)),
    _Kind("Deployment", "deployments", "apps"),
    _Kind("Namespace", "namespaces", namespaced=False),
    _Kind("Node", "nodes", namespaced=False),
    _Kind("StorageClass", "storageclasses", "storage.k8s.io", namespaced=False),
    _Kind("SelfSubjectAccessReview", "selfsubjectaccessreviews", "authorization.k8s.io", namespaced=False),
)
KINDS: Mapping[str, _Kind] = MappingProxyType({kind.name: kind for kind in _ROWS})


# --- the connection, by the official client's `DynamicClient`
#
# A request is retried if the server is busy or away (status 429 or 5xx, or no answer). If the token has expired (status
# 401), the credentials are loaded again once.

Json = dict[str, Any]

# The timeouts for connecting and for reading an answer, in seconds.
_TIMEOUT = (5, 60)
# How long to retry if the server has never answered. This is also the default limit for later outages.
_FIRST_ANSWER_SECONDS = 16.0
_LONGEST_PAUSE_SECONDS = 30.0
_LONGEST_LOG_SECONDS = 3600
# urllib3 begins its messages with this prefix, which means nothing to users.
_POOL = re.compile(r"^<?HTTPS?Connection[^)]*\)>?: ")
_BUSY = (429, 500, 502, 503, 504)
_REMEDIES = {
    400: "the manifest does not suit this cluster's version: see `gaudi-bert doctor --cluster`",
    401: "your credentials have expired or are wrong: log in to the cluster again",
    403: "the cluster's administrators have set this rule: ask them, or choose another kubernetes.namespace",
    404: "check kubernetes.namespace, and for an MPIJob or a TrainJob that its operator is installed",
    409: "something of that name is there already: `gaudi-bert k8s status` and `k8s delete`",
    422: "the manifest was refused: correct the setting that it names",
}


class ClusterError(FailedError):
    """The API server rejected a request, or could not be reached."""


class NotFoundError(ClusterError):
    """The object does not exist, or the cluster does not serve its kind."""


class _ForbiddenError(ClusterError):
    """The account lacks the right for this request."""


class ConflictError(ClusterError):
    """An object with this name already exists."""


_KINDS_OF_ERROR = {403: _ForbiddenError, 404: NotFoundError, 409: ConflictError}


class StreamDroppedError(Exception):
    """The connection broke while a log or a watch was read. The caller can open it again."""


def _new_client() -> Any:
    """Return a new `DynamicClient` that discovers nothing from the server.

    Raises:
        InputError: There is no kubeconfig file, and this process does not run in a cluster.
    """
    from kubernetes.client import ApiClient, Configuration
    from kubernetes.dynamic import DynamicClient

    _load_configuration()
    configuration = Configuration.get_default_copy()
    configuration.retries = False  # urllib3 would retry without telling the user
    return DynamicClient(ApiClient(configuration), discoverer=lambda client, cache_file: None)


def _resource(kind: str) -> Any:
    """Return the client's description of a kind."""
    from kubernetes.dynamic import Resource

    row = KINDS[kind]
    where = {"prefix": "apis" if row.group else "api", "group": row.group, "api_version": row.version}
    return Resource(kind=kind, name=row.plural, namespaced=row.namespaced, **where)


def _load_configuration() -> None:
    """Load the credentials from the kubeconfig file, or from the pod's service account if there is no such file.

    Raises:
        InputError: Neither exists.
    """
    import yaml
    from kubernetes import config

    try:
        # The client reads this variable only when it is imported, so a later change would have no effect.
        config.load_kube_config(config_file=os.environ.get("KUBECONFIG"))
    except (config.ConfigException, OSError, TypeError, yaml.YAMLError) as error:
        try:
            config.load_incluster_config()
        except config.ConfigException:
            reason = " ".join(str(error).split()).rstrip(".")
            raise InputError(
                f"no cluster: {reason}; set KUBECONFIG to your kubeconfig file, and see `kubectl cluster-info`"
            ) from error


def _response_lines(response: Any) -> Iterator[str]:
    """Yield the lines of a streamed answer as they arrive, and close the connection at the end.

    Raises:
        StreamDroppedError: The connection broke.
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
    """Return the seconds to wait before the next attempt, at most 30.

    This is the time in the server's `Retry-After` header, or else a time that doubles with each attempt, from 0.5 seconds.
    """
    seconds = (getattr(error, "headers", None) or {}).get("Retry-After")
    return min(float(seconds) if seconds and str(seconds).isdigit() else 0.5 * 2 ** min(attempt, 10), _LONGEST_PAUSE_SECONDS)


def _explain(action: str, error: Any) -> ClusterError:
    """Return the error for a rejected request. Its message contains the server's message and a remedy, in one line.

    Args:
        action: What was tried, such as "read Job demo-train".
        error: The client's `ApiException`.
    """
    try:
        message = json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        message = error.reason or "no reason given"
    message = " ".join(str(message).split())
    remedy = find_advice(message).remedy if error.status in (403, 422) else ""
    remedy = remedy or _REMEDIES.get(error.status, "try again later, or ask who runs the cluster")
    kind = _KINDS_OF_ERROR.get(error.status, ClusterError)
    return kind(f"cannot {action}: {error.status}: {message}; {remedy}")


# --- one namespace

_DRY_RUN: Mapping[bool, Json] = {False: {}, True: {"dry_run": "All"}}
# After one rank has failed, the other ranks and mpirun write fewer lines than this.
_LOG_END_LINES = 1000


class Cluster:
    """One namespace of a cluster. The cluster is that of the kubeconfig file, or the one that this pod runs in.

    All methods raise a `ClusterError` if the server rejects a request or does not answer in time.

    Args:
        namespace: The name of the namespace.
        outage_seconds: How long to retry while the server is busy or away. Before the first answer, the limit is at most 16
            seconds.
        say: Called with a message when the server goes away and when it answers again.
        sleep: Called to wait between two attempts.
    """

    def __init__(
        self,
        namespace: str,
        *,
        outage_seconds: float = _FIRST_ANSWER_SECONDS,
        say: Callable[[str], None] = lambda line: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.namespace = namespace
        self._outage_seconds, self._say, self._sleep = outage_seconds, say, sleep
        self._has_answered = self._is_away = False
        self._lock = threading.Lock()
        self._client = _new_client()
        self._log_ends: dict[tuple[str, str], str] = {}

    def version(self) -> tuple[int, int]:
        """Return the server's version, for example (1, 31)."""
        response = self._open("ask for the version", "request", "get", "/version", read_whole=True)
        answer = json.loads(response.data)
        return int(answer["major"]), int(str(answer["minor"]).rstrip("+"))

    def check_namespace(self) -> None:
        """Check that the namespace exists and is not being removed.

        If the account may not read the namespace, nothing is checked.

        Raises:
            InputError: The namespace does not exist or is being removed.
        """
        try:
            answer = self._call(f"look for namespace {self.namespace}", "get", "Namespace", name=self.namespace)
        except NotFoundError as error:
            raise InputError(
                f"namespace {self.namespace} does not exist on this cluster; make it with "
                f"`kubectl create namespace {self.namespace}`, or set kubernetes.namespace"
            ) from error
        except _ForbiddenError:
            return  # an account may use a namespace without the right to read the namespace object
        if answer["status"].get("phase") == "Terminating":
            raise InputError(
                f"namespace {self.namespace} is being removed; wait until it is gone, or set kubernetes.namespace"
            )

    def create(self, item: Json, *, dry_run: bool = False) -> Json:
        """Create an object and return it as the server stored it.

        Args:
            item: The manifest.
            dry_run: Whether the server only checks the manifest and creates nothing.

        Raises:
            ConflictError: An object with this name already exists.
        """
        return self._call(f"create {title_of(item)}", "create", item["kind"], body=item, **_DRY_RUN[dry_run])

    def replace(self, item: Json, *, dry_run: bool = False) -> Json:
        """Replace an object and return it as the server stored it. With `dry_run`, only check whether this is possible."""
        title, name = title_of(item), item["metadata"]["name"]
        return self._call(f"replace {title}", "replace", item["kind"], name=name, body=item, **_DRY_RUN[dry_run])

    def read(self, kind: str, name: str, *, if_allowed: bool = False) -> Json | None:
        """Return an object, or None if it does not exist.

        Args:
            kind: The kind of the object, one of `KINDS`.
            name: The name of the object.
            if_allowed: Also return None if the account may not read the object, instead of raising an error.
        """
        return self._seen(f"read {kind} {name}", kind, if_allowed, name=name)

    def delete(self, kind: str, name: str) -> bool:
        """Delete an object and everything that it owns. Return False if the object does not exist.

        The method does not wait until the object is gone.
        """
        try:
            self._call(f"delete {kind} {name}", "delete", kind, name=name, propagation_policy="Background")
        except NotFoundError:
            return False
        return True

    def find(self, kind: str, label_selector: str | None = None, *, if_allowed: bool = False) -> list[Json]:
        """Return the objects of a kind. If the cluster does not serve this kind, return an empty list.

        Args:
            kind: The kind, one of `KINDS`.
            label_selector: Only return objects with these labels.
            if_allowed: Also return an empty list if the account may not list this kind, instead of raising an error. This is
                for kinds that the pipeline does not use, because its account needs no right on them.
        """
        answer = self._seen(f"list {kind}s", kind, if_allowed, label_selector=label_selector)
        return (answer or {}).get("items") or []

    def is_allowed(self, group: str, resource: str, verb: str) -> bool:
        """Return whether the account has a right in the namespace.

        Args:
            group: The API group, or "" for the core group.
            resource: The plural name of the resource, or a subresource such as `pods/log`.
            verb: The verb, such as `create`.
        """
        resource, _, part = resource.partition("/")
        attributes = {"namespace": self.namespace, "group": group, "resource": resource, "verb": verb}
        spec = {"resourceAttributes": attributes | ({"subresource": part} if part else {})}
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "spec": spec}
        answer = self._call("ask for rights", "create", "SelfSubjectAccessReview", body=review)
        return bool(answer.get("status", {}).get("allowed"))

    def last_warning(self, name: str, since: str = "") -> str:
        """Return the message of the newest warning event about an object in one line, or "" if there is no warning.

        Args:
            name: The name of the object.
            since: Ignore warnings before this time, which has the format of the API. Events outlive their object, so older
                warnings may be about an earlier object with the same name.
        """
        answer = self._call(f"list events of {name}", "get", "Event", field_selector=f"involvedObject.name={name}")
        warnings = [
            (event.get("lastTimestamp") or since, event.get("message", ""))
            for event in answer.get("items") or ()
            if event.get("type") == "Warning" and (event.get("lastTimestamp") or since) >= since
        ]
        return " ".join(message for _, message in sorted(warnings, key=itemgetter(0))[-1:]).replace("\n", " ").strip()

    def wait_for_change(self, item: Json, seconds: int) -> None:
        """Wait until an object changes, the connection breaks, or some seconds have passed.

        Args:
            item: The object as it was read. The caller must read it again to see what has changed.
            seconds: How long to wait.
        """
        response = self._open(
            f"watch {item['kind']}",
            "get",
            _resource(item["kind"]),
            namespace=self.namespace,
            timeout=(_TIMEOUT[0], seconds + 5),
            field_selector=f"metadata.name={item['metadata']['name']}",
            resource_version=item["metadata"].get("resourceVersion"),
            timeout_seconds=seconds,
            watch=True,
        )
        with suppress(StreamDroppedError):
            next(_response_lines(response), None)

    def log_lines(
        self, pod: str, container: str, since_seconds: int | None = None, *, follow: bool = True, last: int | None = None
    ) -> Iterator[str]:
        """Yield the lines of a container's log. Each line begins with its timestamp and a space.

        Args:
            pod: The name of the pod.
            container: The name of the container.
            since_seconds: Leave out lines that are older than this.
            follow: Wait for further lines until the container ends.
            last: Yield only this many lines from the end of the log.

        Raises:
            StreamDroppedError: The connection broke.
        """
        query = [("container", container), ("follow", str(follow).lower()), ("timestamps", "true")]
        query += [("sinceSeconds", str(since_seconds))] if since_seconds is not None else []
        query += [("tailLines", str(last))] if last is not None else []
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/log"
        options: Json = {"query_params": query, "timeout": (_TIMEOUT[0], _LONGEST_LOG_SECONDS), "patient": False}
        yield from _response_lines(self._open(f"read the log of {pod}", "request", "get", path, **options))

    def log_end(self, pod: str, container: str) -> str:
        """Return the last 1000 lines of the log of a container that has ended, without timestamps.

        The log is read only once and then kept in memory. If it cannot be read, return "".
        """
        if (pod, container) not in self._log_ends:
            try:
                lines = list(self.log_lines(pod, container, follow=False, last=_LOG_END_LINES))
            except (ClusterError, StreamDroppedError):
                lines = []
            self._log_ends[pod, container] = "\n".join(line.partition(" ")[2] for line in lines)
        return self._log_ends[pod, container]

    def _seen(self, action: str, kind: str, if_allowed: bool, **which: str | None) -> Json | None:
        """Return the answer to a `get` request, or None if nothing is found or (with `if_allowed`) it is forbidden."""
        try:
            return self._call(action, "get", kind, **which)
        except NotFoundError:
            return None
        except _ForbiddenError:
            if not if_allowed:
                raise
            return None

    def _call(self, action: str, verb: str, kind: str, **arguments: Any) -> Json:
        """Send a request for objects of one kind, and return the JSON answer.

        Args:
            action: What is being done, for error messages.
            verb: The name of the client's method, such as `get`.
            kind: The kind, one of `KINDS`.
            **arguments: Further arguments of the client's method.
        """
        arguments |= {"namespace": self.namespace} if KINDS[kind].namespaced else {}
        response = self._open(action, verb, _resource(kind), read_whole=True, **arguments)
        answer: dict[str, Any] = json.loads(response.data)
        return answer

    def _open(
        self,
        action: str,
        method: str,
        *arguments: Any,
        read_whole: bool = False,
        patient: bool = True,
        timeout: Any = _TIMEOUT,
        **options: Any,
    ) -> Any:
        """Send a request, retry it while the server is busy or away, and return the raw response.

        Args:
            action: What is being done, for error messages.
            method: The name of the client's method.
            *arguments: Positional arguments of the client's method.
            read_whole: Whether to read the complete answer here, so that a broken connection is retried as well.
            patient: Whether to retry. Requests for logs are not retried, and their failure does not count as an outage of
                the server, because the server fetches logs from a node that may be down.
            timeout: The timeouts for connecting and reading, in seconds.
            **options: Further arguments of the client's method.

        Raises:
            ClusterError: The server rejected the request, or the retries ended without an answer.
        """
        import urllib3
        from kubernetes.client.exceptions import ApiException

        renewed, attempt, waited = False, 0, 0.0
        while True:
            began = time.monotonic()
            error: ClusterError
            try:
                ask = getattr(self._client, method)
                response = ask(*arguments, serialize=False, _request_timeout=timeout, **options)
                if read_whole:
                    response.read(cache_content=True)
                with self._lock:
                    self._has_answered = True
                    if self._is_away and patient:
                        self._is_away = False
                        self._say("the cluster answers again")
                return response
            except ApiException as refusal:
                if refusal.status == 401 and not renewed:
                    renewed = True
                    self._client = _new_client()
                    continue
                error, pause = _explain(action, refusal), _pause(attempt, refusal)
                if refusal.status not in _BUSY or not patient:
                    raise error from refusal
            except urllib3.exceptions.HTTPError as broken:
                reason = _POOL.sub("", " ".join(str(broken).split()))
                error = ClusterError(
                    f"cannot {action}: no answer from the cluster at {self._client.configuration.host} ({reason}); "
                    "check the network, and the server's address in the kubeconfig file"
                )
                pause = _pause(attempt, None)
            waited += time.monotonic() - began + pause
            if not patient:
                raise error
            limit = self._outage_seconds if self._has_answered else min(self._outage_seconds, _FIRST_ANSWER_SECONDS)
            if waited > limit:
                raise error
            with self._lock:
                # A short outage of a server that has answered before is usually over soon, so do not report it at once.
                if not self._is_away and (not self._has_answered or waited > _FIRST_ANSWER_SECONDS / 2):
                    self._is_away = True
                    self._say(f"{error}; retrying for at most {format_seconds(limit)}")
            attempt += 1
            self._sleep(pause)


def title_of(item: Json) -> str:
    """Return the kind and name of an object, such as "Job demo-train", for messages."""
    return f"{item['kind']} {item['metadata']['name']}"
