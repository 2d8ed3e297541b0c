"""Compare `gaudi-bert serve` with other servers of the same model: CPU time per text, latency and slots.

    python benchmarks/serving.py [--peers infinity sentence-transformers padded] [--kinds mix passages queries]
        [--clients 32 128] [--rounds 3]
    python benchmarks/serving.py --kinds --peers    # only the latency of queries, alone and during bulk requests
    python benchmarks/serving.py --overload
    python benchmarks/serving.py --attacks          # queries during requests that are designed to overload the server
    python benchmarks/serving.py --device cuda      # slots, texts per second and latency next to `padded`, in bfloat16

The servers run in turn. The model is all-MiniLM-L6-v2 with two threads. The texts are first lines of docstrings of the
standard library (queries of about ten tokens) and their bodies (passages of about a hundred tokens). The mix contains 70 %
queries and 30 % passages. Each client sends a text and waits for its answer. The other servers are:

- `infinity`: Infinity 0.0.78 (engine torch, batches of 32), in an environment that this program creates in `--environment`.

- `sentence-transformers`: a FastAPI around `SentenceTransformer.encode`, as in the library's documentation.

- `padded`: batches of 32 texts in order of arrival, padded to powers of two in both dimensions, as is usual on accelerators
that compile graphs.

For each load, the benchmark prints a lower limit of the CPU time: the time of the matrix products of its tokens at PyTorch's
highest rate for large matrices, plus the time of a request to `/tokenize`, which includes everything except the model.

Finally, the benchmark measures the latency of single queries, alone and while one client sends bulk requests of 1,000 texts.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from finetuning_data import find_minilm_folder
from measuring import print_figure, print_processor

INFINITY = "infinity-emb[server,torch]==0.0.78"
PADDED, LOOP = "padded", "sentence-transformers"
_MOST_CHARACTERS = 1200  # of a passage
_BATCH, _LONGEST = 32, 256
_WEIGHTS_OF_LAYERS = 6 * 12 * 384**2  # of MiniLM's matrices, each of which multiplies every token
_SHARE_OF_QUERIES = {"mix": 0.7, "passages": 0.0, "queries": 1.0}


# --- texts


def draw_texts(kind: str, count: int, seed: int) -> list[str]:
    """Return texts from the standard library's docstrings: a `mix`, or only `passages` or `queries`."""
    short, passages = [], []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8", errors="replace"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and (text := ast.get_docstring(node)):
                first, _, rest = text.partition("\n")
                short += [first.strip()] if len(first.split()) > 2 else []
                passages += [rest.strip()[:_MOST_CHARACTERS]] if len(rest.split()) > 40 else []
    random = np.random.default_rng(seed)
    is_short = random.random(count) < _SHARE_OF_QUERIES[kind]
    return [short[random.integers(len(short))] if each else passages[random.integers(len(passages))] for each in is_short]


# --- servers


@dataclass
class Server:
    """A server process, with the route and the JSON key of its requests."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    route: str
    key: str

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of all threads of the process."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mib(self) -> float:
        """Return the peak memory of the process."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024

    def slots_and_tokens(self) -> tuple[float, float] | None:
        """Return the number of computed slots and of tokens in them, or None if the server does not count them."""
        if self.name == PADDED:
            content = json.loads(urllib.request.urlopen(f"http://127.0.0.1:{self.port}/counts").read())
            return content["slots"], content["tokens"]
        if self.name != "gaudi-bert":
            return None
        lines = urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics").read().decode().splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return float(values["gaudi_bert_slots_total"]), float(values["gaudi_bert_slot_tokens_total"])


