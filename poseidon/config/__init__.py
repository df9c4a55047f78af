"""Configuration: schema, composition, checks before anything starts, and the spec that ranks read.

Importing it imports neither hydra nor torch; :mod:`poseidon.config.compose` and
:mod:`poseidon.config.build` do when they are used.
"""

from poseidon.config.paths import conf_dir, pipelines_dir
from poseidon.config.schema import TrainConfig
from poseidon.config.spec import Spec, dump_spec, from_plain, load_spec, to_plain

__all__ = [
    "Spec",
    "TrainConfig",
    "conf_dir",
    "dump_spec",
    "from_plain",
    "load_spec",
    "pipelines_dir",
    "to_plain",
]
