"""``poseidon <workflow> [hydra overrides]``: runs pipelines/<workflow>.py. Imports nothing heavy."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path
from types import ModuleType

import poseidon
from poseidon.config.paths import pipelines_dir
from poseidon.errors import PoseidonError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and gives the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        known = workflows()
        if not arguments or arguments[0] in ("--help", "-h", "help"):
            print(usage(known))
            return 0
        name, rest = arguments[0], arguments[1:]
        if name == "--version":
            print(f"poseidon {poseidon.__version__}")
            return 0
        if name in ("-sc", "--shell-completion") and "COMP_LINE" in os.environ:
            return complete(rest, known)
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            return _say(f"poseidon: unknown workflow {name!r}: {hint}known are {', '.join(known)}", 2)
        return int(load(known[name]).main(rest) or 0)
    except PoseidonError as error:
        return _say(f"poseidon: {error}", 1)
    except KeyboardInterrupt:
        return 130


def complete(query: Sequence[str], known: dict[str, Path]) -> int:
    """Answers a TAB: Hydra's completion asks the program without the workflow, which only the line tells.

    Args:
        query: ``["query=bash"]``.
    """
    program, _, line = os.environ["COMP_LINE"].lstrip().partition(" ")
    workflow, space, typed = line.lstrip().partition(" ")
    if not space:
        print(" ".join(name for name in known if name.startswith(workflow)))
    elif workflow in known:
        os.environ["COMP_LINE"] = f"{program} {typed}"
        with redirect_stderr(io.StringIO()):  # not every workflow completes, and none may scribble into the prompt
            load(known[workflow]).main(["-sc", *query])
    return 0


def workflows() -> dict[str, Path]:
    """Name and file of each workflow, sorted by name."""
    files = sorted(pipelines_dir().glob("*.py"))
    return {file.stem: file for file in files if not file.stem.startswith("_")}


def usage(known: dict[str, Path]) -> str:
    """The text of ``poseidon --help``."""
    width = max(map(len, known), default=0)
    lines = [f"  {name:<{width}}  {summary(file)}" for name, file in known.items()]
    return "\n".join(
        [
            "Data-parallel training of PyTorch models on commodity Ethernet.",
            "",
            "usage: poseidon <workflow> [overrides]",
            "",
            *lines,
            "",
            "poseidon <workflow> --help tells a workflow's keys; e.g.",
            "poseidon train model=lenet dataset=mnist5k comm=hybrid cluster.nodes=4",
        ]
    )


def summary(file: Path) -> str:
    """The first line of a file's docstring, read without running the file."""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def load(file: Path) -> ModuleType:
    """The workflow's module, which has ``main(argv) -> exit code``."""
    spec = importlib.util.spec_from_file_location(f"poseidon_pipelines_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _say(message: str, code: int) -> int:
    print(" ".join(message.split()), file=sys.stderr, flush=True)
    return code
