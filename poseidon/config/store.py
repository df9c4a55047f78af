"""Makes Hydra know the schemas (``base_train`` ...) and the one resolver that ``conf/`` uses."""

from __future__ import annotations

import secrets

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from poseidon.config.schema import PlanConfig, ReportConfig, TrainConfig, UiConfig

#: Tells this process's sweep from others that started in the same second; the same for all of its jobs.
UNIQUE = secrets.token_hex(3)


def register() -> None:
    """Idempotent. To be called before a config of ``conf/`` is composed."""
    for workflow, schema in (
        ("train", TrainConfig),
        ("plan", PlanConfig),
        ("report", ReportConfig),
        ("ui", UiConfig),
    ):
        ConfigStore.instance().store(name=f"base_{workflow}", node=schema, provider="poseidon")
    OmegaConf.register_new_resolver("poseidon_unique", lambda: UNIQUE, replace=True)
