"""Networks: functions of shape and number of classes that give a plain ``nn.Module``.

Importing the package imports no torch; asking for one of the functions does.
"""

from typing import TYPE_CHECKING, Any

from poseidon.models.check import check

if TYPE_CHECKING:
    from poseidon.models.caffe import alexnet, cifar10_quick, lenet
    from poseidon.models.dense import mlp
    from poseidon.models.vision import torchvision_model

__all__ = ["alexnet", "check", "cifar10_quick", "lenet", "mlp", "torchvision_model"]

_HOME = {
    "alexnet": "caffe",
    "cifar10_quick": "caffe",
    "lenet": "caffe",
    "mlp": "dense",
    "torchvision_model": "vision",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(f"poseidon.models.{_HOME[name]}"), name)
    raise AttributeError(f"module 'poseidon.models' has no attribute {name!r}")
