"""A client for one namespace of a Kubernetes cluster, with the requests that a run needs.

`Cluster` creates, reads, lists, watches and deletes objects, and reads logs. Objects are plain dictionaries, because the
types of the official client differ between its major versions (35 to 37). The table `KINDS` lists all kinds of objects that
a run uses. The list of kinds is not requested from the server, because an account may have no permission to read it. A
request is retried if the server is busy or does not answer. If the retries fail, a `ClusterError` with a one-line message is
raised.
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
from typing import TYPE_CHECKING, Any

from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.progress import format_seconds
from gaudi_bert.runners.kubernetes.remedies import find_advice

if TYPE_CHECKING:
    from kubernetes.client.exceptions import ApiException
    from kubernetes.dynamic import DynamicClient, Resource
    from urllib3 import BaseHTTPResponse

# --- the kinds of objects, and the permissions for them that the account of a run needs
#
# The Role in `k8s/in-cluster/account.yaml` must grant exactly these permissions, and `gaudi-bert doctor --cluster` checks
# them.


@dataclass(frozen=True)
class _Kind:
    """A kind of Kubernetes object, and the API verbs that a run uses on such objects.

    Attributes:
        name: The kind.
        plural: The name of the resource in URLs.
        group: The API group, or "" for the core group.
        version: The version of the API group.
        verbs: The API verbs that a run uses on this kind. Empty if a run needs no permission for this kind.
        namespaced: Whether objects of this kind belong to a namespace.
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


# --- the connection, which uses the official client's `DynamicClient`
#
# A request is retried if the server is busy (status 429 or 5xx) or does not answer. If the token has expired (status 401),
# the credentials are loaded again once.

Json = dict[str, Any]

# The timeouts of a request in seconds, for connecting and for reading the answer.
_TIMEOUT = (5, 60)
# Before the server's first answer, requests are retried for at most this time. Later outages have the same limit by default.
_FIRST_ANSWER_SECONDS = 16.0
_LONGEST_PAUSE_SECONDS = 30.0
_LONGEST_LOG_SECONDS = 3600
# urllib3 begins its messages with a technical prefix that does not help users, so remove the prefix.
_URLLIB3_PREFIX = re.compile(r"^<?HTTPS?Connection[^)]*\)>?: ")
_RETRIED_STATUSES = (429, 500, 502, 503, 504)
_REMEDIES = {
    400: "the manifest does not match the version of this cluster: see `gaudi-bert doctor --cluster`",
    401: "your credentials have expired or are wrong: log in to the cluster again",
    403: "this is a rule of the cluster: ask its administrators, or choose another kubernetes.namespace",
    404: "check kubernetes.namespace, and whether the operator of an MPIJob or a TrainJob is installed",
    409: "an object with this name already exists: see `gaudi-bert k8s status`, and remove it with `gaudi-bert k8s delete`",
    422: "correct the setting that the message names",
}


class ClusterError(FailedError):
    """Raised if the API server rejected a request or could not be reached."""


class NotFoundError(ClusterError):
    """Raised if an object does not exist, or if the cluster does not serve its kind."""


class _ForbiddenError(ClusterError):
    """Raised if the account has no permission for a request."""


class ConflictError(ClusterError):
    """Raised if an object with the same name already exists."""


_ERRORS_BY_STATUS = {403: _ForbiddenError, 404: NotFoundError, 409: ConflictError}


class StreamDroppedError(Exception):
    """Raised if the connection breaks while a log is read or an object is watched for changes. The caller can send the
    request again.
    """


def _create_dynamic_client() -> DynamicClient:
    """Load the credentials, and return a new client that does not request the list of API resources from the server.

    Raises:
        InputError: There is no kubeconfig file, and this process does not run in a cluster.
    """
    from kubernetes.client import ApiClient, Configuration
    from kubernetes.dynamic import DynamicClient

    _load_credentials()
    configuration = Configuration.get_default_copy()
    configuration.retries = False  # urllib3 would retry without telling the user
    return DynamicClient(ApiClient(configuration), discoverer=lambda client, cache_file: None)


def _build_client_resource(kind: str) -> Resource:
    """Return the `Resource` object that the official client requires for requests about a kind of object."""
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


def _load_credentials() -> None:
    """Load the credentials from the kubeconfig file, or from the pod's service account if the file cannot be read.

    Raises:
        InputError: The file cannot be read, and this process does not run in a pod.
    """
    import yaml
    from kubernetes import config

    try:
        # The client library reads KUBECONFIG only when it is imported, so pass the current value of the variable.
        config.load_kube_config(config_file=os.environ.get("KUBECONFIG"))
    except (config.ConfigException, OSError, TypeError, yaml.YAMLError) as error:
        try:
            config.load_incluster_config()
        except config.ConfigException:
            reason = " ".join(str(error).split()).rstrip(".")
            raise InputError(
                f"the kubeconfig file cannot be read, and this process does not run in a cluster: {reason}; set KUBECONFIG "
                "to your kubeconfig file, and check it with `kubectl cluster-info`"
            ) from error


