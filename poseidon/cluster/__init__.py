"""Launchers behind one interface: start this argv with this env on that host and tell me how it ended."""

from poseidon.cluster.base import Grace, JobResult, Launcher, OnLine, Process, Task
from poseidon.cluster.guard import end_with_parent
from poseidon.cluster.job import launch_job
from poseidon.cluster.local import LocalLauncher

__all__ = [
    "Grace",
    "JobResult",
    "Launcher",
    "LocalLauncher",
    "OnLine",
    "Process",
    "Task",
    "end_with_parent",
    "launch_job",
]
