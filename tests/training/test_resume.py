"""Checkpoints and resuming: the same result as a run that was never interrupted."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from poseidon.errors import UserError
from poseidon.training import checkpoint
from poseidon.training.loop import Outputs, Trainer

from .conftest import make_config
from .fakes import FakeSession, World


def schedule(optimizer):
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)


def run(make_parts, folder, rows=200, session=None, **settings):
    parts = make_parts(rows, dropout=settings.pop("dropout", 0.0), schedule=schedule)
    config = make_config(**{"seed": 3, **settings})
    trainer = Trainer(session or FakeSession(), parts, config, Outputs(checkpoints=folder, config={"seed": 3}))
    return trainer.run(), parts


def state(parts):
    momenta = [s["momentum_buffer"] for s in parts.optimizer.state.values()]
    return [*parts.model.state_dict().values(), *momenta]


def assert_same(first, second):
    assert all(torch.equal(a, b) for a, b in zip(state(first), state(second), strict=True))
    assert first.optimizer.param_groups[0]["lr"] == second.optimizer.param_groups[0]["lr"]
    assert first.schedule.state_dict() == second.schedule.state_dict()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_resumed_at_an_epochs_end(make_parts, tmp_path, dropout):
    whole, expected = run(make_parts, tmp_path / "whole", epochs=5, dropout=dropout)
    run(make_parts, tmp_path / "half", epochs=2, checkpoint=True, dropout=dropout)
    rest, found = run(make_parts, tmp_path, epochs=5, resume=str(tmp_path / "half" / "last.pt"), dropout=dropout)
    assert_same(found, expected)
    assert rest.score == whole.score
    assert (rest.position.epoch, rest.position.iteration) == (5, 35)


def test_resumed_within_an_epoch_goes_on_with_the_rows_not_yet_seen(make_parts, tmp_path):
    _, expected = run(make_parts, tmp_path, epochs=3)
    run(make_parts, tmp_path, epochs=3, iterations=15, checkpoint_every=10)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["iteration-10.pt"]
    rest, found = run(make_parts, tmp_path, epochs=3, resume=str(tmp_path / "iteration-10.pt"))
    assert_same(found, expected)
    assert rest.position.iteration == 21


def test_resumed_with_another_number_of_ranks(make_parts, tmp_path):
    _, expected = run(make_parts, tmp_path, epochs=3, batch_size=32)
    run(make_parts, tmp_path, epochs=3, iterations=9, checkpoint=True, batch_size=32)
    found = World(2).run(
        lambda session: run(
            make_parts,
            None,
            epochs=3,
            batch_size=16,
            session=session,
            resume=str(tmp_path / "last.pt"),
        )[1]
    )
    for parts in found:
        for a, b in zip(state(parts), state(expected), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_seconds_go_on_from_the_checkpoint(make_parts, tmp_path):
    first, _ = run(make_parts, tmp_path, epochs=1, checkpoint=True)
    rest, _ = run(make_parts, tmp_path, epochs=1, resume=str(tmp_path / "last.pt"))
    assert rest.position.seconds > first.position.seconds  # nothing left to train, evaluated once more
    assert rest.score == first.score
    assert len(rest.clock.seconds) == 0


def test_only_rank_0_writes_and_no_part_is_left(make_parts, tmp_path):
    def work(session):
        return run(make_parts, tmp_path if session.rank == 0 else None, epochs=1, checkpoint=True, session=session)

    World(2).run(work)
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]


def test_a_failed_write_leaves_the_old_checkpoint(make_parts, tmp_path, monkeypatch):
    run(make_parts, tmp_path, epochs=1, checkpoint=True)
    before = (tmp_path / "last.pt").read_bytes()

    def torn(content, file):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(OSError, match="disk full"):
        run(make_parts, tmp_path, epochs=2, checkpoint=True)
    assert (tmp_path / "last.pt").read_bytes() == before


class Pickled:
    def __reduce__(self):
        return (print, ("unpickled",))


def test_unusable_files_are_one_line(make_parts, tmp_path, capsys):
    text = tmp_path / "text.pt"
    text.write_text("hello")
    code = tmp_path / "code.pt"
    torch.save({"format": 1, "model": Pickled()}, code)
    other = tmp_path / "other.pt"
    torch.save({"weights": torch.zeros(1)}, other)
    for path, words in ((text, "cannot be read"), (code, "cannot be read"), (other, "not a checkpoint")):
        with pytest.raises(UserError, match=words) as caught:
            run(make_parts, tmp_path, resume=str(path))
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)
    assert capsys.readouterr().out == ""


def test_another_model_optimizer_schedule_or_order_is_named(make_parts, tmp_path):
    run(make_parts, tmp_path, epochs=1, iterations=2, checkpoint=True)
    path = tmp_path / "last.pt"

    def restore(model=None, optimizer=torch.optim.SGD, make_schedule=schedule, seed=3):
        model = model or make_parts().model
        stepper = optimizer(model.parameters(), lr=0.1)
        plan = make_schedule(stepper) if make_schedule else None
        return checkpoint.restore(path, model, stepper, plan, seed=seed, size=200)

    assert restore().iteration == 2
    for arguments, words in (
        ({"model": nn.Sequential(nn.Linear(64, 32))}, r"this run's model has no 3\.weight"),
        ({"model": nn.Sequential(*make_parts().model, nn.Linear(2, 2))}, r"the checkpoint has no 4\.weight"),
        (
            {"model": nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.ReLU(), nn.Linear(16, 10))},
            r"0\.weight is \(32, 64\) there, \(16, 64\) here",
        ),
        ({"optimizer": torch.optim.AdamW}, "optimizer SGD, this run has AdamW"),
        ({"make_schedule": None}, "schedule CosineAnnealingLR, this run has None"),
        ({"seed": 4}, "within an epoch of 200 rows with seed=3"),
    ):
        with pytest.raises(UserError, match=words):
            restore(**arguments)
