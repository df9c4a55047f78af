"""What holds for all tests of the matrix."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _no_anomaly_detection_left() -> Iterator[None]:
    """Ranks are threads here, and each would restore the process-wide switch to what another one had set."""
    yield
    torch.autograd.set_detect_anomaly(False)
