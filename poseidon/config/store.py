"""Makes Hydra know the schema (``base_train``) and the one resolver that ``conf/`` uses."""

from __future__ import annotations

import secrets

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from poseidon.config.schema import TrainConfig

#: Tells this process's sweep from others that started in the same second; the same for all of its jobs.
UNIQUE = secrets.token_hex(3)


def register() -> None:
    """Idempotent. To be called before a config of ``conf/`` is composed."""
    ConfigStore.instance().store(name="base_train", node=TrainConfig, provider="poseidon")
    OmegaConf.register_new_resolver("poseidon_unique", lambda: UNIQUE, replace=True)
