"""The store of keys and values where training workers find one another, over real HTTP."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator

import pytest

from gaudi_bert.runners.rendezvous import LARGEST_VALUE_BYTES, RendezvousServer


@pytest.fixture
def connection() -> Iterator[http.client.HTTPConnection]:
    with RendezvousServer(("127.0.0.1", 0)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
        yield connection
        connection.close()
        server.shutdown()


def ask(connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection.request(method, path, body)
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_a_value_is_absent_until_it_is_written_and_stays(connection: http.client.HTTPConnection) -> None:
    assert ask(connection, "GET", "/global/rank_0")[0] == 404
    assert ask(connection, "PUT", "/global/rank_0", b"\x00address\xff") == (200, b"")
    assert ask(connection, "GET", "/global/rank_0") == (200, b"\x00address\xff")
    assert ask(connection, "GET", "/local/rank_0")[0] == 404
    assert ask(connection, "DELETE", "/global/rank_0") == (200, b"")
    assert ask(connection, "GET", "/global/rank_0")[0] == 200


def test_a_value_too_large_for_an_address_is_refused(connection: http.client.HTTPConnection) -> None:
    connection.putrequest("PUT", "/global/rank_0")
    connection.putheader("Content-Length", str(LARGEST_VALUE_BYTES + 1))
    connection.endheaders()
    assert connection.getresponse().status == 413
