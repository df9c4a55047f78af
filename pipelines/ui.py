"""Open MLflow's pages over the tracked runs."""

from __future__ import annotations

import contextlib
import signal
import sys
import webbrowser
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from poseidon.config.app import Result, run
from poseidon.config.schema import UiConfig

if TYPE_CHECKING:
    from poseidon.tracking.ui import Server


def main(argv: Sequence[str]) -> int:
    """Runs ``poseidon ui`` and gives its exit code."""
    return run("ui", argv, _ui, lambda config: None)


def _ui(config: UiConfig, overrides: list[str], folder: Path) -> Result:
    from poseidon.tracking.ui import require_store
    from poseidon.tracking.where import is_server, shown, store_uri

    uri = store_uri(config.tracking.uri)
    if is_server(uri):
        print(f"MLflow: {shown(uri)}", flush=True)
        _browse(config, uri)
        return Result(0)
    require_store(uri)
    with _terminable(), contextlib.suppress(KeyboardInterrupt), _started(uri, config) as server:
        print(f"MLflow: {server.url} over {shown(uri)}; Ctrl-C ends it", flush=True)
        _browse(config, server.url)
        server.process.wait()
        raise server.ended()
    return Result(0)


@contextlib.contextmanager
def _started(uri: str, config: UiConfig) -> Iterator[Server]:
    """A server that answers; ended with all its children afterwards, also if this process is killed."""
    from poseidon.cluster.sessions import Keeper, kill_session
    from poseidon.tracking.ui import PortTakenError, Server, free_port

    keeper = Keeper()
    try:
        while True:
            server = Server(uri, config.ui.host, free_port(config.ui.host, config.ui.port))
            pid = server.process.pid
            keeper.watch(pid)
            try:
                server.wait()
                yield server
                return
            except PortTakenError:
                if config.ui.port is not None:
                    raise
            finally:
                kill_session(pid)
                server.process.wait()
                keeper.forget(pid)
    finally:
        keeper.close()


def _browse(config: UiConfig, url: str) -> None:
    if config.ui.browser:
        with contextlib.suppress(Exception):  # a convenience only
            webbrowser.open(url)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM and SIGHUP end it as Ctrl-C does."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    wanted = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    for number in wanted:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in wanted:
            signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
