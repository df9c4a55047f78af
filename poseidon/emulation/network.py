"""An emulated network for one run: a switch and its nodes, each a network namespace of this machine.

    with Network([Link(rate=1e9)] * 4) as network:
        subprocess.run(network.enter(2, ["ip", "address"]))

The namespaces have no names and no files. Processes hold them (*keepers*), which read a pipe whose other end is in
this process only: however it dies, the keepers end, and with the last process in it the kernel takes a namespace, its
devices and its queues away. So nothing can be left behind, and runs side by side do not meet.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from collections.abc import Sequence
from types import TracebackType

from poseidon.emulation.host import SECONDS, Host, congestion_controls, find_host
from poseidon.emulation.links import CONGESTION_CONTROL, Link, shape_node, shape_port, wiring, wiring_node
from poseidon.errors import UserError

_KEEP = "echo; read _"  # says that it is in its namespace; ends with the pipe


class Network:
    """The nodes of one run.

    Attributes:
        warnings: what was asked for but is not emulated, in words.

    Raises:
        UserError: a tool, a right or a part of the kernel is missing; nothing is left of what was made so far.
    """

    def __init__(self, links: Sequence[Link], host: Host | None = None) -> None:
        self.warnings: list[str] = []
        self._host = host or find_host()
        self._keepers: list[subprocess.Popen[bytes]] = []
        self._hold, self._held = os.pipe()
        try:
            self._keep(len(links))
            self._wire(links)
        except BaseException:
            self.close()
            raise

    def enter(self, node: int, argv: Sequence[str]) -> list[str]:
        """The command that runs ``argv`` on a node. It keeps the process id that it is started with."""
        return self._host.enter(self._keepers[node + 1].pid, argv)

    def close(self) -> None:
        """Let the namespaces go. They vanish with the last process in them."""
        for end in (self._hold, self._held):
            with contextlib.suppress(OSError):
                os.close(end)
        deadline = time.monotonic() + SECONDS
        for keeper in self._keepers:
            try:
                keeper.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                keeper.kill()
                keeper.wait()
            for pipe in (keeper.stdout, keeper.stderr):
                if pipe is not None:
                    pipe.close()
        self._keepers.clear()

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _keep(self, nodes: int) -> None:
        """Start the keepers: the switch's first, within whose user namespace the others are made."""
        self._start(None, "switch")
        self._await(self._keepers[0])
        for node in range(nodes):
            self._start(self._keepers[0].pid, f"node{node}")
        for keeper in self._keepers[1:]:
            self._await(keeper)

    def _start(self, inside: int | None, name: str) -> None:
        keep = ["sh", "-c", _KEEP, f"poseidon-net-{os.getpid()}-{name}"]  # as `ps` shows it
        self._keepers.append(
            subprocess.Popen(
                self._host.new(inside, keep),
                stdin=self._hold,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # the terminal's Ctrl-C is not for them
            )
        )

    @staticmethod
    def _await(keeper: subprocess.Popen[bytes]) -> None:
        assert keeper.stdout is not None
        assert keeper.stderr is not None
        if not select.select([keeper.stdout], [], [], SECONDS)[0]:
            raise UserError(f"cluster=emulated: making a network namespace took more than {SECONDS:.0f} s")
        if not os.read(keeper.stdout.fileno(), 1):
            raise UserError(f"cluster=emulated: cannot make a network namespace: {_words(keeper.stderr.read())}")

    def _wire(self, links: Sequence[Link]) -> None:
        switch, *nodes = [keeper.pid for keeper in self._keepers]
        links = self._feasible(switch, links)
        self._run(switch, self._host.ip, wiring(nodes))
        self._run(
            switch, self._host.tc, [line for i, link in enumerate(links) for line in shape_port(link, f"port{i}")]
        )
        control = self._congestion_control()
        for i, (pid, link) in enumerate(zip(nodes, links, strict=True)):
            self._run(pid, self._host.ip, wiring_node(i, control))
            self._run(pid, self._host.tc, shape_node(link))

    def _feasible(self, switch: int, links: Sequence[Link]) -> Sequence[Link]:
        """The links without what this kernel cannot do."""
        if not any(link.latency for link in links):
            return links
        probe = self._host.enter(switch, [self._host.tc, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1us"])
        if subprocess.run(probe, capture_output=True, timeout=SECONDS, start_new_session=True).returncode == 0:
            return links
        self.warnings.append("this kernel has no netem: cluster.latency is not emulated")
        return [Link(link.rate) for link in links]

    def _congestion_control(self) -> str | None:
        if CONGESTION_CONTROL in congestion_controls():
            return CONGESTION_CONTROL
        self.warnings.append(f"this kernel has no TCP {CONGESTION_CONTROL}: nodes take its own congestion control")
        return None

    def _run(self, pid: int, tool: str, lines: Sequence[str]) -> None:
        """Give a tool its commands, within the namespace of ``pid``."""
        if not lines:
            return
        command = self._host.enter(pid, [tool, "-batch", "-"])
        text = "\n".join(lines) + "\n"
        done = subprocess.run(
            command, input=text.encode(), capture_output=True, timeout=SECONDS, start_new_session=True
        )
        if done.returncode != 0:
            raise UserError(
                f"cluster=emulated: {os.path.basename(tool)}: {_words(done.stderr)} (the kernel needs bridge, veth and "
                f"sch_tbf: modprobe them, as root)"
            )


def _words(output: bytes) -> str:
    return " ".join(output.decode(errors="replace").split())
