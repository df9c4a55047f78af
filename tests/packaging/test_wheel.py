"""The wheel, installed and used from another folder: nothing may need the checkout.

With POSEIDON_FRESH_INSTALL=1 also into an empty environment, dependencies and all: minutes and gigabytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., str]
FRESH = pytest.mark.skipif(
    os.environ.get("POSEIDON_FRESH_INSTALL") != "1", reason="installs all dependencies anew: POSEIDON_FRESH_INSTALL=1"
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    _pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module", params=["no-deps", pytest.param("fresh", marks=FRESH)])
def installed(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a program of an environment that has the wheel, in a folder of its own, and gives its output."""
    home = tmp_path_factory.mktemp(request.param)
    subprocess.run([sys.executable, "-m", "venv", str(home / "venv")], check=True, timeout=120)
    python = home / "venv" / "bin" / "python"
    if request.param == "fresh":
        _pip(python, "install", str(wheel))
    else:
        _pip(python, "install", "--no-deps", str(wheel))
        (packages,) = (home / "venv" / "lib").glob("python*/site-packages")
        # After the environment's own packages in the path, and without the editable install that may be there.
        (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    work = home / "work"
    work.mkdir()
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "MLFLOW_", "HYDRA_"))}

    def run(program: str, *arguments: str, **environment: str) -> str:
        done = subprocess.run(
            [str(python.with_name(program)), *arguments],
            cwd=work,
            env={**clean, **environment},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_train_plan_bench_and_report_from_another_folder(installed: Run):
    package = Path(installed("python", "-c", "import poseidon; print(poseidon.__file__)").strip()).parent
    assert ROOT not in package.parents
    small = ("model=mlp", "dataset=digits", "trainer.epochs=1", "tracking.experiment=wheel")
    installed("poseidon", "train", "-m", *small, "comm=single,hybrid", "cluster.nodes=2")
    plan = installed("poseidon", "plan", "model=vgg19", "cluster.nodes=8", "plan.format=json")
    assert json.loads(plan)["parameters"] == 143_667_240
    bench = ("bench.suite=short", "bench.cases=[lenet]", "bench.pairs=1", "bench.iterations=4", "bench.warmup=2")
    assert "x ddp" in installed("poseidon", "bench", *bench)
    printed = installed("poseidon", "report", "report.experiment=wheel")
    page = package.parents[4] / "work" / "reports" / "wheel" / "index.html"
    assert str(page) in printed.replace("\n", "")
    assert "speedup" in page.read_text(encoding="utf-8").lower()


def test_shell_completion(installed: Run):
    assert "complete" in installed("poseidon", "train", "-sc", "install=bash")

    def after(line: str) -> list[str]:
        return installed("poseidon", "-sc", "query=bash", COMP_LINE=line, COMP_POINT=str(len(line))).split()

    assert after("poseidon pl") == ["plan"]
    assert after("poseidon plan model=vgg19_") == ["model=vgg19_22k"]
    assert {"comm=hybrid", "comm=ps"} <= set(after("poseidon train comm="))


def _pip(python: str | Path, *arguments: str) -> None:
    done = subprocess.run(
        [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
