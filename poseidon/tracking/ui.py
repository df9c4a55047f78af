"""MLflow's own server over a run store, as a child process that is ended with all of its children."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from poseidon.errors import PoseidonError, UserError
from poseidon.tracking.where import ARTIFACTS, shown, sqlite_file

#: The first port that is tried, and how many after it.
PORT, PORTS = 5000, 100
#: Seconds that the server may take to answer.
PATIENCE = 120.0
#: What the server says when somebody else has the port, and when it listens itself.
_TAKEN, _OURS = "address already in use", "running on"
_DOUBT = 60.0


class PortTakenError(PoseidonError):
    """Somebody else was faster."""


def free_port(host: str, port: int | None) -> int:
    """``port`` if it is free, or the first free one from 5000 on.

    Raises:
        UserError: the port is taken, none is free, or this machine has no address ``host``.
    """
    if port is not None and not 0 < port < 65536:
        raise UserError(f"ui.port={port}: a port is a number from 1 to 65535")
    for candidate in [port] if port is not None else range(PORT, PORT + PORTS):
        try:
            family, kind, _, _, address = socket.getaddrinfo(host, candidate, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            if error.errno == errno.EACCES:
                raise UserError(
                    f"ui.port={port}: only the superuser may listen there; take one from 1024 on"
                ) from error
            if error.errno != errno.EADDRINUSE:
                raise UserError(f"ui.host={host}: is no address of this machine ({error.strerror})") from error
        else:
            return candidate
    if port is not None:
        raise UserError(f"ui.port={port}: another program listens there; leave it out to get a free one")
    raise UserError(f"no port from {PORT} to {PORT + PORTS - 1} is free; name another: ui.port=...")


class Server:
    """A server on its way up; in a session of its own, whose leader is :attr:`process`."""

    def __init__(self, uri: str, host: str, port: int) -> None:
        self.url = f"http://{_reachable(host)}:{port}"
        self._output: IO[bytes] = TemporaryFile()  # noqa: SIM115 - gone with this object
        file = sqlite_file(uri)
        folder = file.parent if file else Path.cwd()
        arguments = {"host": host, "port": port, "workers": 1, "artifacts-destination": (folder / ARTIFACTS).as_uri()}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *(f"--{key}={value}" for key, value in arguments.items())],
            env=_environment(uri),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
        )

    def wait(self, patience: float = PATIENCE) -> None:
        """Until it answers.

        Raises:
            PortTakenError: somebody else took the port.
            PoseidonError: it has ended, or is not there in time; quotes its last words.
        """
        begun, answered = time.monotonic(), None
        while True:
            now = time.monotonic()
            if self.process.poll() is not None:
                raise self.ended()
            if answered is None and self._answers():
                answered = now
            # The answer may be another server's, of somebody who took the port while ours was starting.
            if answered is not None and (_OURS in self._words() or now >= answered + _DOUBT):
                return
            if now >= begun + patience:
                raise PoseidonError(f"MLflow's server has not answered at {self.url} within {patience:.0f} s")
            time.sleep(0.1)

    def ended(self) -> PoseidonError:
        """Why it has ended, by itself."""
        words = self._words()
        if _TAKEN in words.lower():
            return PortTakenError(f"{self.url}: {_TAKEN}")
        lines = words.splitlines() or [f"exit code {self.process.returncode}"]
        last = next((line for line in reversed(lines) if "error" in line.lower()), lines[-1])
        return PoseidonError(f"MLflow's server has ended: {last.strip()}")

    def _answers(self) -> bool:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine
        with contextlib.suppress(OSError, ValueError), opener.open(f"{self.url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
        return False

    def _words(self) -> str:
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0).decode(errors="replace").strip()  # the child's offset stays


def _environment(uri: str) -> dict[str, str]:
    """The store goes in here, not among the arguments, which everybody on the machine can read."""
    kept = {key: value for key, value in os.environ.items() if key not in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID")}
    return {
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # five processes less
        "MLFLOW_DISABLE_TELEMETRY": "true",
        **kept,
        "MLFLOW_BACKEND_STORE_URI": uri,
        "PYTHONUNBUFFERED": "1",
    }


def require_store(uri: str) -> None:
    """Raises UserError if the store is an SQLite file that is not there."""
    file = sqlite_file(uri)
    if file is not None and not file.is_file():
        raise UserError(
            f"there is no run store {shown(uri)}: `poseidon train ...` in this folder makes one; or name another with "
            f"tracking.uri=... (or MLFLOW_TRACKING_URI)"
        )


def _reachable(host: str) -> str:
    """The host as a browser on this machine writes it."""
    own = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
    return own.get(host) or (f"[{host}]" if ":" in host else host)
