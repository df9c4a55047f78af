"""Train LeNet on real digits by four ways of communication on two nodes of this machine, and compare."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poseidon.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from poseidon.config.schema import TrainConfig

USAGE = """\
usage: poseidon demo [key=value ...]

Trains LeNet on 5,000 MNIST digits as one process (comm=single, with the global batch of two nodes), then on
two local nodes with comm=ddp, ps and hybrid (comm.rule=paper: fewest bytes): same rows, same order, same
initial weights; and as one process with
one node's rows, whose speed the speedup is measured against. Ends with a table and the path of a report; fails if
the accuracies are more than 0.5 points apart. About two minutes on two cores.

The runs are in MLflow as experiment demo (`poseidon ui`); without it: tracking.mlflow=false, and no report.

Overrides as for `poseidon train` hold for all four runs, e.g. trainer.epochs=2 cluster.nodes=4 seed=1"""

#: Name of the run's folder, and its comm. The first has one node's rows, the others the same global batch.
RUNS = {"baseline": "single", "single": "single", "ddp": "ddp", "ps": "ps", "hybrid": "hybrid"}
EXPERIMENT = "demo"
SETTINGS = (
    "model=lenet",
    "dataset=mnist5k",
    "schedule=cosine",
    "optimizer.lr=0.02",
    "trainer.epochs=8",
    f"tracking.experiment={EXPERIMENT}",
)
LARGEST_GAP = 0.005  # between the accuracies, as a fraction


def main(argv: Sequence[str]) -> int:
    """Runs ``poseidon demo`` and gives its exit code."""
    if any(argument in ("--help", "-h") for argument in argv):
        print(USAGE)
        return 0
    from rich.console import Console

    from poseidon.tracking.folder import create_run_dir
    from poseidon.training.job import run_job

    console = Console(soft_wrap=True, highlight=False)
    try:
        configs = _configs(argv)
        folder = create_run_dir(Path("outputs", "demo", f"{datetime.now():%Y-%m-%d_%H-%M-%S}"))
        summaries = []
        for name, (config, overrides) in configs.items():
            console.print(f"\n[bold]poseidon train[/bold] {' '.join(overrides)}")
            outcome = run_job(config, overrides, folder / name)
            if outcome.exit_code != 0:
                return outcome.exit_code
            summaries.append(outcome.summary)
        report = _report(config) if config.tracking.mlflow else None
    except UserError as error:
        print(f"poseidon demo: {error}", file=sys.stderr, flush=True)
        return 2
    console.print()
    console.print(table(summaries))
    if any(summary["oversubscribed"] for summary in summaries):
        console.print("more ranks than cores: the speeds say little")
    gap = spread(summaries)
    console.print(
        f"with equal rows accuracies lie within {gap * 100:.2f} points; every run's records: {folder}", markup=False
    )
    if gap > LARGEST_GAP:
        print(f"poseidon demo: accuracies are {gap * 100:.2f} points apart, over 0.5", file=sys.stderr)
        return 1
    if report is not None:
        console.print(f"report: {report}", markup=False)
    return 0


def _report(config: TrainConfig) -> Path:
    from poseidon.config.schema import ReportConfig, ReportOptions, StoreConfig
    from poseidon.reporting import make_report

    options = ReportOptions(experiment=config.tracking.experiment)
    return make_report(ReportConfig(options, StoreConfig(config.tracking.uri)))


def _configs(argv: Sequence[str]) -> dict[str, tuple[TrainConfig, list[str]]]:
    """Typed config and overrides of each run; all are composed, and so checked, before any starts."""
    from poseidon.config.check import check_train
    from poseidon.config.compose import compose

    taken = [argument for argument in argv if argument.startswith(("comm=", "trainer.global_batch=", "-"))]
    if taken:
        comms = ", ".join(dict.fromkeys(RUNS.values()))
        raise UserError(f"{taken[0]} cannot be given: the demo runs {comms}; see poseidon demo --help")
    configs = {}
    for name, comm in RUNS.items():
        # By the papers' rule, which counts bytes: between processes of one machine these cost next to nothing.
        overrides = [*SETTINGS, *argv, f"comm={comm}", *["comm.rule=paper"] * (comm == "hybrid")]
        config = compose("train", overrides)
        if name == "single":
            overrides.append(f"trainer.global_batch={config.cluster.nodes * config.trainer.batch_size}")
            config = compose("train", overrides)
        check_train(config)
        configs[name] = config, overrides
    return configs


def table(summaries: Sequence[dict[str, Any]]) -> Table:
    """A row per run."""
    from rich.table import Table

    first = summaries[-1]
    result = Table(
        title=f"{first['model']} on {first['dataset']}",
        caption="rows, MB sent by a node: per iteration; * computed, as PyTorch's DDP does not count",
    )
    result.add_column("comm")
    for heading in ("nodes", "rows", "accuracy", "loss", "images/s", "MB sent"):
        result.add_column(heading, justify="right")
    result.add_column("replicas")
    for summary in summaries:
        several = summary["nodes"] > 1
        speed, sent = summary["images_per_second"], max(summary["bytes_sent_per_iteration"]) / 1e6
        result.add_row(
            summary["comm"],
            str(summary["nodes"]),
            str(summary["global_batch"]),
            f"{summary['eval_accuracy']:.2%}",
            f"{summary['train_loss']:.4f}",
            f"{speed:,.0f}" if speed is not None else "-",
            f"{sent:.3f}{'*' if summary['bytes_source'] == 'computed' else ''}" if several else "-",
            _replicas(summary["replica_digests"]),
        )
    return result


def spread(summaries: Sequence[dict[str, Any]]) -> float:
    """Largest minus smallest accuracy of the runs with the last one's global batch."""
    rows = summaries[-1]["global_batch"]
    accuracies = [summary["eval_accuracy"] for summary in summaries if summary["global_batch"] == rows]
    return float(max(accuracies) - min(accuracies))


def _replicas(digests: Sequence[str]) -> str:
    if len(digests) == 1:
        return f"{digests[0][:8]}"
    return f"{digests[0][:8]} x{len(digests)}" if len(set(digests)) == 1 else "DIFFER"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
