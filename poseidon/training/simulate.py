"""``poseidon simulate``: from a config to a job for the simulator, and to what it finds for each cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from poseidon.config.build import build
from poseidon.config.schema import Comm, SimulateConfig
from poseidon.config.simulated import Variant, batch_sizes, node_counts, rates, variants
from poseidon.config.units import parse_seconds
from poseidon.emulation.accelerator import product_seconds
from poseidon.emulation.layers import layer_times, step_bytes, trace
from poseidon.engine.parameters import observe, trainable
from poseidon.errors import UserError
from poseidon.planning.cost import block_floats, ps_floats, sfb_floats
from poseidon.reporting.simulated import Cell, Simulation
from poseidon.simulation import Job, Layer, Network, System, simulate
from poseidon.simulation.job import MIB
from poseidon.simulation.job import Comm as Name
from poseidon.tracking.summary import part_name
from poseidon.training.emulated import on_meta
from poseidon.training.plan import as_trained, inputs_of_one_node


def make_simulation(config: SimulateConfig, overrides: Sequence[str] = ()) -> Simulation:
    """Simulates every combination of nodes, rates and systems; of ``single``, which has one node, once.

    Args:
        overrides: that made the config.

    Raises:
        UserError: the profile does not tell the model's times, or the model cannot be traced.
    """
    assert config.hardware is not None
    options, model = config.simulate, part_name(config.model) or "model"
    hop = parse_seconds("simulate.hop", options.hop)
    if config.cluster.latency is not None:
        hop += parse_seconds("cluster.latency", config.cluster.latency)
    jobs = {rows: job_of(_of_rows(config, rows)) for rows in batch_sizes(config)}
    cells = [
        Cell(
            variant.name,
            variant.comm.name.value,
            link,
            rate,
            simulate(job, Network(count, rate, options.goodput, hop), _system(variant)),
            rows,
            _linear_rows(job),
            _least_bytes(job, count) if variant.comm.name is not Comm.single else 0.0,
        )
        for rows, job in jobs.items()
        for link, rate in rates(config).items()
        for variant in variants(config)
        for count in (node_counts(config) if variant.comm.name is not Comm.single else [1])
    ]
    name = config.tracking.experiment or model
    return Simulation(
        model=model,
        hardware=config.hardware.name or "?",
        basis=config.hardware.basis(model, config.trainer.batch_size),
        batch_sizes=list(jobs),
        single=[job.seconds for job in jobs.values()],
        cells=cells,
        overrides=list(overrides),
        folder=Path(options.folder).expanduser() if options.folder else Path("reports") / "simulated" / name,
    )


def job_of(config: SimulateConfig) -> Job:
    """An iteration of one machine: its layers' times as an emulated accelerator has them, and its parameters.

    Parameters that get no gradient are left out.

    Raises:
        UserError: as :func:`make_simulation`.
    """
    profile, rows = config.hardware, config.trainer.batch_size
    assert profile is not None
    model, inputs = on_meta(config), inputs_of_one_node(config, "meta", rows)
    try:
        calls = trace(model, inputs)
        infos, seen = trainable(model)[1], observe(model, lambda: model(inputs))
    except (RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"model: {config.model.get('_target_')} cannot be traced on the meta device: {reason}"
        ) from error
    if not calls:
        raise UserError(f"model: {config.model.get('_target_')} has no parameter to train")
    touched = step_bytes(lambda params: build(config.optimizer, params, key="optimizer"), model.parameters())
    times, step = layer_times(calls, profile, part_name(config.model) or "", rows, step_bytes=touched)
    used = {name for call in calls for name in call.params}
    return Job(
        layers=tuple(
            Layer(t.layer, t.params, t.forward, t.backward, product_seconds(t) if t.rows else 0.0) for t in times
        ),
        params=tuple(info for info in infos if info.name in used),
        factors=as_trained(config, infos, seen),
        step=step,
        host_copy=profile.host_copy,
        server_sum=profile.server_sum,
    )


def _of_rows(config: SimulateConfig, rows: int) -> SimulateConfig:
    return replace(config, trainer=replace(config.trainer, batch_size=rows))


def _linear_rows(job: Job) -> int | None:
    """K of the linear layers that hold most parameters; None if there are no such layers."""
    held: Counter[int] = Counter()
    for param in job.params:
        if param.name in job.factors and param.factors == "linear":
            held[job.factors[param.name].rows] += param.numel
    return held.most_common(1)[0][0] if held else None


def _least_bytes(job: Job, nodes: int) -> float:
    """That a node sends if each linear layer goes by whichever of ps, sfb and block moves fewest floats, and the rest
    by ps."""
    total = 0.0
    for param in job.params:
        floats = ps_floats(param.numel, 1, nodes, nodes)
        if param.name in job.factors and param.factors == "linear":
            (m, n), k = param.shape, job.factors[param.name].rows
            floats = min(floats, sfb_floats(m, n, k, nodes), block_floats(m, n, k, nodes, nodes))
        total += floats / 2 * param.itemsize  # of which half is sent
    return total


def _system(variant: Variant) -> System:
    comm = variant.comm
    bucket = int(comm.ddp.bucket_cap_mb * MIB)
    return System(
        cast("Name", comm.name.value),
        comm.overlap.value,
        rule=comm.rule.value,
        kv_bytes=comm.kv_bytes,
        merge_bytes=comm.merge_bytes,
        bucket_bytes=bucket,
        first_bucket_bytes=min(MIB, bucket),
        sparse=comm.sparse.value,
    )
