"""Makes Hydra know the schemas (``base_train`` ...) and the resolvers that ``conf/`` uses."""

from __future__ import annotations

import atexit
import secrets
import tempfile
from functools import cache

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from poseidon.config.paths import conf_dir
from poseidon.config.schema import (
    BenchConfig,
    PlanConfig,
    ProfileConfig,
    ReportConfig,
    SimulateConfig,
    TrainConfig,
    UiConfig,
    ValidateConfig,
)

#: Tells this process's sweep from others that started in the same second; the same for all of its jobs.
UNIQUE = secrets.token_hex(3)

#: Links of P17, in Gbit/s: an experiment of ``conf/`` on them, p17_MODEL.yaml, is also there as p17_MODEL_10gbe ...
GBE = (40, 30, 20, 10, 5, 2, 1)


def register() -> None:
    """Idempotent. To be called before a config of ``conf/`` is composed."""
    for workflow, schema in (
        ("train", TrainConfig),
        ("plan", PlanConfig),
        ("simulate", SimulateConfig),
        ("profile", ProfileConfig),
        ("report", ReportConfig),
        ("bench", BenchConfig),
        ("ui", UiConfig),
        ("validate", ValidateConfig),
    ):
        ConfigStore.instance().store(name=f"base_{workflow}", node=schema, provider="poseidon")
    for file in (conf_dir() / "experiment").glob("p17_*.yaml"):
        for rate in GBE:
            _store_on_link(file.stem, rate)
    OmegaConf.register_new_resolver("poseidon_unique", lambda: UNIQUE, replace=True)
    OmegaConf.register_new_resolver("poseidon_scratch", scratch, replace=True)


def _store_on_link(experiment: str, rate: int) -> None:
    """A choice of the group ``experiment``, as a file that starts from another would be."""
    name = f"{experiment}_{rate}gbe"
    node = {
        "defaults": [experiment, "_self_"],
        "cluster": {"bandwidth": f"{rate}gbit"},
        "tracking": {"experiment": name},
    }
    ConfigStore.instance().store(group="experiment", name=name, package="_global_", node=node, provider="poseidon")


@cache
def scratch() -> str:
    """A folder that is gone when this process ends: for what Hydra writes about a sweep that keeps no records."""
    folder = tempfile.TemporaryDirectory(prefix="poseidon-")
    atexit.register(folder.cleanup)
    return folder.name