def _read_response_lines(response: BaseHTTPResponse) -> Iterator[str]:
    """Yield the lines of a streamed HTTP response as they arrive, and close the connection at the end.

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


def _retry_delay_seconds(attempt: int, error: ApiException | None) -> float:
    """Return how many seconds to wait before a request is sent again, at most 30.

    This is the value of the server's `Retry-After` header. Without this header, the time starts at 0.5 seconds and doubles
    with each attempt.
    """
    seconds = (getattr(error, "headers", None) or {}).get("Retry-After")
    return min(float(seconds) if seconds and str(seconds).isdigit() else 0.5 * 2 ** min(attempt, 10), _LONGEST_PAUSE_SECONDS)


def _rejected_request_error(request_title: str, api_error: ApiException) -> ClusterError:
    """Convert an exception of the official client into a `ClusterError` with the server's message and a remedy.

    Args:
        request_title: What the request was to do, such as "read Job demo-train".
        api_error: The client's `ApiException`.
    """
    try:
        message = json.loads(api_error.body)["message"]
    except (TypeError, ValueError, KeyError):
        message = api_error.reason or "the server gave no reason"
    message = " ".join(str(message).split())
    remedy = find_advice(message).remedy if api_error.status in (403, 422) else ""
    remedy = remedy or _REMEDIES.get(api_error.status, "try again later, or ask the administrators of the cluster")
    kind = _ERRORS_BY_STATUS.get(api_error.status, ClusterError)
    return kind(f"cannot {request_title}: {api_error.status}: {message}; {remedy}")


# --- one namespace

_DRY_RUN: Mapping[bool, Json] = {False: {}, True: {"dry_run": "All"}}
# Only this many lines at the end of a log are searched for a rank's error message. After this message, the other ranks and
# mpirun may print further lines, but not as many.
_LOG_END_LINES = 1000


class Cluster:
    """A client for one namespace of a Kubernetes cluster.

    It connects to the cluster that the kubeconfig file specifies, or else to the cluster that this process runs in. All
    methods raise a `ClusterError` if the server rejects a request or does not answer in time.

    Args:
        namespace: The name of the namespace.
        outage_seconds: How long to retry while the server is busy or does not answer. Before the first answer, the limit is
            at most 16 seconds.
        say: Called with a message when the server stops answering and when it answers again.
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
        self._client = _create_dynamic_client()
        self._log_ends: dict[tuple[str, str], str] = {}

    def read_server_version(self) -> tuple[int, int]:
        """Return the server's Kubernetes version, for example (1, 31)."""
        response = self._send_with_retries("read the version of the server", "request", "get", "/version", read_body=True)
        answer = json.loads(response.data)
        return int(answer["major"]), int(str(answer["minor"]).rstrip("+"))

    def check_namespace(self) -> None:
        """Check that the namespace exists and is not being deleted.

        If the account may not read the namespace, nothing is checked.

        Raises:
            InputError: The namespace does not exist or is being deleted.
        """
        try:
            answer = self._request_json(f"read namespace {self.namespace}", "get", "Namespace", name=self.namespace)
        except NotFoundError as error:
            raise InputError(
                f"namespace {self.namespace} does not exist on this cluster; create it with "
                f"`kubectl create namespace {self.namespace}`, or set kubernetes.namespace to another one"
            ) from error
        except _ForbiddenError:
            return  # an account may use a namespace without the right to read the namespace object
        if answer["status"].get("phase") == "Terminating":
            raise InputError(
                f"namespace {self.namespace} is being deleted; wait until it is gone, or set kubernetes.namespace to "
                "another one"
            )

    def create_object(self, manifest: Json, *, dry_run: bool = False) -> Json:
        """Create an object and return it as the server stored it.

        Args:
            manifest: The manifest of the object.
            dry_run: Whether the server only checks the manifest and creates nothing.

        Raises:
            ConflictError: An object with this name already exists.
        """
        return self._request_json(
            f"create {format_object_title(manifest)}", "create", manifest["kind"], body=manifest, **_DRY_RUN[dry_run]
        )

    def replace_object(self, manifest: Json, *, dry_run: bool = False) -> Json:
        """Replace an object and return it as the server stored it. If `dry_run` is set, the server changes nothing."""
        return self._request_json(
            f"replace {format_object_title(manifest)}",
            "replace",
            manifest["kind"],
            name=manifest["metadata"]["name"],
            body=manifest,
            **_DRY_RUN[dry_run],
        )

    def read_object(self, kind: str, name: str, *, none_if_forbidden: bool = False) -> Json | None:
        """Read an object from the cluster. Return None if it does not exist.

        Args:
            kind: The kind of the object, one of `KINDS`.
            name: The name of the object.
            none_if_forbidden: Also return None if the account may not read the object, instead of raising an error.
        """
        return self._send_get_request_or_none(f"read {kind} {name}", kind, none_if_forbidden, name=name)

    def delete_object(self, kind: str, name: str) -> bool:
        """Delete an object and the objects that it owns. Return False if the object does not exist.

        The method does not wait until the object is gone.
        """
        try:
            self._request_json(f"delete {kind} {name}", "delete", kind, name=name, propagation_policy="Background")
        except NotFoundError:
            return False
        return True

    def list_objects(self, kind: str, label_selector: str | None = None, *, empty_if_forbidden: bool = False) -> list[Json]:
        """Return the objects of a kind, or an empty list if the cluster does not serve this kind.

        Args:
            kind: The kind, one of `KINDS`.
            label_selector: If this is not None, return only objects with these labels.
            empty_if_forbidden: Whether to return an empty list if the account may not list this kind, instead of raising an
                error. Use this for kinds that the pipeline does not need, because its account needs no permission for them.
        """
        answer = self._send_get_request_or_none(f"list {kind}s", kind, empty_if_forbidden, label_selector=label_selector)
        return (answer or {}).get("items") or []

    def has_permission(self, group: str, resource: str, verb: str) -> bool:
        """Return whether the account may use a verb, such as `create`, on a resource in the namespace.

        Args:
            group: The API group, or "" for the core group.
            resource: The plural name of the resource, or a subresource such as `pods/log`.
            verb: The verb, such as `create`.
        """
        resource, _, subresource = resource.partition("/")
        attributes = {"namespace": self.namespace, "group": group, "resource": resource, "verb": verb}
        attributes |= {"subresource": subresource} if subresource else {}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        answer = self._request_json("read the rights of the account", "create", "SelfSubjectAccessReview", body=review)
        return bool(answer.get("status", {}).get("allowed"))

    def read_last_warning(self, object_name: str, since: str = "") -> str:
        """Return the newest warning about an object as one line, or "" if there is no warning.

        Args:
            object_name: The name of the object.
            since: Ignore warnings before this timestamp of the API. Events outlive their object, so older warnings may be
                about an earlier object with the same name.
        """
        answer = self._request_json(
            f"list events of {object_name}", "get", "Event", field_selector=f"involvedObject.name={object_name}"
        )
        warnings = [
            (event.get("lastTimestamp") or since, event.get("message", ""))
            for event in answer.get("items") or ()
            if event.get("type") == "Warning" and (event.get("lastTimestamp") or since) >= since
        ]
        return " ".join(message for _, message in sorted(warnings, key=itemgetter(0))[-1:]).replace("\n", " ").strip()

    def wait_for_change(self, kubernetes_object: Json, timeout_seconds: int) -> None:
        """Wait until an object changes. Return earlier if the connection breaks or the timeout has passed.

        Args:
            kubernetes_object: The object as it was read. The caller must read it again to find out what has changed.
            timeout_seconds: The longest time to wait.
        """
        response = self._send_with_retries(
            f"watch {kubernetes_object['kind']}",
            "get",
            _build_client_resource(kubernetes_object["kind"]),
            namespace=self.namespace,
            timeout=(_TIMEOUT[0], timeout_seconds + 5),
            field_selector=f"metadata.name={kubernetes_object['metadata']['name']}",
            resource_version=kubernetes_object["metadata"].get("resourceVersion"),
            timeout_seconds=timeout_seconds,
            watch=True,
        )
        with suppress(StreamDroppedError):
            next(_read_response_lines(response), None)

    def read_log_lines(
        self,
        pod: str,
        container: str,
        since_seconds: int | None = None,
        *,
        follow: bool = True,
        tail_lines: int | None = None,
    ) -> Iterator[str]:
        """Yield the lines of a container's log. Each line begins with its timestamp and a space.

        Args:
            pod: The name of the pod.
            container: The name of the container.
            since_seconds: If this is not None, leave out lines that are older than this.
            follow: Whether to wait for further lines until the container ends.
            tail_lines: If this is not None, yield only this many lines from the end of the log.

        Raises:
            StreamDroppedError: The connection broke.
        """
        query = [("container", container), ("follow", str(follow).lower()), ("timestamps", "true")]
        query += [("sinceSeconds", str(since_seconds))] if since_seconds is not None else []
        query += [("tailLines", str(tail_lines))] if tail_lines is not None else []
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/log"
        options: Json = {"query_params": query, "timeout": (_TIMEOUT[0], _LONGEST_LOG_SECONDS), "retry": False}
        yield from _read_response_lines(self._send_with_retries(f"read the log of {pod}", "request", "get", path, **options))

    def read_log_end(self, pod: str, container: str) -> str:
        """Return the last 1000 lines of a container's log without timestamps, or "" if the log cannot be read.

        The container must have ended. The lines are kept in memory, so that the log is read only once.
        """
        if (pod, container) not in self._log_ends:
            try:
                lines = list(self.read_log_lines(pod, container, follow=False, tail_lines=_LOG_END_LINES))
            except (ClusterError, StreamDroppedError):
                lines = []
            self._log_ends[pod, container] = "\n".join(line.partition(" ")[2] for line in lines)
        return self._log_ends[pod, container]

    def _send_get_request_or_none(
        self, request_title: str, kind: str, none_if_forbidden: bool, **query: str | None
    ) -> Json | None:
        """Send a `get` request for an object or a list of objects, and return the answer. Return None if the server does not
        find the object or its kind.

        Args:
            request_title: What the request does, such as "read Job demo-train", for error messages.
            kind: The kind, one of `KINDS`.
            none_if_forbidden: Also return None if the account has no permission for the request, instead of raising an
                error.
            **query: The name of the object, or the label selector of the list.
        """
        try:
            return self._request_json(request_title, "get", kind, **query)
        except NotFoundError:
            return None
        except _ForbiddenError:
            if not none_if_forbidden:
                raise
            return None

    def _request_json(self, request_title: str, method: str, kind: str, **arguments: Any) -> Json:
        """Send a request about a kind of object, and return the JSON object in the response.

        Args:
            request_title: What the request does, for error messages.
            method: The name of the client's method, such as `get`.
            kind: The kind, one of `KINDS`.
            **arguments: Further arguments of the client's method.
        """
        arguments |= {"namespace": self.namespace} if KINDS[kind].namespaced else {}
        response = self._send_with_retries(request_title, method, _build_client_resource(kind), read_body=True, **arguments)
        answer: dict[str, Any] = json.loads(response.data)
        return answer

    def _send_with_retries(
        self,
        request_title: str,
        method: str,
        *arguments: Any,
        read_body: bool = False,
        retry: bool = True,
        timeout: tuple[int, int] = _TIMEOUT,
        **options: Any,
    ) -> BaseHTTPResponse:
        """Send a request and return the raw response. Retry the request if the server is busy or does not answer.

        Args:
            request_title: What the request does, for error messages.
            method: The name of the client's method.
            *arguments: Positional arguments of the client's method.
            read_body: Whether to read the complete answer here, so that the request is also retried if the connection
                breaks.
            retry: Whether to retry. Requests for logs are not retried, and their failure does not count as an outage of
                the server, because the server fetches logs from a node that may be down.
            timeout: The timeouts for connecting and reading, in seconds.
            **options: Keyword arguments of the client's method.

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
                response: BaseHTTPResponse = getattr(self._client, method)(
                    *arguments, serialize=False, _request_timeout=timeout, **options
                )
                if read_body:
                    response.read(cache_content=True)
                with self._lock:
                    self._has_answered = True
                    if self._is_away and retry:
                        self._is_away = False
                        self._say("the cluster answers again")
                return response
            except ApiException as refusal:
                if refusal.status == 401 and not renewed:
                    renewed = True
                    self._client = _create_dynamic_client()
                    continue
                error, pause = _rejected_request_error(request_title, refusal), _retry_delay_seconds(attempt, refusal)
                if refusal.status not in _RETRIED_STATUSES or not retry:
                    raise error from refusal
            except urllib3.exceptions.HTTPError as broken:
                reason = _URLLIB3_PREFIX.sub("", " ".join(str(broken).split()))
                error = ClusterError(
                    f"cannot {request_title}: the cluster at {self._client.configuration.host} does not answer "
                    f"({reason}); check the network, and the address of the server in the kubeconfig file"
                )
                pause = _retry_delay_seconds(attempt, None)
            waited += time.monotonic() - began + pause
            if not retry:
                raise error
            limit = self._outage_seconds if self._has_answered else min(self._outage_seconds, _FIRST_ANSWER_SECONDS)
            if waited > limit:
                raise error
            with self._lock:
                # If the server has answered before, an outage is usually short, so report it only after some time.
                if not self._is_away and (not self._has_answered or waited > _FIRST_ANSWER_SECONDS / 2):
                    self._is_away = True
                    self._say(f"{error}; retrying for at most {format_seconds(limit)}")
            attempt += 1
            self._sleep(pause)


def format_object_title(kubernetes_object: Json) -> str:
    """Return the kind and the name of an object for messages, such as "Job demo-train"."""
    return f"{kubernetes_object['kind']} {kubernetes_object['metadata']['name']}"