@contextlib.contextmanager
def server_running(name: str, model: Path, device: str, environment: Path, log: Path) -> Iterator[Server]:
    """Start a server, and yield it as soon as it answers. On exit, kill it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    route, key, here = "/embed", "inputs", str(Path(__file__).resolve())
    if name == "gaudi-bert":
        precision = ["--precision", "bfloat16"] if device == "cuda" else []
        command = [sys.executable, "-m", "gaudi_bert", "serve", "--model", model, "--device", device, *precision]
        command += ["--auto-truncate", "--port", port]
    elif name == "infinity":
        route, key = "/embeddings", "input"
        command = [environment / "bin" / "infinity_emb", "v2", "--model-id", model, "--engine", "torch", "--device", device]
        command += ["--port", port, "--no-bettertransformer", "--batch-size", _BATCH]
    else:
        command = [sys.executable, here, "--serve", name, "--model", model, "--device", device, "--port", port]
    variables = {**os.environ, "OMP_NUM_THREADS": "2", "DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0"}
    with (log / f"{name}.log").open("wb") as handle:
        process = subprocess.Popen(list(map(str, command)), stdout=handle, stderr=handle, env=variables)
    try:
        deadline = time.monotonic() + 600
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{name} does not start:\n{(log / f'{name}.log').read_text(errors='replace')[-2000:]}")
            time.sleep(0.5)
        yield Server(name, port, process, route, key)
    finally:
        process.kill()
        process.wait()


def install_infinity(environment: Path) -> None:
    """Install Infinity into an environment of its own, unless it is already installed."""
    if (environment / "bin" / "infinity_emb").exists():
        return
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    subprocess.run([environment / "bin" / "python", "-m", "pip", "install", "-q", INFINITY, "typer<0.16"], check=True)


# --- clients


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(server: Server) -> Connection:
    """Open a connection to a server."""
    return await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 26)


async def send(server: Server, texts: Sequence[str], connection: Connection) -> tuple[int, bytes]:
    """Send one request over an open connection, and return the status and the body of the answer."""
    reader, writer = connection
    single = texts[0] if len(texts) == 1 else list(texts)
    body = json.dumps({server.key: single, "model": "model"}).encode()
    head = (
        f"POST {server.route} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    headers = (await reader.readuntil(b"\r\n\r\n")).lower()
    size = int(headers.partition(b"content-length:")[2].split(b"\r\n")[0])
    return int(headers.split()[1]), await reader.readexactly(size)


async def request_answer(server: Server, texts: Sequence[str], connection: Connection) -> bytes:
    """Send one request, and return the body of its answer. If the status is not 200, end the benchmark."""
    status, answer = await send(server, texts, connection)
    if status != 200:
        raise SystemExit(f"{server.name}: {status} {answer.decode()}")
    return answer


async def closed_loop(server: Server, texts: Sequence[str], clients: int) -> list[float]:
    """Let clients send one text each, wait for the answer, and send the next, until all texts are answered. Return the
    seconds of each request.
    """
    waiting, seconds = list(texts), []

    async def client() -> None:
        connection = await connect(server)
        while waiting:
            text, begun = waiting.pop(), time.perf_counter()
            await request_answer(server, [text], connection)
            seconds.append(time.perf_counter() - begun)
        connection[1].close()

    await asyncio.gather(*(client() for _ in range(clients)))
    return seconds


async def open_loop(server: Server, texts: Sequence[str], rate: float, bulk: Sequence[str] = ()) -> list[float]:
    """Send texts at random times with a mean rate per second, and return the seconds of each request. If `bulk` is given,
    another client sends bulk requests in the meantime.
    """
    random, seconds, done = np.random.default_rng(3), [], asyncio.Event()

    async def one(text: str) -> None:
        connection = await connect(server)
        begun = time.perf_counter()
        await request_answer(server, [text], connection)
        seconds.append(time.perf_counter() - begun)
        connection[1].close()

    async def bulks() -> None:
        connection = await connect(server)
        while bulk and not done.is_set():
            await request_answer(server, bulk, connection)
        connection[1].close()

    sending = asyncio.ensure_future(bulks())
    tasks = []
    for text in texts:
        tasks.append(asyncio.ensure_future(one(text)))
        await asyncio.sleep(random.exponential(1 / rate))
    await asyncio.gather(*tasks)
    done.set()
    await sending
    return seconds


async def flood(server: Server, texts: Sequence[str], rate: float, seconds: float) -> list[tuple[int, str, bytes, float]]:
    """Send texts at a fixed rate per second without waiting for answers, and return the status, text, answer and seconds of
    each request.
    """
    random, idle = np.random.default_rng(5), list[Connection]()
    found: list[tuple[int, str, bytes, float]] = []

    async def one(text: str) -> None:
        while idle and idle[-1][0].at_eof():  # the server has closed idle connections
            idle.pop()
        connection = idle.pop() if idle else await connect(server)
        begun = time.perf_counter()
        status, answer = await send(server, [text], connection)
        found.append((status, text, answer, time.perf_counter() - begun))
        idle.append(connection)

    begun, tasks = time.perf_counter(), list[asyncio.Future[None]]()
    while (now := time.perf_counter()) - begun < seconds:
        due = int((now - begun) * rate) - len(tasks)
        tasks += [asyncio.ensure_future(one(texts[random.integers(len(texts))])) for _ in range(due)]
        await asyncio.sleep(0.01)
    await asyncio.gather(*tasks)
    return found


def request_vectors(server: Server, texts: Sequence[str]) -> np.ndarray:
    """Return the vectors that a server computes for a few texts."""

    async def asked() -> bytes:
        return await request_answer(server, texts, await connect(server))

    content = json.loads(asyncio.run(asked()))
    listed = content if isinstance(content, list) else [each["embedding"] for each in content["data"]]
    return np.array(listed, np.float64)


# --- what is measured


def compare(servers: Sequence[Server], kind: str, clients: int, options: argparse.Namespace) -> float:
    """Print the cost of a text for each server, measured in turn. Return the rate of the last server, in texts per second of
    elapsed time.
    """
    costs: dict[str, list[float]] = {server.name: [] for server in servers}
    rates: dict[str, list[float]] = {server.name: [] for server in servers}
    for server in servers:
        asyncio.run(closed_loop(server, draw_texts(kind, 2 * clients, 99), clients))
    before = {server.name: server.slots_and_tokens() for server in servers}
    late: dict[str, list[float]] = {server.name: [] for server in servers}
    for number in range(options.rounds):
        texts = draw_texts(kind, options.texts, number)
        for server in servers:
            cpu, wall = server.cpu_seconds(), time.perf_counter()
            late[server.name] += asyncio.run(closed_loop(server, texts, clients))
            rates[server.name].append(len(texts) / (time.perf_counter() - wall))
            costs[server.name].append(1000 * (server.cpu_seconds() - cpu) / len(texts))
    print(f"{kind}, {clients} clients", flush=True)
    for server in servers:
        name = f"{kind}, {clients} clients, {server.name}"
        print_figure(f"{name}: CPU of the server for a text", costs[server.name], "ms")
        print_figure(f"{name}: texts", rates[server.name], "a second")
        print_figure(
            f"{name}: p50, p99", [1000 * float(np.quantile(late[server.name], share)) for share in (0.5, 0.99)], "ms"
        )
        counted, first = server.slots_and_tokens(), before[server.name]
        if counted is not None and first is not None:
            print_figure(f"{name}: slots a token", [(counted[0] - first[0]) / (counted[1] - first[1])], "")
    ours = servers[0].name
    if options.device == "cpu":
        print_figure(
            f"{kind}, {clients} clients: limit of the CPU for a text", [limit_milliseconds(servers[0], kind, clients)], "ms"
        )
    for server in servers[1:]:
        ratios = [other / own for other, own in zip(costs[server.name], costs[ours], strict=True)]
        print_figure(f"{kind}, {clients} clients: CPU of {server.name} / of {ours}", ratios, "times")
    return float(np.median(rates[servers[-1].name]))


def limit_milliseconds(server: Server, kind: str, clients: int) -> float:
    """Return the lowest possible CPU time per text of a load: the time of its matrix products at their highest rate, plus
    the time of a request without the model.
    """
    import torch
    from torch.nn import functional

    texts = draw_texts(kind, 300, 99)
    without_model, cpu = replace(server, route="/tokenize"), server.cpu_seconds()
    asyncio.run(closed_loop(without_model, texts, clients))
    http_seconds = (server.cpu_seconds() - cpu) / len(texts)
    before = server.slots_and_tokens()
    asyncio.run(closed_loop(server, texts, clients))
    after = server.slots_and_tokens()
    if before is None or after is None:
        raise SystemExit(f"{server.name} does not count its tokens")
    torch.set_num_threads(1)
    left, right_OI = torch.rand(2048, 384), torch.rand(1536, 384)
    seconds = min(_cpu_seconds(lambda: functional.linear(left, right_OI)) for _ in range(20))
    with contextlib.suppress(AttributeError):  # not part of PyTorch's public interface
        multiply = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001
        other = min(_cpu_seconds(lambda: multiply(left, right_OI, None, "none", [], "")) for _ in range(20))
        seconds = min(seconds, other)
    multiplications = (after[1] - before[1]) / len(texts) * _WEIGHTS_OF_LAYERS
    return 1000 * (multiplications * seconds / (2048 * 384 * 1536) + http_seconds)


def _cpu_seconds(function: Callable[[], Any]) -> float:
    """Return the CPU seconds of a call."""
    begun = time.process_time()
    function()
    return time.process_time() - begun


def print_latencies(servers: Sequence[Server], rate: float, options: argparse.Namespace) -> None:
    """Print the latency of single queries at a given rate, and at a low rate during bulk requests of 1,000 texts."""
    queries = [text for text in draw_texts("mix", 4 * options.texts, 7) if len(text.split()) < 20][: options.texts]
    bulk, few = draw_texts("mix", 1000, 8), 2.0 if options.device == "cpu" else 20.0
    for server in servers:
        loads = [(f"{rate:.0f} queries a second", rate, queries, ())] if rate else []
        for what, load, texts, beside in (
            *loads,
            (f"{few:.0f} queries a second", few, queries[:100], ()),
            (f"{few:.0f} queries a second during bulks of 1,000 texts", few, queries[:100], bulk),
        ):
            seconds = asyncio.run(open_loop(server, texts, load, beside))
            shares = [1000 * float(np.quantile(seconds, share)) for share in (0.5, 0.99)]
            print_figure(f"{server.name}, {what}: p50 and p99", shares, "ms")


def measure_overload(server: Server, options: argparse.Namespace) -> None:
    """Print what happens at ten times the highest rate during a minute, and the rate afterwards."""
    texts = draw_texts("mix", 300, 11)
    expected = dict(zip(texts, request_vectors(server, texts), strict=True))
    many = draw_texts("mix", options.texts, 12)
    rates = []
    for _ in range(2):
        begun = time.perf_counter()
        asyncio.run(closed_loop(server, many, 128))
        rates.append(len(many) / (time.perf_counter() - begun))
        if len(rates) == 2:
            break
        begun, before, used, own = time.perf_counter(), server.memory_mib(), server.cpu_seconds(), time.process_time()
        found = asyncio.run(flood(server, texts, 10 * rates[0], 60.0))
        taken, used, own = time.perf_counter() - begun, server.cpu_seconds() - used, time.process_time() - own
        good = [each for each in found if each[0] == 200]
        wrong = sum(np.abs(np.array(json.loads(answer)[0]) - expected[text]).max() > 1e-5 for _, text, answer, _ in good)
        counts = dict(sorted(Counter(status for status, *_ in found).items()))
        print(f"10 times the highest rate for 60 s: {len(found)} requests, by status {counts}; {wrong} wrong answers")
        print_figure("good answers / the highest rate", [len(good) / taken / rates[0]], "times", ">= 0.9")
        print_figure("seconds of an answer, longest", [max(each[3] for each in good)], "s")
        print_figure("seconds of a refusal, longest", [max((each[3] for each in found if each[0] != 200), default=0.0)], "s")
        print_figure("cores that the server, and the clients, used", [used / taken, own / taken], "")
        print_figure("memory before, and at the most", [before, server.memory_mib()], "MiB")
    print_figure("rate afterwards / before", [rates[1] / rates[0]], "times")


# --- requests that are designed to overload a server

_LARGEST = (8 << 20) - 200  # bytes of a body
_ATTACK_SECONDS, _QUERIES = 10.0, 100


def build_attacks() -> dict[str, tuple[str, bytes, int, float | None]]:
    """Return the attacks by name, each with its route, body and number of clients, and the time after which a client
    disconnects.
    """

    def filled(head: str, item: str, tail: str) -> bytes:
        return (head + item * ((_LARGEST - len(head) - len(tail)) // len(item)) + tail).encode()

    many = json.dumps({"inputs": ["some words " * 350] * 2048, "truncate": True}).encode()
    few = json.dumps({"inputs": [f"words of request {number}" for number in range(200)]}).encode()
    left = '", "truncate": true, "truncation_direction": "left"}'
    return {
        "objects": ("/embed", filled('{"inputs":[', "{},", "{}]}"), 1, None),
        "fractions": ("/embed", filled('{"inputs":[', "0.5,", "1]}"), 1, None),
        "lists": ("/embed", filled('{"inputs":[', "[],", "[]]}"), 1, None),
        "token ids": ("/embed", filled('{"inputs":[', "1,", "1]}"), 1, None),
        "documents of numbers": ("/v1/rerank", filled('{"query":"a","documents":[', "1,", "1]}"), 1, None),
        "empty texts": ("/embed", filled('{"inputs":[', '"",', '""]}'), 1, None),
        "/tokenize of a text": ("/tokenize", filled('{"inputs":"', "some words ", '"}'), 1, None),
        "/tokenize of the largest text": ("/tokenize", json.dumps({"inputs": "a " * 65_000}).encode(), 1, None),
        "a text cut at the right": ("/embed", filled('{"inputs":"', "some words ", '", "truncate": true}'), 1, None),
        "a text cut at the left": ("/embed", filled('{"inputs":"', "some words ", left), 1, None),
        "a word cut at the left": ("/embed", filled('{"inputs":"', "a", left), 1, None),
        "100 clients of 8 MB that go away": ("/embed", many, 100, 0.3),
        "cancelled requests of 200 texts": ("/embed", few, 64, 0.05),
    }


async def run_attack(
    server: Server, route: str, body: bytes, clients: int, patience: float | None
) -> tuple[list[float], Counter]:
    """Let clients send a body repeatedly for a while. Return the seconds of normal queries in the meantime, and the statuses
    of the attackers' requests.
    """
    head = f"POST {route} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    statuses, seconds, until = Counter[str](), list[float](), time.perf_counter() + _ATTACK_SECONDS

    async def exchange() -> str:
        reader, writer = await connect(server)
        try:
            writer.write(head + body)
            await writer.drain()
            return (await reader.readuntil(b"\r\n")).split()[1].decode()
        finally:
            writer.transport.abort() if patience is None else writer.close()

    async def client() -> None:
        while time.perf_counter() < until:
            try:
                statuses[await asyncio.wait_for(exchange(), patience or 120)] += 1
            except (OSError, EOFError, asyncio.TimeoutError):
                statuses["closed"] += 1

    async def query() -> None:
        connection = await connect(server)
        while time.perf_counter() < until or len(seconds) < 3:
            begun = time.perf_counter()
            status, _ = await asyncio.wait_for(send(server, ["what is a pack?"], connection), 120)
            if status != 200:
                raise SystemExit(f"a query was answered with {status}")
            seconds.append(time.perf_counter() - begun)
            await asyncio.sleep(_ATTACK_SECONDS / _QUERIES)
        connection[1].close()

    await asyncio.gather(query(), *(client() for _ in range(clients)))
    return seconds, statuses


def measure_attacks(model: Path, options: argparse.Namespace) -> None:
    """Print the effect of each attack on queries and on the server's memory. Each attack uses a new server."""
    for name, (route, body, clients, patience) in build_attacks().items():
        if options.only and not any(part in name for part in options.only):
            continue
        with server_running("gaudi-bert", model, options.device, options.environment, Path(tempfile.gettempdir())) as server:
            request_vectors(server, draw_texts("mix", 64, 1))
            before = server.memory_mib()
            seconds, statuses = asyncio.run(run_attack(server, route, body, clients, patience))
            shares = [1000 * float(np.quantile(seconds, share)) for share in (0.5, 0.99)]
            print_figure(f"{name}: p50 and p99 of a query", shares, "ms")
            print_figure(f"{name}: memory before, and at the most", [before, server.memory_mib()], "MiB")
            print(f"  {name}: {len(body):,} bytes, by status {dict(sorted(statuses.items()))}", flush=True)


