"""What a run is made of: the schema of every key of ``conf/``, as plain dataclasses (no hydra here).

The groups ``model``, ``dataset``, ``loss``, ``metric``, ``optimizer`` and ``schedule`` are open: they name
a ``_target_`` and its arguments. All other groups are closed: a key not listed here is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from poseidon.config.choice import Choice
from poseidon.config.hardware import HardwareConfig


class Comm(Choice):
    """How gradients are made global."""

    single = "single"
    ps = "ps"
    sfb = "sfb"
    hybrid = "hybrid"
    block = "block"
    project_adam = "project_adam"
    downpour = "downpour"
    ddp = "ddp"
    fsdp = "fsdp"

    @property
    def of_torch(self) -> bool:
        """Is it PyTorch's own? Then it always overlaps, and nobody counts its bytes."""
        return self in (Comm.ddp, Comm.fsdp)


class Overlap(Choice):
    """What communication hides under: nothing, the rest of the backward pass, or the next forward pass, too."""

    none = "none"
    backward = "backward"
    full = "full"


class Sparse(Choice):
    """Are factors sent as bits and non-zeros? Not on and off, which are no words in YAML."""

    auto = "auto"
    always = "always"
    never = "never"


class Rule(Choice):
    """How comm=hybrid chooses a layer's scheme: by the papers' count of floats, or by predicted time."""

    paper = "paper"
    time = "time"


class StalenessMode(Choice):
    """With comm.staleness, what is applied: all that is complete, or only what must be (reproducible)."""

    newest = "newest"
    fixed = "fixed"


class Encryption(Choice):
    """Of bulk data between hosts. Needed only off loopback, and then never chosen silently."""

    curve = "curve"
    none = "none"


class ClusterKind(Choice):
    """Which launcher starts the ranks."""

    local = "local"
    emulated = "emulated"


class Device(Choice):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Precision(Choice):
    """bf16 is autocast: parameters and optimizer state stay fp32."""

    fp32 = "fp32"
    bf16 = "bf16"


#: Keys that describe a choice and are never passed to its target; ``name`` in every group. ``weights``: a file to
#: start from; ``auxiliary_weight`` and ``classes_dim``: what the loss must know of the model's output; ``density``: of
#: its factors, where nothing computes; ``dtype``: of the inputs.
DESCRIPTORS: dict[str, tuple[str, ...]] = {
    "model": ("weights", "fresh", "native", "density", "auxiliary_weight", "classes_dim"),
    "dataset": ("shape", "dtype", "num_classes", "throughput_only"),
    "schedule": ("interval",),
}

#: Groups whose choices are a ``_target_`` and its arguments, whatever these are.
OPEN_GROUPS = ("model", "dataset", "loss", "metric", "optimizer", "schedule")


class Part(dict[str, Any]):
    """The choice of an open group: a dict with ``_target_``, arguments and descriptors.

    Attributes:
        key: the group, which errors name; "" if unknown.
    """

    key: str = ""

    @classmethod
    def of(cls, key: str, node: Mapping[str, Any]) -> Part:
        part = cls(node)
        part.key = key
        return part

    @property
    def target(self) -> str | None:
        target = self.get("_target_")
        return None if target is None else str(target)

    def arguments(self) -> dict[str, Any]:
        """All but the descriptors; ``_target_`` and hydra's other special keys included."""
        hidden = ("name", *DESCRIPTORS.get(self.key, ()))
        return {key: value for key, value in self.items() if key not in hidden}


@dataclass
class DDPConfig:
    bucket_cap_mb: float = 25.0  # MiB; PyTorch's own default


