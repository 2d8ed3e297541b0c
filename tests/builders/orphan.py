"""A launcher that starts one watched process and sleeps, for `engines/test_horovod.py`.

usage: python -m tests.builders.orphan stops|hangs   the watched process heeds a request to stop, or does not
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time


def launch(kind: str) -> None:
    with subprocess.Popen([sys.executable, "-m", "tests.builders.orphan", kind, "watched"]):
        time.sleep(600)


def be_watched(kind: str) -> None:
    from gaudi_bert.engines import watchdog  # the launcher needs nothing of ours
    from gaudi_bert.engines.watchdog import Watchdog, WatchServer, connect_to_server

    watchdog.ORPHAN_SECONDS = 1.0

    def stop(number: int, frame: object) -> None:
        print("asked to stop", flush=True)
        if kind == "stops":
            sys.exit(75)

    signal.signal(signal.SIGTERM, stop)
    server = WatchServer(("127.0.0.1", 0), 1, "secret", 60.0)
    connection = connect_to_server(["127.0.0.1"], server.server_address[1])
    Watchdog(connection, "secret", 0, 60.0, server)
    print("ready", flush=True)
    while True:
        time.sleep(0.1)


if __name__ == "__main__":
    (launch if len(sys.argv) == 2 else be_watched)(sys.argv[1])
