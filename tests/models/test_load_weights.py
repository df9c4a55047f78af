"""Files of weights: the kinds that are read, and what is said of those that do not fit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from poseidon import models
from poseidon.errors import UserError
from poseidon.models import load_weights


def net(classes: int = 3, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), nn.Flatten(), nn.Linear(8, 4), nn.Linear(4, classes)
    )


def prefixed(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {f"{prefix}{key}": value for key, value in state.items()}


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: prefixed(state, "module."),
        lambda state: prefixed(state, "_orig_mod."),
        lambda state: prefixed(state, "module._orig_mod."),
        lambda state: {"model": prefixed(state, "module."), "epoch": 3},
        lambda state: {"state_dict": state, "hyper_parameters": {"lr": 0.1}},
        lambda state: {key: value for key, value in state.items() if "num_batches" not in key},
        lambda state: {key: value.half() if value.is_floating_point() else value for key, value in state.items()},
    ],
)
def test_reads(wrap: Any, tmp_path: Path) -> None:
    source, target = net(), net(seed=1)
    if wrap(source.state_dict()).get("2.weight", torch.zeros(())).dtype == torch.float16:
        source = source.half().float()
    torch.save(wrap(source.state_dict()), tmp_path / "w.pt")
    assert not same(source, target)
    load_weights(target, tmp_path / "w.pt")
    assert same(source, target)
    assert all(p.requires_grad and p.dtype == torch.float32 for p in target.parameters())


def test_a_model_with_a_child_of_a_wrapper_s_name_keeps_it(tmp_path: Path) -> None:
    source, target = nn.ModuleDict({"module": net()}), nn.ModuleDict({"module": net(seed=1)})
    torch.save(source.state_dict(), tmp_path / "w.pt")
    load_weights(target, tmp_path / "w.pt")
    assert same(source, target)


def test_tied_and_untied_language_models_take_each_other_s(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"shape": [4], "num_classes": 6, "width": 8, "heads": 2, "layers": 1}
    tied, untied = models.transformer_lm(**sizes), models.transformer_lm(**sizes, tied=False)
    torch.save(tied.state_dict(), tmp_path / "w.pt")
    load_weights(untied, tmp_path / "w.pt")
    assert same(tied, untied)
    assert tied.head.weight is tied.tokens.weight


def test_layers_without_sizes_take_those_of_the_file(tmp_path: Path) -> None:
    torch.save(nn.Sequential(nn.Linear(5, 3)).state_dict(), tmp_path / "w.pt")
    model = nn.Sequential(nn.LazyLinear(3))
    load_weights(model, tmp_path / "w.pt")
    assert model[0].weight.shape == (3, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: {**s, "3.weight": torch.zeros(9, 4), "3.bias": torch.zeros(9)},
            r"3.weight is \(9, 4\) in the file, \(3, 4\) in this run's model; .* add model.fresh=\[3\]",
        ),
        (lambda s: {**s, "3.weight": torch.zeros(3, 9)}, r"3.weight is \(3, 9\) .* add model.fresh=\[3\]"),
        (
            lambda s: {k: v for k, v in s.items() if k != "2.bias"},
            r"2.bias is missing in the file, \(4,\) in this run's",
        ),
        (
            lambda s: {**s, "aux.fc.weight": torch.zeros(2), "aux.conv.weight": torch.zeros(2)},
            r"aux.fc.weight is \(2,\) in the file, missing in this run's model; .* add model.fresh=\[aux\]",
        ),
        (
            lambda s: {k: v for k, v in s.items() if not k.startswith("0.")},
            r"0.0.weight is missing in the file.* add model.fresh=\[0\]",
        ),
        (lambda s: {**s, "3.weight": 4}, "3.weight is None in the file"),
        (lambda s: prefixed(s, "backbone."), "0.0.weight is missing .* the file is of another network"),
        (lambda s: {k: v[..., None] for k, v in s.items()}, "0.0.weight .* the file is of another network"),
    ],
)
def test_says_the_first_misfit_and_what_to_do(change: Any, message: str, tmp_path: Path) -> None:
    torch.save(change(net().state_dict()), tmp_path / "w.pt")
    model = net(seed=1)
    before = copy.deepcopy(model)
    with pytest.raises(UserError, match=rf"^model.weights={tmp_path}/w.pt: {message}[^\n]*$") as caught:
        load_weights(model, tmp_path / "w.pt")
    assert same(model, before)
    _, found, rest = str(caught.value).partition("model.fresh=[")
    if found:  # what it says to add is all that it takes
        load_weights(model, tmp_path / "w.pt", rest[:-1].split(","))
        assert torch.equal(model[0][0].weight, before[0][0].weight) == ("[0]" in str(caught.value))


def test_layers_that_start_anew(tmp_path: Path) -> None:
    source, target = net(classes=9), net(seed=1)
    before = copy.deepcopy(target)
    torch.save(source.state_dict(), tmp_path / "w.pt")
    with pytest.raises(UserError, match=r"^\+model.fresh: this model has no layer head; it has 0, 2, 3$"):
        load_weights(target, tmp_path / "w.pt", ["3", "head"], "+model.fresh")
    load_weights(target, tmp_path / "w.pt", ["3", "2.bias"])
    assert torch.equal(target[2].weight, source[2].weight)
    assert torch.equal(target[2].bias, before[2].bias)
    assert torch.equal(target[3].weight, before[3].weight)


def test_what_is_no_file_of_weights(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("whole", "text", "empty", "cut", "list", "numbers", "none")}
    torch.save(net(), files["whole"])
    files["text"].write_text("weights, but written by hand\n")
    files["empty"].touch()
    torch.save(net().state_dict(), files["cut"])
    files["cut"].write_bytes(files["cut"].read_bytes()[:500])
    torch.save([torch.zeros(2)], files["list"])
    torch.save({"a": 1}, files["numbers"])
    words = {"whole": r"a whole model.*torch.save\(model.state_dict\(\), PATH\)", "none": "there is no file"}
    for name, path in files.items():
        message = words.get(name, r"is neither a checkpoint of `poseidon train` nor weights")
        with pytest.raises(UserError, match=rf"^model.weights={path}: [^\n]*{message}[^\n]*$"):
            load_weights(net(), path)
