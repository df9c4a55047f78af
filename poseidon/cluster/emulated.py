"""Ranks as processes of this machine, each in the network namespace of its own node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from poseidon.cluster.base import Task
from poseidon.cluster.local import LocalLauncher, LocalProcess
from poseidon.config.schema import ClusterConfig
from poseidon.emulation.links import links
from poseidon.emulation.network import Network


class EmulatedLauncher:
    """Implements :class:`poseidon.cluster.base.Launcher` on an emulated network, whose node is the task's host.

    Attributes:
        warnings: what of the network is not emulated.

    Raises:
        UserError: this machine cannot make the network.
    """

    def __init__(self, cluster: ClusterConfig, nodes: int) -> None:
        self._local = LocalLauncher()
        self._network = Network(links(cluster, nodes))
        self.warnings: Sequence[str] = self._network.warnings

    def start(self, task: Task) -> LocalProcess:
        # nsenter becomes the rank: its process id, session and parent are those that the local launcher gave it.
        return self._local.start(replace(task, argv=self._network.enter(task.host, task.argv)))

    def close(self) -> None:
        self._local.close()
        self._network.close()
