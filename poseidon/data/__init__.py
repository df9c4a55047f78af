"""Data sets: functions that give two map-style data sets of (input, target), to train on and to evaluate on.

Importing the package imports no torch; asking for one of the functions does.
"""

from typing import TYPE_CHECKING, Any

from poseidon.data.check import check

if TYPE_CHECKING:
    from poseidon.data.characters import text
    from poseidon.data.cifar import cifar10
    from poseidon.data.drawn import glyphs
    from poseidon.data.handwritten import digits, mnist5k
    from poseidon.data.noise import synthetic
    from poseidon.data.photos import imagefolder
    from poseidon.data.tensors import InMemory, Rows, collate

__all__ = [
    "InMemory",
    "Rows",
    "check",
    "cifar10",
    "collate",
    "digits",
    "glyphs",
    "imagefolder",
    "mnist5k",
    "synthetic",
    "text",
]

_HOME = {
    "InMemory": "tensors",
    "Rows": "tensors",
    "cifar10": "cifar",
    "collate": "tensors",
    "digits": "handwritten",
    "glyphs": "drawn",
    "imagefolder": "photos",
    "mnist5k": "handwritten",
    "synthetic": "noise",
    "text": "characters",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(f"poseidon.data.{_HOME[name]}"), name)
    raise AttributeError(f"module 'poseidon.data' has no attribute {name!r}")
