"""Servers as users start them: clients of others unchanged, hostile requests, signals, and what is refused at the start."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.builders.agree import agree
from tests.builders.command_line import refusal
from tests.builders.encoders import TEXTS
from tests.builders.served import Served, served_in_process, wait_until


@pytest.fixture(scope="module")
def server(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("server")
    options = ("--batch-rows", 4, "--request-bytes", "1MiB", "--request-seconds", 2)
    with served_in_process(folders["embedding"], folder, *options) as served:
        yield served


def expected_of(server: Served, texts: list[str]) -> np.ndarray:
    return np.array(server.post("/embed", {"inputs": texts}).json)


# --- clients of others


def test_the_client_of_openai(server: Served) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    answer = client.embeddings.create(input=TEXTS[:5], model="any")
    agree([each.embedding for each in answer.data], expected_of(server, TEXTS[:5]))
    assert client.models.list().data[0].id == "embedding"
    with pytest.raises(openai.UnprocessableEntityError):
        client.embeddings.create(input=["alpha " * 90], model="any")


def test_the_client_of_hugging_face(server: Served) -> None:
    client = pytest.importorskip("huggingface_hub").InferenceClient(server.url)
    found = client.feature_extraction(TEXTS[2], normalize=True, truncate=True, truncation_direction="Right")
    agree(found, server.post("/embed", {"inputs": TEXTS[2], "normalize": True}).json)


def test_the_client_of_llama_index_for_text_embeddings_inference(server: Served) -> None:
    module = pytest.importorskip("llama_index.embeddings.text_embeddings_inference")
    client = module.TextEmbeddingsInference(base_url=server.url, model_name="any", embed_batch_size=3)
    agree(client.get_text_embedding_batch(TEXTS[:8]), expected_of(server, [f" {text}".strip() for text in TEXTS[:8]]))


# --- what nobody should send


def raw(server: Served, data: bytes, half_close: bool = False) -> bytes:
    """Send bytes, and read until the server closes or has answered."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        try:
            connection.sendall(data)
            if half_close:
                connection.shutdown(socket.SHUT_WR)
            return connection.recv(65536)
        except OSError:  # closed meanwhile
            return b""


def request_of(body: bytes, path: bytes = b"/embed", length: int | None = None, headers: bytes = b"") -> bytes:
    size = len(body) if length is None else length
    return b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n%s\r\n%s" % (path, size, headers, body)


