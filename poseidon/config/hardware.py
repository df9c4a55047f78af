"""Hardware profiles: the schema of ``conf/hardware/*.yaml``, what a run on an emulated accelerator costs."""

from __future__ import annotations

from dataclasses import dataclass, field

from poseidon.config.choice import Choice


class Trust(Choice):
    """How much a figure can be relied upon."""

    measured = "measured"  # by `poseidon profile`, on the hardware itself
    published = "published"  # read in a primary source
    derived = "derived"  # by arithmetic from published figures
    assumed = "assumed"
    unverified = "unverified"  # recalled, not checked against its source


@dataclass
class Provenance:
    """Where a figure comes from."""

    source: str | None = None
    trust: Trust = Trust.assumed

    def __str__(self) -> str:
        return f"{self.trust}: {self.source}" if self.source else str(self.trust)


@dataclass
class IterationConfig(Provenance):
    """A whole iteration on one device: forward, backward, optimizer step; no communication."""

    batch_size: int = 1
    seconds: float = 0.0


@dataclass
class LayerSeconds:
    """Of one iteration; of all calls of the layer together."""

    forward: float = 0.0
    backward: float = 0.0


@dataclass
class LayerTable(Provenance):
    """Measured times by layer (path of the module); of each the share in the iteration counts."""

    batch_size: int = 1
    seconds: dict[str, LayerSeconds] = field(default_factory=dict)

    def total(self) -> float:
        """Seconds of all layers, forward and backward."""
        return sum(layer.forward + layer.backward for layer in self.seconds.values())


@dataclass
class HardwareConfig(Provenance):
    """An accelerator and its host, as an emulated node has them; ``source`` and ``trust`` hold for what has none.

    Models go by ``model.name``. A rate that is null costs no time.
    """

    name: str | None = None
    description: str | None = None
    iterations: dict[str, IterationConfig | None] = field(default_factory=dict)  # null: must be measured first
    flops: float | None = None  # FLOP/s of models without an entry and without batch-norm
    flops_batchnorm: float | None = None  # and with
    memory_bandwidth: float | None = None  # bytes/s, for the optimizer step
    host_copy: float | None = None  # bytes/s between device and host, each way
    server_sum: float | None = None  # bytes/s of gradients that the host adds up
    layers: dict[str, LayerTable] = field(default_factory=dict)
    sources: dict[str, Provenance] = field(default_factory=dict)  # of single keys, such as host_copy

    def provenance(self, key: str) -> Provenance:
        """Of a single key, such as ``flops``."""
        return self.sources.get(key) or Provenance(self.source, self.trust)

    def basis(self, model: str, batch_size: int) -> str:
        """One line for people: where a model's times come from, and how far they can be relied upon."""
        entry, table = self.iterations.get(model), self.layers.get(model)
        found = entry or table
        if found is None:
            origins = {str(self.provenance(key)) for key in ("flops", "flops_batchnorm")}
            line = f"the model's FLOPs at the profile's rate ({' or '.join(sorted(origins))})"
        else:
            seconds = entry.seconds if entry else self.layers[model].total()
            line = f"{seconds:.4g} s per iteration of {found.batch_size} rows ({found})"
            if found.batch_size != batch_size:
                line += f", linearly for {batch_size} rows"
        return f"{line}, shared out among the layers by {'a measured table' if table else 'FLOPs'}"