# --- servers that are implemented in this file


def serve_peer(name: str, model: Path, device: str, port: int) -> None:
    """Serve the model with `sentence-transformers` behind FastAPI, or with batches that are padded to powers of two."""
    import uvicorn
    from fastapi import FastAPI
    from pydantic import BaseModel

    class Texts(BaseModel):
        inputs: str | list[str]

    Texts.model_rebuild(_types_namespace={})
    app = FastAPI()
    if name == LOOP:
        from sentence_transformers import SentenceTransformer

        encoder = SentenceTransformer(str(model), device=device)

        @app.post("/embed")
        def embed(body: dict[str, Any]) -> list[list[float]]:
            inputs = Texts(**body).inputs
            found: list[list[float]] = encoder.encode([inputs] if isinstance(inputs, str) else inputs).tolist()
            return found
    else:
        _add_padded(app, model, device)

    @app.get("/health")
    def health() -> dict[str, str]:
        return {}

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


def _add_padded(app: Any, model: Path, device: str) -> None:
    """Add routes that compute batches of texts, padded to powers of two."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    encoder = AutoModel.from_pretrained(model, attn_implementation="sdpa").eval().to(device, dtype)
    tokenizer = AutoTokenizer.from_pretrained(model)
    waiting: asyncio.Queue[tuple[list[int], asyncio.Future[list[float]]]] = asyncio.Queue()
    counts = {"slots": 0, "tokens": 0}

    def compute(texts: list[list[int]]) -> list[list[float]]:
        rows, length = 1 << (len(texts) - 1).bit_length(), max(32, 1 << (max(map(len, texts)) - 1).bit_length())
        ids, mask = torch.zeros((rows, length), dtype=torch.long), torch.zeros((rows, length), dtype=torch.long)
        for row, text in enumerate(texts):
            ids[row, : len(text)], mask[row, : len(text)] = torch.tensor(text), 1
        counts["slots"] += rows * length
        counts["tokens"] += sum(map(len, texts))
        with torch.inference_mode():
            mask = mask.to(device)
            hidden = encoder(input_ids=ids.to(device), attention_mask=mask).last_hidden_state.float()
            sums = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
            found: list[list[float]] = torch.nn.functional.normalize(sums)[: len(texts)].cpu().tolist()
        return found

    async def work() -> None:
        while True:
            batch = [await waiting.get()]
            while len(batch) < _BATCH and not waiting.empty():
                batch.append(waiting.get_nowait())
            found = await asyncio.to_thread(compute, [text for text, _ in batch])
            for (_, future), vector in zip(batch, found, strict=True):
                future.set_result(vector)

    @app.post("/embed")
    async def embed(body: dict[str, Any]) -> list[list[float]]:
        inputs = [body["inputs"]] if isinstance(body["inputs"], str) else body["inputs"]
        tokens = await asyncio.to_thread(tokenizer, inputs, truncation=True, max_length=_LONGEST)
        futures = [asyncio.get_running_loop().create_future() for _ in inputs]
        for pair in zip(tokens["input_ids"], futures, strict=True):
            waiting.put_nowait(pair)
        return list(await asyncio.gather(*futures))

    @app.get("/counts")
    def counted() -> dict[str, int]:
        return counts

    tasks: list[asyncio.Task[None]] = []
    app.router.on_startup.append(lambda: tasks.append(asyncio.get_running_loop().create_task(work())))


def main() -> None:
    """Parse the command line, start the servers, and compare them in turn."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--peers", nargs="*", default=["infinity", LOOP, PADDED], choices=["infinity", LOOP, PADDED])
    parser.add_argument("--kinds", nargs="*", default=list(_SHARE_OF_QUERIES), choices=_SHARE_OF_QUERIES)
    parser.add_argument("--clients", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--texts", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--environment", type=Path, default=Path(tempfile.gettempdir()) / "infinity")
    parser.add_argument("--no-latency", action="store_true")
    parser.add_argument(
        "--overload", action="store_true", help="only gaudi-bert, at ten times its highest rate for a minute"
    )
    parser.add_argument(
        "--attacks", action="store_true", help="only gaudi-bert, during requests that are designed to overload it"
    )
    parser.add_argument("--only", nargs="*", help="only attacks whose names contain one of these words")
    parser.add_argument("--serve", choices=[LOOP, PADDED], help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    model = options.model or find_minilm_folder()
    if options.serve is not None:
        serve_peer(options.serve, model, options.device, options.port)
        return
    print_processor()
    peers = [PADDED] if options.device == "cuda" else options.peers
    if options.attacks:
        measure_attacks(model, options)
        return
    if options.overload:
        log = Path(tempfile.gettempdir())
        with server_running("gaudi-bert", model, options.device, options.environment, log) as server:
            measure_overload(server, options)
        return
    if "infinity" in peers:
        install_infinity(options.environment)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        names = ["gaudi-bert", *sorted(peers, key=lambda peer: peer == "infinity")]
        servers = [
            stack.enter_context(server_running(name, model, options.device, options.environment, Path(folder)))
            for name in names
        ]
        few = draw_texts("mix", 20, 1)
        expected = request_vectors(servers[0], few)
        for server in servers[1:]:
            difference = float(np.abs(request_vectors(server, few) - expected).max())
            print(f"  vectors of {server.name} differ by at most {difference:.1e}", flush=True)
        rate = 0.0
        for kind in options.kinds:
            for clients in options.clients:
                found = compare(servers, kind, clients, options)
                rate = rate or found
        if not options.no_latency:
            print_latencies(servers, 0.7 * rate, options)


if __name__ == "__main__":
    main()
