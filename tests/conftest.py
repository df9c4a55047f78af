"""What holds for all tests."""

import signal
from collections.abc import Iterator

import pytest

# Background jobs of a shell start with Ctrl-C ignored, and so would every launcher that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _run_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One MLflow store for all tests and the commands they start, made by the first run that needs it."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("store")
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}")
        patch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
        yield