@dataclass
class CommConfig:
    name: Comm = Comm.hybrid
    overlap: Overlap = Overlap.full
    rule: Rule = Rule.time
    plan: str | None = None  # of comm=hybrid: a file whose plan it goes by again, instead of rule
    timeout: float = 600.0  # seconds of silence before a wait fails
    encryption: Encryption | None = None
    kv_bytes: int = 2 * 1024 * 1024  # largest KV pair (P17: 2 MB)
    merge_bytes: int = 64 * 1024  # parameters smaller than this share a message
    staleness: int = 0  # iterations by which weights may lack averages that others have (SSP)
    staleness_mode: StalenessMode = StalenessMode.newest
    sparse: Sparse = Sparse.auto
    ddp: DDPConfig = field(default_factory=DDPConfig)

    @property
    def patient(self) -> bool:
        """Are ranks to go on without each other for a while?"""
        return self.staleness > 0 or self.name is Comm.downpour


#: In the place of cluster.time_dilation: as much as this machine needs.
AUTO = "auto"


@dataclass
class StragglerConfig:
    """A node that is slow: before its forward pass it does nothing for a while."""

    delay: str | None = None  # of a slow iteration, undilated: "100ms"; null: nobody is slow
    probability: float = 1.0  # share of the iterations in which a node is slow
    node: int | None = None  # which; null: one drawn anew for each slow iteration


@dataclass
class ClusterConfig:
    name: ClusterKind = ClusterKind.local
    nodes: int = 2
    devices_per_node: int = 1  # processes of a node, which merge their gradients before anything leaves it
    servers: Any = None  # null: every node; [0,1]: the nodes that do; 2: so many more, which only serve
    threads: int = 1  # BLAS/OpenMP threads per rank
    batch_shares: list[float] | None = None  # of the global batch, per node, relative; null: all the same
    # Of cluster=emulated only:
    bandwidth: str | None = None  # of each node's link, each way: "1gbit"; null: unshaped
    node_bandwidth: dict[Any, str] = field(default_factory=dict)  # of some nodes' links, by number, instead
    latency: str | None = None  # one way, beside what the rate costs: "50us"
    straggler: StragglerConfig = field(default_factory=StragglerConfig)
    time_dilation: Any = 1.0  # f: bandwidth is divided by it, times are multiplied; AUTO until it is picked

    @property
    def dedicated(self) -> int:
        """Nodes that only serve."""
        return self.servers if isinstance(self.servers, int) else 0

    def __post_init__(self) -> None:
        # In YAML a node's number is one, on a command line and in JSON it is text.
        if isinstance(self.time_dilation, int) and not isinstance(self.time_dilation, bool):
            self.time_dilation = float(self.time_dilation)
        self.node_bandwidth = {int(k) if str(k).isdecimal() else k: rate for k, rate in self.node_bandwidth.items()}


@dataclass
class TrainerConfig:
    batch_size: int = 32  # rows per worker node and iteration
    global_batch: int | None = None  # comm=single only: its rows per iteration (default: batch_size)
    epochs: float | None = 5  # the run ends at whichever of epochs and iterations comes first
    iterations: int | None = None
    accumulate: int = 1  # micro-batches per step
    clip_norm: float | None = None
    precision: Precision = Precision.fp32
    workers: int = 0  # data-loading processes per rank
    eval_every: int = 1  # epochs between evaluations; 0: only at the end
    eval_batch_size: int = 256
    target_accuracy: float | None = None  # stop as soon as an evaluation reaches it (fraction)
    checkpoint_every: int = 0  # iterations; 0: only at the end
    checkpoint: bool = True
    check_every: int = 0  # iterations between comparisons of the replicas; 0: at the end only
    resume: str | None = None  # a checkpoint file
    trace: list[int] | None = None  # iterations whose timeline is kept, from 1; null: none
    log_every: int = 10  # iterations between lines of the metrics file
    warmup: int = 1  # iterations that no time or speed in the summary is of


@dataclass
class StoreConfig:
    """Where runs are tracked."""

    uri: str | None = None  # null: MLFLOW_TRACKING_URI, else sqlite:///mlflow.db in the current folder


@dataclass
class TrackingConfig(StoreConfig):
    mlflow: bool = True  # false: a run leaves files only
    experiment: str | None = None  # null: MLFLOW_EXPERIMENT_NAME, else after model and dataset
    run_name: str | None = None  # null: after comm and nodes


