"""Draw the timeline of iterations that runs have traced (trainer.trace)."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from poseidon.config.paths import run_folders
from poseidon.errors import UserError

USAGE = """\
usage: poseidon trace RUN_DIR [RUN_DIR ...] [ranks=0,1] [output=FILE]

Draws what a run with trainer.trace=[6] (the sixth iteration, or others) has left in RUN_DIR/trace: what rank 0's
device, link and server did, layer by layer; of several runs, one above the other on one scale of time. Also puts the
files of all ranks together, RUN_DIR/trace/all.json, with arrows from each message's sending to its coming: open it, or
any rank*.json, in https://ui.perfetto.dev or chrome://tracing.

  poseidon train experiment=p17_vgg19_1gbe cluster.nodes=4 comm=hybrid trainer.trace=[4] hydra.run.dir=outputs/hybrid
  poseidon trace outputs/hybrid
  poseidon trace outputs/ddp outputs/hybrid output=both.png
  ranks=0,1                         whose rows (default 0)
  output=FILE                       the picture, PNG or SVG (default RUN_DIR/trace/timeline.png, of the first run)"""

_KEYS = ("ranks", "output")


def main(argv: Sequence[str]) -> int:
    """Runs ``poseidon trace`` and gives its exit code."""
    if not argv or any(argument in ("--help", "-h") for argument in argv):
        print(USAGE)
        return 0 if argv else 2
    from poseidon.reporting.timeline import draw_folders

    try:
        folders, given = run_folders(argv, _KEYS, "trace")
        for file in draw_folders(folders, _ranks(given.get("ranks", "0")), given.get("output")):
            print(f"timeline: {file}")
    except UserError as error:
        print(f"poseidon trace: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 2
    return 0


def _ranks(text: str) -> list[int]:
    try:
        return [int(part) for part in text.strip("[]").split(",")]
    except ValueError:
        raise UserError(f"ranks={text}: must be numbers, as in ranks=0,1") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