def hostile(random: np.random.Generator) -> tuple[bytes, bool]:
    """A request that is wrong in one of many ways; and whether the client then closes its side."""
    body = json.dumps({"inputs": [TEXTS[5], "\u0000", "\U0001f600é"]}).encode()
    cut = int(random.integers(0, len(body)))
    noise = random.bytes(int(random.integers(1, 200)))
    kinds = [
        request_of(body[:cut]),
        request_of(body[:cut], length=len(body)),
        request_of(noise),
        noise,
        request_of(b"[" * 5000),
        request_of(b'{"inputs": ' + b"[" * 300 + b"]" * 300 + b"}"),
        request_of(b'{"inputs": "' + b"a" * 1_100_000 + b'"}'),
        request_of(b"", length=10**15),
        request_of(b'{"inputs": 1e999, "truncate": "no"}'),
        request_of(b'{"inputs": "\\ud800\\u0000"}'),
        request_of(body, headers=b"Transfer-Encoding: chunked\r\n"),
        request_of(body, headers=b"X: " + b"a" * 100_000 + b"\r\n"),
        request_of(body, headers=b"Expect: 100-continue\r\nContent-Encoding: gzip\r\n"),
        request_of(body, path=b"/%00/../embed?" + noise.hex().encode()),
        request_of(json.dumps({"inputs": [[2**70]], "dimensions": -1}).encode()),
        request_of(json.dumps({"inputs": ["a"] * 3000}).encode()),
        b"GET /embed HTTP/9.9\r\n\r\n",
        b"POST /embed HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    ]
    return kinds[int(random.integers(len(kinds)))], bool(random.integers(2))


@pytest.mark.parametrize("requests", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_hostile_requests_get_a_refusal_or_are_closed(server: Served, requests: int) -> None:
    random, text = np.random.default_rng(requests), TEXTS[5]
    expected = expected_of(server, [text])
    for number in range(requests):
        data, half_close = hostile(random)
        answer = raw(server, data, half_close or b"Content-Length: 10000" in data)
        status = int(answer.split()[1]) if answer else 0
        assert status in (0, 100, 200, 400, 404, 405, 408, 413, 415, 422, 426, 431), (data[:200], answer[:200])
        if number % 20 == 0:
            agree(expected_of(server, [text]), expected)
    assert server.process.poll() is None
    assert text not in server.log.read_text()


def answers(server: Served, data: bytes, half_close: bool = False) -> bytes:
    """Send bytes, and return all that comes until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(data)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as stream:
            return stream.read()


def test_a_client_that_closes_its_own_side_gets_its_answer(server: Served) -> None:
    for body in ({"inputs": "alpha"}, {"inputs": TEXTS * 20}):
        content = answers(server, request_of(json.dumps(body).encode()), half_close=True)
        content = content.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert content.startswith(b"HTTP/1.1 200")
        assert len(json.loads(content.partition(b"\r\n\r\n")[2])) == (1 if body["inputs"] == "alpha" else 20 * len(TEXTS))


def test_pipelined_requests_are_all_answered(server: Served) -> None:
    posted = request_of(json.dumps({"inputs": "alpha", "other": "x" * 100_000}).encode())
    requests = (
        [b"GET /ping HTTP/1.1\r\nHost: a\r\n\r\n"] * 2_000 + [posted] + [b"GET /ping HTTP/1.1\r\nHost: a\r\n\r\n"] * 20
    )
    assert answers(server, b"".join(requests), half_close=True).count(b"HTTP/1.1 200") == len(requests)


def test_a_request_for_another_protocol_is_answered_in_this_one(server: Served) -> None:
    found = answers(server, b"GET /info HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
    assert found.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in found


@pytest.mark.parametrize("output", ["nobody reads", "full"])
def test_standard_error_that_takes_nothing_does_not_stop_the_server(
    folders: dict[str, Path], tmp_path: Path, output: str
) -> None:
    read_end, write_end = os.pipe()
    if output == "full":
        if not Path("/dev/full").exists():
            pytest.skip("FILE MISSING: /dev/full")
        os.close(write_end)
        write_end = os.open("/dev/full", os.O_WRONLY)
    else:
        os.set_blocking(write_end, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(write_end, b"x" * 4096)
        os.set_blocking(write_end, True)
    try:
        with served_in_process(folders["embedding"], tmp_path, "--batch-rows", 1, standard_error=write_end) as server:
            for data in (b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: a\r\nConnection: Upgrade\r\n\r\n"):
                answers(server, data)
            assert server.post("/embed", {"inputs": "alpha"}).status == 200
            server.process.terminate()
            assert server.process.wait() == 0
    finally:
        os.close(read_end)
        os.close(write_end)


def test_slow_senders_are_closed_and_hold_up_nobody(server: Served) -> None:
    slow = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(20)]
    for number, connection in enumerate(slow):
        connection.sendall(request_of(b'{"inp', length=100) if number % 2 else b"POST /embed HT")
    assert server.post("/embed", {"inputs": "alpha"}).status == 200
    for number, connection in enumerate(slow):
        answer = connection.recv(65536)
        assert b" 408 " in answer if number % 2 else answer == b""
        connection.close()


def test_nothing_is_computed_in_a_shape_that_was_not_before(server: Served) -> None:
    shapes = set(server.get("/info").json["shapes"])
    for size in (1, 2, 7, 40):
        assert server.post("/embed", {"inputs": TEXTS[:size]}).status == 200
    counted = {
        name.partition('"')[2].partition('"')[0] for name in server.metrics() if name.startswith("gaudi_bert_batches_total")
    }
    assert counted <= shapes
    assert len(shapes) <= 12


# --- signals


class Load:
    """Clients that ask one after the other until the server is gone; what they got."""

    def __init__(self, server: Served, clients: int) -> None:
        self.server, self.statuses, self.wrong, self.broken, self.kept = server, [], 0, 0, 0
        self.texts = TEXTS[:12]
        self.expected = {text: expected_of(server, [text])[0] for text in self.texts}
        self.threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(clients)]
        for thread in self.threads:
            thread.start()

    def _ask(self, number: int) -> None:
        while True:
            text = self.texts[number % len(self.texts)]
            number += 1
            try:
                answer = self.server.post("/embed", {"inputs": text})
            except (OSError, http.client.HTTPException):  # closed, or an answer that ends before its time
                self.broken += 1
                return
            self.statuses.append(answer.status)
            self.kept += answer.status == 503 and answer.headers.get("connection") != "close"
            if answer.status == 200:
                self.wrong += float(np.abs(answer.json[0] - self.expected[text]).max()) > 1e-5

    def join(self) -> None:
        for thread in self.threads:
            thread.join()


def test_sigterm_answers_what_was_accepted_and_ends_with_0(folders: dict[str, Path], tmp_path: Path) -> None:
    with served_in_process(folders["embedding"], tmp_path, "--batch-rows", 1, "--grace-seconds", 100) as server:
        load = Load(server, 8)
        bulk: list[Any] = []
        asking = threading.Thread(target=lambda: bulk.append(server.post("/embed", {"inputs": TEXTS * 10})))
        asking.start()
        wait_until(lambda: server.metrics()["te_queue_size"] > 100)
        server.process.terminate()
        asking.join()
        assert server.process.wait() == 0
        load.join()
        assert bulk[0].status == 200
        assert len(bulk[0].json) == 10 * len(TEXTS)
        assert set(load.statuses) <= {200, 503}
        assert (load.wrong, load.kept) == (0, 0)


def test_a_slow_reader_gets_its_complete_answer_after_sigterm(folders: dict[str, Path], tmp_path: Path) -> None:
    with served_in_process(folders["embedding"], tmp_path, "--batch-rows", 1, "--grace-seconds", 100) as server:
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(("127.0.0.1", server.port))
            slow.sendall(request_of(json.dumps({"inputs": "12345678" * 15_000}).encode(), path=b"/tokenize"))
            wait_until(lambda: server.metrics().get('te_request_success_total{method="tokenize"}') == 1)
            server.process.terminate()
            time.sleep(2)  # longer than uvicorn waited before
            with slow.makefile("rb") as stream:
                head, _, body = stream.read().partition(b"\r\n\r\n")
        assert int(head.lower().partition(b"content-length: ")[2].split()[0]) == len(body) > 6_000_000
        assert len(json.loads(body)[0]) == 120_002
        assert server.process.wait() == 0


def test_a_server_that_is_killed_gave_no_wrong_answer(server: Served) -> None:
    load = Load(server, 8)
    wait_until(lambda: len(load.statuses) > 40)
    server.process.kill()
    load.join()
    assert (load.wrong, set(load.statuses), load.broken) == (0, {200}, 8)


# --- the start


def test_a_port_in_use_is_refused(folders: dict[str, Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert str(port) in refusal("serve", "--model", folders["embedding"], "--port", port)
    assert "no.such.host" in refusal("serve", "--model", folders["embedding"], "--host", "no.such.host.invalid")


def test_a_key_that_everybody_may_read_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    key = tmp_path / "key"
    for content, mode in (("secret\n", 0o644), ("", 0o600), ("two words", 0o600)):
        key.write_text(content)
        key.chmod(mode)
        assert str(key) in refusal("serve", "--model", folders["embedding"], "--port", 0, "--api-key-file", key)
    assert "nothing" in refusal("serve", "--model", folders["embedding"], "--api-key-file", tmp_path / "nothing")


@pytest.mark.parametrize(
    "option", ["--port=70000", "--queue-seconds=0", "--precision=int8", "--request-bytes=none", "--device=tpu"]
)
def test_settings_out_of_range_are_refused(folders: dict[str, Path], option: str) -> None:
    assert option.partition("=")[0] in refusal("serve", "--model", folders["embedding"], option)