@dataclass
class TrainConfig:
    """Root of ``poseidon train``."""

    model: dict[str, Any] = field(default_factory=dict)
    dataset: dict[str, Any] = field(default_factory=dict)
    loss: dict[str, Any] = field(default_factory=dict)
    metric: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    schedule: dict[str, Any] = field(default_factory=dict)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    hardware: HardwareConfig | None = None  # null: the real machine computes
    seed: int = 0
    device: Device = Device.cpu

    def __post_init__(self) -> None:
        for group in OPEN_GROUPS:
            setattr(self, group, Part.of(group, getattr(self, group)))


class Format(Choice):
    """Of a plan."""

    table = "table"
    json = "json"
    csv = "csv"


@dataclass
class PlanOptions:
    format: Format = Format.table
    output: str | None = None  # a file; null: standard output


@dataclass
class PlanConfig(TrainConfig):
    """Root of ``poseidon plan``: a training that is not started."""

    plan: PlanOptions = field(default_factory=PlanOptions)


@dataclass
class SimulateOptions:
    nodes: list[int] | None = None  # null: cluster.nodes
    rates: list[str] | None = None  # null: cluster.bandwidth
    batch_sizes: list[int] | None = None  # null: trainer.batch_size
    comms: list[str] | None = None  # choices of comm, also with +full, and ddp+5mib; null: comm
    experiments: list[str] | None = None  # to be compared in one table; null: the config's model alone
    hop: str = "100us"  # from one host's software to another's, beside cluster.latency
    goodput: float = 0.957  # share of a link's rate that payload gets
    folder: str | None = None  # of tables and figure of several cells; null: reports/simulated/ and the experiment


@dataclass
class SimulateConfig(TrainConfig):
    """Root of ``poseidon simulate``: a training that is not started."""

    simulate: SimulateOptions = field(default_factory=SimulateOptions)


@dataclass
class ProfileOptions:
    iterations: int = 10  # timed
    warmup: int = 3  # not timed, before them
    output: str | None = None  # a file; null: conf/hardware/NAME.yaml


@dataclass
class ProfileConfig(TrainConfig):
    """Root of ``poseidon profile``: a training of one process, timed."""

    profile: ProfileOptions = field(default_factory=ProfileOptions)
    hardware: HardwareConfig | None = field(default_factory=HardwareConfig)  # what is to be known of it beforehand


@dataclass
class ReportOptions:
    experiment: str | None = None  # whose runs
    folder: str = "reports"  # the report is a folder in it
    name: str | None = None  # of the report; null: the experiment's


@dataclass
class ReportConfig:
    """Root of ``poseidon report``."""

    report: ReportOptions = field(default_factory=ReportOptions)
    tracking: StoreConfig = field(default_factory=StoreConfig)


@dataclass
class BenchOptions:
    suite: str = "short"  # a file of benchmarks/ by its name, or the path of one
    cases: list[str] | None = None  # of the suite; null: all
    pairs: int | None = None  # times that every variant is run, in turn; null: what case or suite say, else 5
    iterations: int | None = None  # of a run, the next ones included; null: as above, else 25
    warmup: int | None = None  # of these, not timed; null: as above, else 5
    folder: str | None = None  # null: reports/bench/ and the suite
    fresh: bool = False  # measure again what has been


@dataclass
class BenchConfig:
    """Root of ``poseidon bench``."""

    bench: BenchOptions = field(default_factory=BenchOptions)


@dataclass
class UiOptions:
    host: str = "127.0.0.1"
    port: int | None = None  # null: 5000, or the next that is free
    browser: bool = True  # open a browser


@dataclass
class UiConfig:
    """Root of ``poseidon ui``."""

    ui: UiOptions = field(default_factory=UiOptions)
    tracking: StoreConfig = field(default_factory=StoreConfig)


@dataclass
class ValidateOptions:
    seconds: float = 3.0  # that each pattern is measured for


@dataclass
class ValidateConfig:
    """Root of ``poseidon validate``."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    validate: ValidateOptions = field(default_factory=ValidateOptions)
