"""Networks that are really made."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from poseidon.emulation import host, network
from poseidon.emulation.host import Host, find_host
from poseidon.emulation.links import Link, address
from poseidon.emulation.network import Network
from poseidon.errors import UserError

from .namespaces import DEADLINE, keepers, namespaces, needs_namespaces, wait_until_gone

ROOT = Path(__file__).parents[2]
#: Listens on argv[1]; says its port; sends argv[3] to the first that connects, then reads to the end.
LISTEN = """
import socket, sys
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as server:
    server.settimeout(20)
    print("listening", flush=True)
    connection, (peer, _) = server.accept()
    connection.settimeout(20)
    connection.sendall(sys.argv[3].encode())
    count = 0
    while data := connection.recv(65536):
        count += len(data)
    print(peer, count, flush=True)
"""
#: Connects, reads the greeting, sends argv[3] bytes.
CALL = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 20) as connection:
    print(connection.recv(100).decode(), flush=True)
    connection.sendall(bytes(int(sys.argv[3])))
"""
PORT = "29500"


def listen(on: Network, node: int, greeting: str) -> subprocess.Popen[str]:
    argv = on.enter(node, [sys.executable, "-S", "-c", LISTEN, address(node), PORT, greeting])
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "listening\n"
    return process


def call(on: Network, node: int, to: int, size: int = 0) -> str:
    argv = on.enter(node, [sys.executable, "-S", "-c", CALL, address(to), PORT, str(size)])
    return subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE, check=True).stdout.strip()


@needs_namespaces
def test_nodes_reach_one_another_and_nothing_else_and_all_of_it_goes():
    before = namespaces([os.getpid()])
    with Network([Link(1e9)] * 3) as three:
        held = keepers(os.getpid())
        found = namespaces(held)
        assert (len(held), len(found), found & before) == (4, 4, set())
        server = listen(three, 2, "welcome")
        assert call(three, 0, 2, size=1000) == "welcome"
        assert server.communicate(timeout=DEADLINE)[0] == f"{address(0)} 1000\n"
        routes = subprocess.run(three.enter(1, [host.find_host().ip, "route"]), capture_output=True, text=True).stdout
        assert [line.split()[0] for line in routes.splitlines()] == ["10.77.0.0/16"]
    assert keepers(os.getpid()) == []
    wait_until_gone(found)


@needs_namespaces
def test_two_networks_with_the_same_addresses_do_not_meet():
    with Network([Link()] * 2) as one, Network([Link()] * 2) as other:
        servers = [listen(one, 0, "one"), listen(other, 0, "other")]
        assert call(one, 1, 0) == "one"
        assert call(other, 1, 0) == "other"
        for server in servers:
            server.communicate(timeout=DEADLINE)


@needs_namespaces
@pytest.mark.parametrize(
    "rates", [(8e6, None), (None, 8e6)], ids=["the sender's link is slow", "the receiver's link is slow"]
)
def test_a_slow_link_is_slow(rates):
    size = 500_000
    with Network([Link(rate) for rate in rates]) as two:
        server = listen(two, 1, "go")
        began = time.monotonic()
        call(two, 0, 1, size)
        assert server.communicate(timeout=DEADLINE)[0].split()[1] == str(size)
        took = time.monotonic() - began
    assert took >= (size - 80 * 1024) * 8 / 8e6  # less what the bucket holds


@needs_namespaces
def test_latency_without_netem_is_said_and_left_out():
    with Network([Link(1e9, 1e-4)] * 2) as two:
        pass
    assert two.warnings in ([], ["this kernel has no netem: cluster.latency is not emulated"])


@needs_namespaces
def test_without_cubic_the_kernel_s_own_congestion_control_is_taken(monkeypatch):
    monkeypatch.setattr(network, "congestion_controls", lambda: ["reno"])
    with Network([Link()]) as one:
        assert one.warnings == ["this kernel has no TCP cubic: nodes take its own congestion control"]


@needs_namespaces
def test_a_failure_half_way_leaves_nothing_and_is_one_line(monkeypatch):
    found: set[str] = set()

    def shape(link: Link, device: str) -> list[str]:
        found.update(namespaces(keepers(os.getpid())))
        return [f"qdisc add dev {device} root nonsense"]

    monkeypatch.setattr(network, "shape_port", shape)
    with pytest.raises(UserError, match=r"^cluster=emulated: tc: .*kind is unknown") as caught:
        Network([Link(1e9)] * 2)
    assert "\n" not in str(caught.value)
    assert len(found) == 3
    assert keepers(os.getpid()) == []
    wait_until_gone(found)


@needs_namespaces
def test_a_namespace_that_cannot_be_made_is_one_line(tmp_path):
    tool = tmp_path / "unshare"
    tool.write_text("#!/bin/sh\necho 'unshare failed:' >&2\necho 'No space left on device' >&2\nexit 1\n")
    tool.chmod(0o755)
    real = find_host()
    with pytest.raises(UserError, match=r"cannot make a network namespace: unshare failed: No space left on device$"):
        Network([Link()], Host(real.ip, real.tc, str(tool), real.nsenter))
    assert keepers(os.getpid()) == []


def test_missing_tools_are_one_line_that_says_what_to_install(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name, path: None if name in ("ip", "tc") else f"/usr/bin/{name}")
    with pytest.raises(
        UserError, match=r"^cluster=emulated: needs ip and tc: apt install iproute2 \(Debian, Ubuntu\)$"
    ):
        find_host()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"kernel/unprivileged_userns_clone": "0"},
            "run as root, or allow it: sysctl kernel.unprivileged_userns_clone=1",
        ),
        (
            {"kernel/apparmor_restrict_unprivileged_userns": "1", "user/max_user_namespaces": "10"},
            "sysctl kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        ({}, "in a container, start that with --cap-add=SYS_ADMIN --cap-add=NET_ADMIN"),
    ],
)
def test_missing_rights_are_one_line_that_says_what_to_allow(monkeypatch, settings, words):
    monkeypatch.setattr(shutil, "which", lambda name, path: "/bin/false")
    monkeypatch.setattr(host, "_read", settings.get)
    with pytest.raises(UserError) as caught:
        find_host()
    assert str(caught.value).startswith("cluster=emulated: may not make network namespaces: ")
    assert words in str(caught.value)


UNPRIVILEGED = """
import os, subprocess
from poseidon.emulation.links import Link
from poseidon.emulation.network import Network
assert os.getuid() != 0
with Network([Link(1e9)] * 2) as two:
    print(subprocess.run(two.enter(1, ["ip", "address"]), capture_output=True, text=True).stdout)
    print(subprocess.run(two.enter(1, ["tc", "qdisc"]), capture_output=True, text=True).stdout)
    print(two.enter(1, []))
"""


@needs_namespaces
def test_whoever_is_not_root_has_a_user_namespace_around_the_network():
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    env["PATH"] = f"{env['PATH']}:/usr/sbin:/sbin"
    command = [sys.executable, "-c", UNPRIVILEGED]
    if os.getuid() == 0:
        nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        may = subprocess.run([*nobody, "unshare", "--user", "--map-root-user", "--net", "true"], capture_output=True)
        if may.returncode != 0:
            pytest.skip(f"this kernel lets no user make namespaces: {may.stderr.decode().strip()}")
        command = [*nobody, *command]
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=60)
    if "Permission denied" in done.stderr and "Error" not in done.stderr:
        pytest.skip("nobody may not read this checkout or run its python")
    assert done.returncode == 0, done.stderr
    assert address(1) in done.stdout
    assert "tbf" in done.stdout
    assert "--user" in done.stdout
