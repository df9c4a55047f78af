"""One rank of a job: ``python -m poseidon.training.worker RUN_DIR/spec.json``.

Reads what the launching process wrote, trains, and leaves (rank 0) ``metrics.jsonl``, ``plan.json``,
``result.json`` and checkpoints in the run's folder. Exit codes: 0 done; 2 the user's mistake, said in one
line; 75 another rank was lost; 1 anything else.
"""

from __future__ import annotations

import sys
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poseidon.cluster.guard import end_with_parent
from poseidon.config.schema import ClusterKind, Encryption
from poseidon.errors import PEER_LOST_EXIT, PeerLostError, PoseidonError, UserError

if TYPE_CHECKING:
    from poseidon.api import Session
    from poseidon.config import Spec
    from poseidon.config.schema import TrainConfig

METRICS, PLAN, RESULT, CHECKPOINTS = "metrics.jsonl", "plan.json", "result.json", "checkpoints"


def main(argv: list[str] | None = None) -> int:
    """Runs the rank and gives its exit code."""
    end_with_parent()
    arguments = sys.argv[1:] if argv is None else argv
    try:
        if len(arguments) != 1:
            raise UserError("usage: python -m poseidon.training.worker RUN_DIR/spec.json")
        _work(Path(arguments[0]))
    except UserError as error:
        return _say(str(error), 2)
    except PeerLostError as error:
        return _say(str(error), PEER_LOST_EXIT)
    except PoseidonError as error:
        return _say(str(error), 1)
    except KeyboardInterrupt:
        return 130
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _work(path: Path) -> None:
    import torch

    from poseidon.api.env import read_env
    from poseidon.config import load_spec

    spec = load_spec(path)
    config = spec.config
    torch.set_num_threads(config.cluster.threads)
    job = read_env()
    if job.rank >= job.world_size:
        _serve(config)
        return
    with _join(config) as session:
        train(session, spec)


def _serve(config: TrainConfig) -> None:
    """A node that only owns shards. Its device is a host's CPU, emulated ones being as fast as the profile says."""
    from poseidon.api.start import serve
    from poseidon.engine import Host

    device: Any = Host()
    if config.hardware is not None:
        from poseidon.emulation.accelerator import Accelerator, Costs

        costs = Costs(server_sum=config.hardware.server_sum)
        device = Accelerator([], costs, dilation=config.cluster.time_dilation)
    timeout, encryption = _network(config)
    serve(timeout=timeout, encryption=encryption, devices_per_node=config.cluster.devices_per_node, device=device)


def _network(config: TrainConfig) -> tuple[float, Any]:
    timeout, encryption = config.comm.timeout * config.cluster.time_dilation, config.comm.encryption
    if encryption is None and config.cluster.name is ClusterKind.emulated:
        encryption = Encryption.none  # chosen for the user here alone: nobody else can listen on such a network
    return timeout, encryption.value if encryption is not None else None


def _join(config: TrainConfig) -> Session:
    import poseidon
    from poseidon.api.env import read_env
    from poseidon.training.loop import devices_of

    timeout, encryption = _network(config)
    job = read_env()
    if config.hardware is not None and job.world_size == 1 and not job.servers:
        from poseidon.training.emulated import session_of_one

        return session_of_one(config, timeout)
    return poseidon.init(
        timeout=timeout,
        encryption=encryption,
        device=None if config.device.value == "auto" else config.device.value,
        devices_per_node=devices_of(config),
        servers=config.cluster.servers if isinstance(config.cluster.servers, list) else None,
    )


def train(session: Session, spec: Spec) -> dict[str, Any]:
    """Collective: the whole training of a spec, with a session of any world size. Returns the result.

    Raises:
        UserError: something in the spec cannot be used.
        ReplicaMismatchError: replicas differ at the end; ``result.json`` is there nevertheless.
    """
    from poseidon.tracking.folder import write_json
    from poseidon.tracking.metrics import MetricsWriter
    from poseidon.training import progress
    from poseidon.training.loop import Outputs, Trainer, rows_per_step
    from poseidon.training.parts import assemble
    from poseidon.training.result import collect

    run_dir = Path(spec.run_dir)
    if spec.config.hardware is None:
        parts = assemble(spec.config, session.device)
    else:
        from poseidon.training.emulated import emulated_parts

        parts = emulated_parts(spec.config, session)
    with ExitStack() as stack:
        outputs = Outputs()
        if session.rank == 0:
            writer = stack.enter_context(MetricsWriter(run_dir / METRICS))
            outputs = Outputs(
                writer, progress.emit, lambda plan: write_json(run_dir / PLAN, plan), run_dir / CHECKPOINTS
            )
        outputs.config = spec.plain
        trainer = Trainer(session, parts, spec.config, outputs)
        outcome = trainer.run()
    if trainer.tracing is not None:
        trainer.tracing.save(run_dir)
    rows = min(rows_per_step(spec.config) * len(session.topology.nodes), parts.train_size)
    result = collect(session, trainer.model, outcome, rows, has_values=parts.has_values)
    if session.rank == 0:
        write_json(run_dir / PLAN, session.report(trainer.model)["plan"])
        write_json(run_dir / RESULT, result)
    if parts.has_values:
        session.check(trainer.model)
    return result


def _say(message: str, code: int) -> int:
    print(" ".join(message.split()), file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
