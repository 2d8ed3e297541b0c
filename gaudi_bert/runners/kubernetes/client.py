"""A cluster as a run sees it: the connection, and one namespace.

Plain dictionaries go in and out: the types of the official client differ between its major versions (35 to 37). Nothing is
discovered from the server, of which an account may see the kinds of a run alone.
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

# --- the kinds of objects, and what a run asks of them: the rights that its account needs
#
# The Role in `k8s/in-cluster/account.yaml` and the checks of `gaudi-bert doctor --cluster` are held to this list.


@dataclass(frozen=True)
class _Kind:
    """One kind of object; `verbs` are what a run does with it, none for what only `doctor` looks at, as far as it may."""

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


# --- the connection, by the official client's `DynamicClient`: raw JSON answers, one-line errors
#
# What is busy or away for a while (429, 5xx, no answer) is tried again; a token that has expired (401) is read again once.

Json = dict[str, Any]

# Seconds for a connection, and for an answer.
_TIMEOUT = (5, 60)
# How long to retry a server that has never answered, and one for whose outages nobody set a limit.
_FIRST_ANSWER_SECONDS = 16.0
_LONGEST_PAUSE_SECONDS = 30.0
_LONGEST_LOG_SECONDS = 3600
# With what urllib3 begins its messages.
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
    """The API server refused, or could not be reached."""


class NotFoundError(ClusterError):
    """The object does not exist, or the cluster does not know its kind."""


class _ForbiddenError(ClusterError):
    """This account may not do that."""


class ConflictError(ClusterError):
    """There is an object of that name already."""


_KINDS_OF_ERROR = {403: _ForbiddenError, 404: NotFoundError, 409: ConflictError}


class StreamDroppedError(Exception):
    """The connection broke while a log or a watch was read; it can be opened again."""


def _new_client() -> Any:
    from kubernetes.client import ApiClient, Configuration
    from kubernetes.dynamic import DynamicClient

    _load_configuration()
    configuration = Configuration.get_default_copy()
    configuration.retries = False  # those of urllib3 are silent
    return DynamicClient(ApiClient(configuration), discoverer=lambda client, cache_file: None)


def _resource(kind: str) -> Any:
    from kubernetes.dynamic import Resource

    row = KINDS[kind]
    where = {"prefix": "apis" if row.group else "api", "group": row.group, "api_version": row.version}
    return Resource(kind=kind, name=row.plural, namespaced=row.namespaced, **where)


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
            reason = " ".join(str(error).split()).rstrip(".")
            raise InputError(
                f"no cluster: {reason}; set KUBECONFIG to your kubeconfig file, and see `kubectl cluster-info`"
            ) from error


def _response_lines(response: Any) -> Iterator[str]:
    """The lines of a streamed answer as they come; a `StreamDroppedError` where the connection breaks."""
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
    seconds = (getattr(error, "headers", None) or {}).get("Retry-After")
    return min(float(seconds) if seconds and str(seconds).isdigit() else 0.5 * 2 ** min(attempt, 10), _LONGEST_PAUSE_SECONDS)


def _explain(action: str, error: Any) -> ClusterError:
    """Return the error for a rejection, in one line: the server's message, and the remedy for what the message says."""
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
# Enough for what the ranks and mpirun write after one has failed.
_LOG_END_LINES = 1000


