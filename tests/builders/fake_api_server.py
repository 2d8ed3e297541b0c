"""An API server over real HTTP whose Jobs do what a test has scripted.

It keeps objects by kind and name, answers create, read, list, replace, delete, watch and logs as the real one does on the
wire (chunked streams, Status bodies), and plays a `Script` for each Job or MPIJob: every read of the object moves it one
state on. Faults are given as (method, part of the path, status) and happen once each, in order.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse

Json = dict[str, Any]
# Runs stages of the demo, with some settings, on a fake server.
Run = Callable[..., Json]

PLURALS = {
    "jobs": "Job", "mpijobs": "MPIJob", "trainjobs": "TrainJob", "trainingruntimes": "TrainingRuntime", "pods": "Pod",
    "configmaps": "ConfigMap", "persistentvolumeclaims": "PersistentVolumeClaim", "serviceaccounts": "ServiceAccount",
    "services": "Service", "networkpolicies": "NetworkPolicy", "workloads": "Workload", "events": "Event",
    "nodes": "Node", "storageclasses": "StorageClass", "deployments": "Deployment",
}  # fmt: skip
# Those of the pipeline `demo`, and those of a Helm release of the same name.
OWN_LABELS = {"app.kubernetes.io/managed-by": "gaudi-bert", "gaudi-bert.io/pipeline": "demo"}
HELM_LABELS = {"app.kubernetes.io/managed-by": "Helm", "app.kubernetes.io/instance": "demo"}
# By which label a step's pods are found: what each controller sets.
POD_LABELS = {"Job": "job-name", "MPIJob": "training.kubeflow.org/job-name", "TrainJob": "jobset.sigs.k8s.io/jobset-name"}
OBJECT_PATH = re.compile(
    r"^/(?:api/v1|apis/[^/]+/[^/]+)(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+))?(?P<log>/log)?$"
)


@dataclass
class State:
    """What a Job looks like at one moment: its status and its pods, whether it is suspended, and what Kueue says of it."""

    status: Json
    pods: list[Json] = field(default_factory=list)
    suspended: bool = False
    workload: Json | None = None


@dataclass
class Fault:
    """One refusal: the next request that matches gets this status."""

    method: str
    path: str
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    message: str = "scripted"


class FakeApiServer:
    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Json] = {}
        self.scripts: dict[str, deque[State]] = {}
        self.namespaces = {"gaudi-bert": "Active"}
        self.faults: list[Fault] = []
        self.watches: deque[str] = deque()
        self.logs: dict[str, list[str]] = {}
        self.log_drops: dict[str, int] = {}
        self.requests: list[tuple[str, str]] = []
        self.verbs: set[tuple[str, str]] = set()
        self.token: str | None = None
        self.on_unauthorized: Callable[[], None] = lambda: None
        self.kinds_unknown: set[str] = set()
        # Groups with their version that are not served, as kueue.x-k8s.io/v1beta2.
        self.versions_unknown: set[str] = set()
        # What the account may not do: (verb, resource), as (list, pods) or (get, namespaces).
        self.forbidden: set[tuple[str, str]] = set()
        self.version = {"major": "1", "minor": "31"}
        self.lock = threading.RLock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._revision = 0

    def __enter__(self) -> FakeApiServer:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def kubeconfig(self, token: str = "first") -> str:
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "me", "user": {"token": token}}],
            "contexts": [{"name": "it", "context": {"cluster": "fake", "user": "me"}}],
            "current-context": "it",
        }
        return json.dumps(content)

    def script(self, name: str, *states: State) -> None:
        """What the Job `name` will do, one state a read; the last one stays."""
        self.scripts[name] = deque(states)

    def put(self, kind: str, item: Json) -> Json:
        """Store an object as the server does, with a uid and a resource version."""
        with self.lock:
            self._revision += 1
            made = {"uid": f"uid-{self._revision}", "creationTimestamp": "2026-01-01T00:00:00Z"}
            metadata = {"namespace": "gaudi-bert", **made, **item["metadata"]}
            metadata["resourceVersion"] = str(self._revision)
            stored = {**item, "kind": kind, "metadata": metadata}
            self.objects[kind, metadata["name"]] = stored
            return stored

    def put_own(self, kind: str, name: str, **content: Any) -> Json:
        """Store an object of the pipeline `demo`, with its labels."""
        labels = {**OWN_LABELS, "app.kubernetes.io/component": name.removeprefix("demo-")}
        return self.put(kind, {"metadata": {"name": name, "labels": labels}, **content})

    def warn(self, name: str, message: str, moment: str | None = None) -> None:
        event = {"type": "Warning", "message": message, "lastTimestamp": moment, "involvedObject": {"name": name}}
        self.put("Event", {"metadata": {"name": f"{name}.{self._revision}"}, **event})

    def created(self, kind: str) -> list[str]:
        """The names of the objects of a kind that were asked for with POST, in order."""
        plural = next(plural for plural, value in PLURALS.items() if value == kind)
        return [name for method, name in self.requests if method == f"POST {plural}"]

    def advance(self, kind: str, name: str) -> Json:
        item = self.objects[kind, name]
        states = self.scripts.get(name)
        if not states:
            item["status"] = {"conditions": [{"type": "Succeeded" if kind == "MPIJob" else "Complete", "status": "True"}]}
            return item
        state = states.popleft() if len(states) > 1 else states[0]
        item["status"] = state.status
        self._queue(kind, item, state)
        label = POD_LABELS[kind]
        pods = {key: item for key, item in self.objects.items() if key[0] == "Pod"}
        for key in [key for key, pod in pods.items() if pod["metadata"]["labels"].get(label) == name]:
            del self.objects[key]
        for pod in state.pods:
            pod["metadata"].setdefault("labels", {})[label] = name
            self.put("Pod", pod)
        return item

    def _queue(self, kind: str, item: Json, state: State) -> None:
        """Suspend the Job or let it go on, with a Workload that says why, as Kueue does."""
        spec = item.setdefault("spec", {})
        (spec.setdefault("runPolicy", {}) if kind == "MPIJob" else spec)["suspend"] = state.suspended
        name = f"{kind.lower()}-{item['metadata']['name']}-ab12c"
        self.objects.pop(("Workload", name), None)
        if state.workload is not None:
            labels = {"kueue.x-k8s.io/job-uid": item["metadata"]["uid"]}
            self.put("Workload", {**state.workload, "metadata": {"name": name, "labels": labels}})

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # or the body of each answer waits 40 ms for its head to be acknowledged

            def log_message(self, *_: object) -> None:
                pass

            def serve(self) -> None:
                method = self.command
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                if server.token is not None and self.headers.get("authorization") != f"Bearer {server.token}":
                    server.on_unauthorized()
                    self.answer(401, status(401, "Unauthorized"))
                    return
                for fault in server.faults:
                    if fault.method == method and fault.path in self.path:
                        server.faults.remove(fault)
                        self.answer(fault.status, status(fault.status, fault.message), fault.headers)
                        return
                Answers(server, self, method, body).give()

            do_GET = do_POST = do_PUT = do_DELETE = serve

            def answer(self, code: int, value: Any, headers: dict[str, str] | None = None) -> None:
                data = json.dumps(value).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                for name, text in (headers or {}).items():
                    self.send_header(name, text)
                self.end_headers()
                self.wfile.write(data)

            def stream(self, lines: Iterator[str], drop: bool = False) -> None:
                """Lines in chunks; with `drop`, the connection is cut before the end."""
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for line in lines:
                    data = line.encode() + b"\n"
                    self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                    self.wfile.flush()
                if not drop:
                    self.wfile.write(b"0\r\n\r\n")
                self.close_connection = True

        return Handler


class Answers:
    def __init__(self, server: FakeApiServer, handler: Any, method: str, body: Any) -> None:
        self.server, self.handler, self.method, self.body = server, handler, method, body
        self.url = urlparse(handler.path)
        self.query = {key: values[0] for key, values in parse_qs(self.url.query).items()}

    def give(self) -> None:
        special = {"/version": self.server.version, "/version/": self.server.version}
        if self.url.path in special:
            self.handler.answer(200, special[self.url.path])
            return
        if self.url.path.endswith("/selfsubjectaccessreviews"):
            asked = self.body["spec"]["resourceAttributes"]
            resource = "/".join(asked[key] for key in ("resource", "subresource") if key in asked)
            self.handler.answer(201, {"status": {"allowed": (asked["verb"], resource) not in self.server.forbidden}})
            return
        namespace = re.fullmatch(r"/api/v1/namespaces/([^/]+)", self.url.path)
        if namespace:
            self._namespace(namespace[1])
            return
        match = OBJECT_PATH.match(self.url.path)
        if any(f"/apis/{version}/" in self.url.path for version in self.server.versions_unknown):
            match = None
        if match is None or match["plural"] not in PLURALS or PLURALS[match["plural"]] in self.server.kinds_unknown:
            self.handler.answer(404, status(404, "the server could not find the requested resource"))
            return
        self._object(PLURALS[match["plural"]], match["plural"], match["name"], bool(match["log"]))

    def _namespace(self, name: str) -> None:
        phase = self.server.namespaces.get(name)
        if ("get", "namespaces") in self.server.forbidden:
            self.handler.answer(403, status(403, f'namespaces "{name}" is forbidden'))
        elif phase is None:
            self.handler.answer(404, status(404, f'namespaces "{name}" not found'))
        else:
            self.handler.answer(200, {"metadata": {"name": name}, "status": {"phase": phase}})

    def _object(self, kind: str, plural: str, name: str | None, log: bool) -> None:
        server = self.server
        name_asked = name or (self.body or {}).get("metadata", {}).get("name", "")
        right = (self._verb(name), f"{plural}/log" if log else plural)
        with server.lock:
            if "dryRun" not in self.query:
                server.requests.append((f"{self.method} {plural}", name_asked))
            server.verbs.add(right)
        if right in server.forbidden:
            self.handler.answer(403, status(403, f"{right[1]} is forbidden: the account cannot {right[0]} it"))
        elif log:
            self._log(str(name))
        elif self.method == "GET" and self.query.get("watch") in ("true", "True"):
            self._watch(kind)
        elif self.method == "GET" and name is None:
            self._list(kind)
        else:
            with server.lock:
                self._one(kind, name_asked)

    def _verb(self, name: str | None) -> str:
        if self.method == "GET":
            return "get" if name else "watch" if "watch" in self.query else "list"
        return {"POST": "create", "PUT": "update", "DELETE": "delete"}[self.method]

    def _one(self, kind: str, name: str) -> None:
        known = (kind, name) in self.server.objects
        if self.method == "POST":
            if known:
                self.handler.answer(409, status(409, f'{kind} "{name}" already exists'))
            elif kind == "TrainJob" and ("TrainingRuntime", name) not in self.server.objects:
                # Kubeflow Trainer's webhook.
                self.handler.answer(403, status(403, f'admission webhook denied the request: no TrainingRuntime "{name}"'))
            else:
                dry = self.query.get("dryRun") == "All"
                self.handler.answer(201, self.body if dry else self.server.put(kind, self.body))
        elif not known:
            self.handler.answer(404, status(404, f'{kind} "{name}" not found'))
        elif self.method == "GET":
            item = self.server.advance(kind, name) if kind in POD_LABELS else self.server.objects[kind, name]
            self.handler.answer(200, item)
        elif self.method == "PUT":
            dry = self.query.get("dryRun") == "All"
            self.handler.answer(200, self.body if dry else self.server.put(kind, self.body))
        else:
            del self.server.objects[kind, name]
            self.handler.answer(200, {"kind": "Status", "status": "Success"})

    def _list(self, kind: str) -> None:
        labels = dict(part.split("=") for part in self.query.get("labelSelector", "").split(",") if part)
        fields = dict(part.split("=") for part in self.query.get("fieldSelector", "").split(",") if part)
        with self.server.lock:
            items = [item for (each, _), item in self.server.objects.items() if each == kind]
        items = [item for item in items if labels.items() <= (item["metadata"].get("labels") or {}).items()]
        if "involvedObject.name" in fields:
            items = [item for item in items if item["involvedObject"]["name"] == fields["involvedObject.name"]]
        self.handler.answer(200, {"kind": f"{kind}List", "metadata": {"resourceVersion": "1"}, "items": items})

    def _watch(self, kind: str) -> None:
        behaviour = self.server.watches.popleft() if self.server.watches else "event"
        name = self.query["fieldSelector"].partition("=")[2]
        item = self.server.objects.get((kind, name), {})
        if behaviour == "gone":
            event = {"type": "ERROR", "object": status(410, "too old resource version")}
            self.handler.stream(iter([json.dumps(event)]))
        elif behaviour == "drop":
            self.handler.stream(iter([]), drop=True)
        elif behaviour == "silence":
            time.sleep(0.5)
            self.handler.stream(iter([]))
        else:
            self.handler.stream(iter([json.dumps({"type": "MODIFIED", "object": item})]))

    def _log(self, pod: str) -> None:
        lines = self.server.logs.get(pod, [])
        drop_after = self.server.log_drops.pop(pod, None)
        if drop_after is None:
            self.handler.stream(iter(lines))
        else:
            self.handler.stream(iter(lines[:drop_after]), drop=True)


def status(code: int, message: str) -> Json:
    common = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Scripted"}
    return {**common, "message": message, "code": code}
