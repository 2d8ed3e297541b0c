"""The watchdog's side in rank 0: it hears every process, rank 0 itself too, over TCP, and ends the run for all of them.

Messages are JSON, one a line. A process first says `{"token", "rank", "name"}`, then, twice a second, `{"arrivals", "signs",
"place", "slow"}`, which is answered by `{"noted"}`, and at last `{"bye"}` or `{"failed", "exit_code"}`, answered by
`{"bye"}`. A verdict, `{"verdict", "exit_code"}`, goes to the other processes first and to rank 0 last, because this server
ends with rank 0.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from typing import Any

from gaudi_bert.training.distributed.watch_ledger import Member, Verdict, judge

__all__ = ["WatchServer"]

LOOK_SECONDS = 0.2
FAREWELL_SECONDS = 3.0


class WatchServer:
    """Watches `size` processes until all have left, in a thread of its own.

    Args:
        listener: a listening socket.
        size: how many processes there are.
        token: what they must know to be heard.
        stall_seconds: see `watch_ledger`.
    """

    def __init__(self, listener: socket.socket, size: int, token: str, stall_seconds: float) -> None:
        self._listener, self._size, self._token, self._stall_seconds = listener, size, token, stall_seconds
        self._members: dict[int, Member] = {}
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._gone: dict[int, asyncio.Event] = {}
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="watch-server", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def wait(self, seconds: float) -> None:
        """Wait until all processes have left, but no longer than `seconds`."""
        self._thread.join(seconds)

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._hear, sock=self._listener)
        verdict = None
        while verdict is None and not self._all_left():
            await asyncio.sleep(LOOK_SECONDS)
            members = [self._members[rank] for rank in sorted(self._members)]
            verdict = judge(members, time.monotonic(), self._stall_seconds)
        if verdict is not None:
            await self._announce(verdict)
        server.close()

    def _all_left(self) -> bool:
        return len(self._members) == self._size and all(member.state == "left" for member in self._members.values())

    async def _announce(self, verdict: Verdict) -> None:
        """Tell all who are still here; rank 0 and who failed last, because their processes end with it."""
        message = {"verdict": verdict.text, "exit_code": verdict.exit_code}
        others = [rank for rank, member in self._members.items() if rank and member.state == "here"]
        for rank in others:
            self._send(rank, message)
        if others:
            await asyncio.wait([asyncio.ensure_future(self._gone[rank].wait()) for rank in others], timeout=FAREWELL_SECONDS)
        for rank, member in self._members.items():
            if member.state == "failed":
                self._send(rank, {"bye": True})
            elif rank == 0:
                self._send(0, message)
        await asyncio.sleep(LOOK_SECONDS)

    def _send(self, rank: int, message: dict[str, Any]) -> None:
        writer = self._writers[rank]
        if not writer.is_closing():
            writer.write(json.dumps(message).encode() + b"\n")

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hear one process from its first word to its last."""
        try:
            hello = json.loads(await reader.readline())
            if hello.get("token") != self._token:
                return
            rank, now = int(hello["rank"]), time.monotonic()
            self._members[rank] = Member(rank, hello["name"], now, now)
            self._writers[rank], self._gone[rank] = writer, asyncio.Event()
            await self._listen(rank, reader)
        except (OSError, ValueError, KeyError, AttributeError):
            return  # not one of ours, or cut off in the middle of a word: `_listen` has taken down the loss
        finally:
            writer.close()

    async def _listen(self, rank: int, reader: asyncio.StreamReader) -> None:
        member = self._members[rank]
        try:
            while line := await reader.readline():
                message = json.loads(line)
                if "bye" in message:
                    member.state = "left"
                    self._send(rank, {"bye": True})
                elif "failed" in message:
                    member.state, member.reason, member.exit_code = "failed", message["failed"], message["exit_code"]
                else:
                    member.beat(time.monotonic(), **message)
                    self._send(rank, {"noted": True})
        finally:
            self._gone[rank].set()
            if member.state == "here":
                member.state = "lost"