class Cluster:
    """One namespace of the cluster that the kubeconfig file names, or of the one that this pod runs in.

    A server that has answered before is tried again for `outage_seconds` while it is busy or away; `say` is called when it
    goes away and when it is back, `sleep` waits between attempts.
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
        """See that the namespace exists and is not being removed."""
        try:
            answer = self._call(f"look for namespace {self.namespace}", "get", "Namespace", name=self.namespace)
        except NotFoundError as error:
            raise InputError(
                f"namespace {self.namespace} does not exist on this cluster; make it with "
                f"`kubectl create namespace {self.namespace}`, or set kubernetes.namespace"
            ) from error
        except _ForbiddenError:
            return  # An account may use a namespace that it may not look at.
        if answer["status"].get("phase") == "Terminating":
            raise InputError(
                f"namespace {self.namespace} is being removed; wait until it is gone, or set kubernetes.namespace"
            )

    def create(self, item: Json, *, dry_run: bool = False) -> Json:
        """Make an object; with `dry_run`, the server checks all that it would, and makes nothing."""
        return self._call(f"create {title_of(item)}", "create", item["kind"], body=item, **_DRY_RUN[dry_run])

    def replace(self, item: Json, *, dry_run: bool = False) -> Json:
        """Replace an object, or check whether it could be replaced."""
        title, name = title_of(item), item["metadata"]["name"]
        return self._call(f"replace {title}", "replace", item["kind"], name=name, body=item, **_DRY_RUN[dry_run])

    def read(self, kind: str, name: str, *, if_allowed: bool = False) -> Json | None:
        """Return an object, or None where there is none of that name; `if_allowed`: or it may not be seen."""
        return self._seen(f"read {kind} {name}", kind, if_allowed, name=name)

    def delete(self, kind: str, name: str) -> bool:
        """Remove an object and all that belongs to it; False where there was none."""
        try:
            self._call(f"delete {kind} {name}", "delete", kind, name=name, propagation_policy="Background")
        except NotFoundError:
            return False
        return True

    def find(self, kind: str, label_selector: str | None = None, *, if_allowed: bool = False) -> list[Json]:
        """Return the objects with these labels; none where the cluster does not know the kind.

        With `if_allowed`, none where this account may not list them: what a pipeline does not use needs no right.
        """
        answer = self._seen(f"list {kind}s", kind, if_allowed, label_selector=label_selector)
        return (answer or {}).get("items") or []

    def is_allowed(self, group: str, resource: str, verb: str) -> bool:
        """Whether this account has a right in the namespace; a part of a resource is written as `pods/log`."""
        resource, _, part = resource.partition("/")
        attributes = {"namespace": self.namespace, "group": group, "resource": resource, "verb": verb}
        spec = {"resourceAttributes": attributes | ({"subresource": part} if part else {})}
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "spec": spec}
        answer = self._call("ask for rights", "create", "SelfSubjectAccessReview", body=review)
        return bool(answer.get("status", {}).get("allowed"))

    def last_warning(self, name: str, since: str = "") -> str:
        """Return the newest warning about the object called `name`, in one line; an empty text where there is none.

        Warnings outlive their object: those from before `since` are about an earlier one of that name.
        """
        answer = self._call(f"list events of {name}", "get", "Event", field_selector=f"involvedObject.name={name}")
        warnings = [
            (event.get("lastTimestamp") or since, event.get("message", ""))
            for event in answer.get("items") or ()
            if event.get("type") == "Warning" and (event.get("lastTimestamp") or since) >= since
        ]
        return " ".join(message for _, message in sorted(warnings, key=itemgetter(0))[-1:]).replace("\n", " ").strip()

    def wait_for_change(self, item: Json, seconds: int) -> None:
        """Return when `item` changes, when the watch is dropped, or after `seconds`; read it again to see what it is now."""
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
        """Yield the lines of a container's log, each with its time, until the container ends.

        `since_seconds` is how old the first line may be, `last` how many lines come at most, from the end; `follow` waits
        for more.
        """
        query = [("container", container), ("follow", str(follow).lower()), ("timestamps", "true")]
        query += [("sinceSeconds", str(since_seconds))] if since_seconds is not None else []
        query += [("tailLines", str(last))] if last is not None else []
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/log"
        options: Json = {"query_params": query, "timeout": (_TIMEOUT[0], _LONGEST_LOG_SECONDS), "patient": False}
        yield from _response_lines(self._open(f"read the log of {pod}", "request", "get", path, **options))

    def log_end(self, pod: str, container: str) -> str:
        """Return the end of the log of a container that has ended, read once; empty where it cannot be read."""
        if (pod, container) not in self._log_ends:
            try:
                lines = list(self.log_lines(pod, container, follow=False, last=_LOG_END_LINES))
            except (ClusterError, StreamDroppedError):
                lines = []
            self._log_ends[pod, container] = "\n".join(line.partition(" ")[2] for line in lines)
        return self._log_ends[pod, container]

    def _seen(self, action: str, kind: str, if_allowed: bool, **which: str | None) -> Json | None:
        try:
            return self._call(action, "get", kind, **which)
        except NotFoundError:
            return None
        except _ForbiddenError:
            if not if_allowed:
                raise
            return None

    def _call(self, action: str, verb: str, kind: str, **arguments: Any) -> Json:
        """Return the JSON answer to one request; `action` is what is being done, for errors, and `verb` the client's."""
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
        """Return the raw answer, complete or still to be read, once there is one; an error for a refusal that stays.

        What is not `patient` is requested once, and its failure is not blamed on the server, which gets logs from a node.
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
                # Of a server that has answered, the first refusal passes as a rule.
                if not self._is_away and (not self._has_answered or waited > _FIRST_ANSWER_SECONDS / 2):
                    self._is_away = True
                    self._say(f"{error}; retrying for at most {format_seconds(limit)}")
            attempt += 1
            self._sleep(pause)


def title_of(item: Json) -> str:
    """Return its kind and name, for messages."""
    return f"{item['kind']} {item['metadata']['name']}"
