"""What a schema cannot say: ranges, and keys that contradict each other."""

from __future__ import annotations

from poseidon.config.schema import TrainConfig


def check_train(config: TrainConfig) -> None:
    """Raises UserError in one line if the config cannot run; imports no torch."""
