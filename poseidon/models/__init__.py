"""Networks: functions of shape and number of classes that give a plain ``nn.Module``.

Importing the package imports no torch; asking for one of the functions does.
"""

from typing import TYPE_CHECKING, Any

from poseidon.models.check import check, find_weights

if TYPE_CHECKING:
    from poseidon.models.caffe import alexnet, cifar10_quick, lenet
    from poseidon.models.dense import mlp
    from poseidon.models.transformer import transformer_lm
    from poseidon.models.vision import torchvision_model
    from poseidon.models.weights import load_weights

__all__ = [
    "alexnet",
    "check",
    "cifar10_quick",
    "find_weights",
    "lenet",
    "load_weights",
    "mlp",
    "torchvision_model",
    "transformer_lm",
]

_HOME = {
    "alexnet": "caffe",
    "cifar10_quick": "caffe",
    "lenet": "caffe",
    "load_weights": "weights",
    "mlp": "dense",
    "torchvision_model": "vision",
    "transformer_lm": "transformer",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(f"poseidon.models.{_HOME[name]}"), name)
    raise AttributeError(f"module 'poseidon.models' has no attribute {name!r}")
