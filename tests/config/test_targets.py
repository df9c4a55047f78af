"""Targets are judged by their source, without importing it."""

from __future__ import annotations

import sys

import pytest

from poseidon.config.signatures import misfit, signature_of
from poseidon.config.targets import check_target
from poseidon.errors import UserError

SOURCE = """
raise RuntimeError("imported")

class Base:
    def __init__(self, a, *, b=1): ...

class Child(Base): ...

def plain(a, b=2, *, c, d=3): ...
def anything(a, **others): ...
def several(*args): ...

@decorate
def decorated(a): ...

if True:
    def either(a): ...
else:
    def either(b): ...
"""


@pytest.fixture(autouse=True)
def package(tmp_path, monkeypatch):
    folder = tmp_path / "parts_of_mine"
    (folder / "inner").mkdir(parents=True)
    (folder / "__init__.py").write_text("from .things import plain as renamed, Base\nfrom .inner import *\n")
    (folder / "things.py").write_text(SOURCE)
    (folder / "inner" / "__init__.py").write_text("def starred(x): ...\n")
    (folder / "lazy.py").write_text("def __getattr__(name): ...\n")
    monkeypatch.chdir(tmp_path)  # ranks have the current folder in their path
    yield
    assert "parts_of_mine" not in sys.modules


@pytest.mark.parametrize(
    ("target", "given", "wrong"),
    [
        ("things.Base", ["a"], None),
        ("things.Base", ["a", "x"], "takes no x; it takes a, b"),
        ("things.Base", [], "needs a"),
        ("things.Child", ["x"], None),
        ("things.plain", ["a"], "needs c"),
        ("things.anything", ["a", "x"], None),
        ("things.several", ["x"], None),
        ("things.decorated", ["x"], None),
        ("things.either", ["x"], None),
        ("renamed", ["x"], "takes no x; it takes a, b, c, d"),
        ("starred", ["y"], "takes no y; it takes x"),
        ("lazy.Whatever", ["x"], None),
    ],
)
def test_arguments(target, given, wrong):
    found = misfit(f"parts_of_mine.{target}", given)
    assert found == wrong if wrong is None else wrong in str(found)


def test_arguments_given_by_position_are_not_missing():
    assert misfit("parts_of_mine.things.plain", ["c"], positional=1) is None
    assert misfit("parts_of_mine.things.plain", [], positional=1, partial=True) is None


def test_nested_targets_are_checked_too():
    node = {"_target_": "parts_of_mine.things.Base", "a": [{"_target_": "parts_of_mine.things.Bass"}]}
    with pytest.raises(UserError, match=r"model\.a\[0\]\._target_=.*has no Bass; did you mean Base\?"):
        check_target("model", node)


@pytest.mark.parametrize("target", ["parts_of_mine.lazy.Thing", "parts_of_mine.things.Base", "math.sqrt"])
def test_what_may_be_there_passes(target):
    check_target("model", {"_target_": target, "a": 1})


@pytest.mark.parametrize("target", ["x", "a..b", 3, "not a name.x", ".a.b"])
def test_what_is_no_path_is_refused(target):
    with pytest.raises(UserError, match=r"model\._target_="):
        check_target("model", {"_target_": target})


def test_torch_s_own_are_understood():
    adam = signature_of("torch.optim.Adam")
    assert adam is not None
    assert adam.required == ("params",)
    assert {"lr", "betas"} <= set(adam.names)
    assert "torch" not in str(misfit("torch.optim.lr_scheduler.StepLR", ["step_size"], positional=1))
