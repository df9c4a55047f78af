"""The loop on real digits, one rank and several; averaging over ranks is done by plain sums (fakes.py)."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from poseidon.api import init
from poseidon.config.schema import Comm, Precision
from poseidon.errors import ReplicaMismatchError, UserError
from poseidon.tracking.metrics import MetricsWriter
from poseidon.training.loop import Outputs, Trainer
from poseidon.training.result import collect

from .conftest import make_config
from .fakes import FakeSession, World


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(session, parts, config, outputs=None):
    trainer = Trainer(session, parts, config, outputs)
    return trainer.run(), weights(trainer.model)


def test_learns_digits_with_the_real_session_of_one_process(make_parts):
    with init(device="cpu") as session:
        outcome, _ = train(session, make_parts(), make_config(epochs=5))
    assert outcome.score.accuracy > 0.85
    assert outcome.score.rows == 300
    assert (outcome.position.epoch, outcome.position.iteration) == (5, 5 * 32)
    assert 0 < outcome.train_loss < 0.5


@pytest.mark.parametrize("comm", [Comm.hybrid, Comm.ddp])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_together_do_what_one_process_does_with_the_global_batch(make_parts, size, comm):
    # 993 rows: the last global batch is split unevenly.
    config = make_config(comm, epochs=2, batch_size=16)
    single = make_config(Comm.single, epochs=2, global_batch=16 * size)
    _, expected = train(FakeSession(), make_parts(993), single)
    world = World(size, plain_mean=comm is Comm.ddp)
    outcomes = world.run(lambda session: train(session, make_parts(993), config))
    for outcome, found in outcomes:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(found, outcomes[0][1])
        assert outcome.score == outcomes[0][0].score
        assert outcome.train_loss == outcomes[0][0].train_loss


@pytest.mark.parametrize("comm", [Comm.hybrid, Comm.ddp])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_nodes_with_unequal_shares_do_what_one_process_does(make_parts, comm, accumulate):
    config = make_config(comm, epochs=2, batch_size=16, accumulate=accumulate)
    config.cluster.nodes, config.cluster.batch_shares = 3, [1.0, 3.0, 2.0]
    _, expected = train(FakeSession(), make_parts(993), make_config(Comm.single, epochs=2, global_batch=48))
    world = World(3, plain_mean=comm is Comm.ddp)
    sessions = []

    def body(session):
        sessions.append(session)
        return train(session, make_parts(993), config)

    for _, found in world.run(body):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert {session.rank: session.row_counts[0] for session in sessions} == {0: 8, 1: 24, 2: 16}


@pytest.mark.parametrize("comm", [Comm.hybrid, Comm.ddp])
def test_ranks_without_rows_clip_and_step_like_the_others(make_parts, comm):
    # 49 rows in batches of 16 on three ranks: the second and last step has one row, on rank 0.
    config = make_config(comm, epochs=3, batch_size=16, clip_norm=0.05)
    single = make_config(Comm.single, epochs=3, global_batch=48, clip_norm=0.05)
    _, expected = train(FakeSession(), make_parts(49), single)
    _, unclipped = train(FakeSession(), make_parts(49), make_config(Comm.single, epochs=3, global_batch=48))
    assert not torch.allclose(unclipped, expected, atol=1e-3)
    world = World(3, plain_mean=comm is Comm.ddp)
    for _, found in world.run(lambda session: train(session, make_parts(49), config)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_gradients_that_the_step_takes_away_are_clipped_before_it(make_parts):
    """Under comm=downpour, each rank's own."""

    def body(session):
        seen = []
        parts = make_parts(64)
        trainer = Trainer(session, parts, make_config(Comm.downpour, epochs=1, batch_size=16, clip_norm=0.05))
        handle = register_optimizer_step_pre_hook(
            lambda optimizer, *_: (
                seen.append(float(nn.utils.get_total_norm([p.grad for p in trainer.model.parameters()])))
                if optimizer is parts.optimizer
                else None
            )
        )
        trainer.run()
        handle.remove()
        return seen

    with init(device="cpu") as session:
        assert body(session) == pytest.approx([0.05] * 4, rel=1e-3)


@pytest.mark.parametrize("parts_of_batch", [2, 3, 7])
def test_accumulating_equals_the_whole_batch(make_parts, parts_of_batch):
    _, expected = train(FakeSession(), make_parts(330), make_config(epochs=2))
    session = FakeSession()
    config = make_config(epochs=2, accumulate=parts_of_batch)
    _, found = train(session, make_parts(330), config)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    steps = len(session.row_counts)
    assert steps == 22
    assert session.deferred == (parts_of_batch - 1) * steps
    assert set(session.row_counts) == {32, 330 % 32}


def test_accumulating_more_parts_than_rows(make_parts):
    _, expected = train(FakeSession(), make_parts(34), make_config(epochs=1))
    _, found = train(FakeSession(), make_parts(34), make_config(epochs=1, accumulate=8))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("limits", "iterations"),
    [
        ({"epochs": 0.5}, 16),
        ({"epochs": 1.25}, 40),
        ({"epochs": 2}, 64),
        ({"epochs": None, "iterations": 45}, 45),
        ({"epochs": 1, "iterations": 45}, 32),
        ({"epochs": 3, "iterations": 7}, 7),
    ],
)
def test_ends_by_epochs_or_iterations_whichever_comes_first(make_parts, limits, iterations):
    shown = []
    outcome, _ = train(FakeSession(), make_parts(), make_config(**limits), Outputs(show=shown.append))
    assert outcome.position.iteration == iterations
    assert outcome.score is not None  # of the final weights
    assert shown[-1]["total"] == iterations


def test_no_limit_is_an_error(make_parts):
    with pytest.raises(UserError, match=r"trainer\.epochs and trainer\.iterations"):
        Trainer(FakeSession(), make_parts(), make_config(epochs=None))


def test_stops_at_the_evaluation_that_reaches_the_target(make_parts):
    config = make_config(epochs=50, target_accuracy=0.8, batch_size=16)
    outcomes = World(2).run(lambda session: train(session, make_parts(), config)[0])
    epochs = {outcome.position.epoch for outcome in outcomes}
    assert len(epochs) == 1
    assert epochs.pop() < 20
    for outcome in outcomes:
        assert outcome.score.accuracy >= 0.8
        assert 0 < outcome.seconds_to_target <= outcome.position.seconds


def test_target_not_reached_is_null(make_parts):
    outcome, _ = train(FakeSession(), make_parts(), make_config(epochs=1, target_accuracy=1.0))
    assert outcome.seconds_to_target is None


@pytest.mark.parametrize(("every", "evaluations"), [(1, 4), (2, 2), (3, 2), (0, 1)])
def test_evaluates_every_few_epochs_and_at_the_end_once(make_parts, tmp_path, every, evaluations):
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        train(FakeSession(), make_parts(100), make_config(epochs=4, eval_every=every), Outputs(writer))
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sum("eval_accuracy" in record for record in records) == evaluations


def test_more_ranks_than_rows_to_evaluate(make_parts, digits):
    from torch.utils.data import TensorDataset

    few = TensorDataset(*(t[:2] for t in digits[1].tensors))
    config = make_config(epochs=1, batch_size=16)
    work = lambda session: train(session, make_parts(100, evaluation=few, eval_size=2), config)[0]  # noqa: E731
    assert {outcome.score.rows for outcome in World(4).run(work)} == {2}


def test_metrics_are_global_means_in_a_line_each_window_with_few_exchanges(make_parts, tmp_path):
    config = make_config(epochs=2, batch_size=16, log_every=5)
    sessions = []

    def work(session):
        sessions.append(session)
        writer = MetricsWriter(tmp_path / "metrics.jsonl") if session.rank == 0 else None
        outcome = train(session, make_parts(), config, Outputs(writer))[0]
        if writer:
            writer.close()
        return outcome

    outcome = World(2).run(work)[0]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [record for record in records if "train_loss" in record]
    assert [record["iteration"] for record in losses] == [*range(5, 31, 5), 32, *range(35, 61, 5), 64]
    assert losses[-1]["epoch"] == 2
    last_epoch = losses[7:]
    rows = [96, 160, 160, 160, 160, 160, 104]  # iterations 33..35, ..., 61..64 of 32 rows, the last of 8
    mean = sum(r["train_loss"] * n for r, n in zip(last_epoch, rows, strict=True)) / 1000
    assert outcome.train_loss == pytest.approx(mean, rel=1e-5)
    assert losses[0]["lr"] == 0.1
    # Two evaluations, two epoch ends, and an exchange about every second.
    assert sessions[0].gathers < 12


@pytest.mark.parametrize(("interval", "steps"), [("epoch", 3), ("iteration", 48)])
def test_schedule_steps_once_per_interval_on_every_rank(make_parts, interval, steps):
    def work(session):
        parts = make_parts(500, schedule=lambda o: lr_scheduler.StepLR(o, 1, gamma=0.9), schedule_interval=interval)
        Trainer(session, parts, make_config(epochs=3, batch_size=16)).run()
        return parts.optimizer.param_groups[0]["lr"]

    assert World(2).run(work) == pytest.approx([0.1 * 0.9**steps] * 2)


def test_plateau_schedule_gets_the_evaluation_loss(make_parts):
    parts = make_parts(200, schedule=lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=10))
    Trainer(FakeSession(), parts, make_config(epochs=3)).run()
    assert parts.optimizer.param_groups[0]["lr"] < 0.1


def test_bf16_is_autocast_with_fp32_parameters(make_parts):
    seen = []
    parts = make_parts(200)
    parts.model.register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    outcome, found = train(FakeSession(), parts, make_config(epochs=1, precision=Precision.bf16))
    assert set(seen) == {torch.bfloat16}
    assert found.dtype == torch.float32
    assert outcome.score.loss < 3


def test_data_loading_workers_give_the_same_training(make_parts):
    _, expected = train(FakeSession(), make_parts(200), make_config(epochs=2))
    _, found = train(FakeSession(), make_parts(200), make_config(epochs=2, workers=1))
    assert torch.equal(found, expected)


def test_dropout_differs_by_rank_and_epoch_but_not_from_run_to_run(make_parts):
    def masks(session):
        seen = []
        parts = make_parts(64, dropout=0.5)
        parts.model[2].register_forward_hook(lambda m, a, out: seen.append(out[0] == 0) if m.training else None)
        Trainer(session, parts, make_config(epochs=2, batch_size=32)).run()
        return torch.stack(seen)

    first, second = masks(FakeSession()), masks(FakeSession())
    assert torch.equal(first, second)
    assert not torch.equal(first[:2], first[2:])


def test_iteration_times_leave_out_the_first_evaluations_and_checkpoints(make_parts, tmp_path):
    outcome, _ = train(FakeSession(), make_parts(320), make_config(epochs=2))
    assert len(outcome.clock.seconds) == 19
    assert outcome.clock.cpu_seconds_per_iteration > 0


def test_user_code_that_fails_is_not_wrapped(make_parts):
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(64, 10)

        def forward(self, x):
            raise ZeroDivisionError("mine")

    model = Broken()
    parts = make_parts(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ZeroDivisionError, match="mine"):
        Trainer(FakeSession(), parts, make_config()).run()


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"loss": nn.CrossEntropyLoss(reduction="none")}, r"loss: returned \(32,\)"),
        ({"metric": lambda output, target: (output.argmax(1) == target).float().mean()}, "one value per row"),
    ],
)
def test_loss_and_metric_of_wrong_shape_are_named(make_parts, part, words):
    with pytest.raises(UserError, match=words):
        Trainer(FakeSession(), make_parts(100, **part), make_config(epochs=1)).run()


def test_result_has_a_figure_per_rank_and_compares_replicas(make_parts):
    def work(session):
        trainer = Trainer(session, make_parts(200), make_config(epochs=1, batch_size=16))
        result = collect(session, trainer.model, trainer.run(), rows=32)
        session.check(trainer.model)
        json.dumps(result)
        return result

    first, second = World(2).run(work)
    assert first == {**second, "train_seconds": first["train_seconds"]} | {
        key: first[key]
        for key in (
            "iteration_seconds",
            "images_per_second",
            "engine_bound",
            "cores_per_node",
            "cpu_busy_share",
            "cpu_bound",
        )
    }
    assert first["bytes_sent_per_iteration"] == [1000.0, 1000.0]
    assert len(first["replica_digests"]) == 2
    assert (first["most_bytes_queued"], first["most_bytes_in_flight"]) == (10, 20)
    assert first["strangers"] == {"frames": 1, "connections": 2}
    assert first["images_per_second"] == pytest.approx(32 / first["iteration_seconds"]["median"])


def test_differing_replicas_fail_naming_the_first_tensor(make_parts):
    def work(session):
        model = copy.deepcopy(make_parts().model)
        if session.rank == 1:
            with torch.no_grad():
                model[3].weight[0, 0] += 1
                model[3].bias[0] += 1
        session.check(model)

    with pytest.raises(ReplicaMismatchError, match=r"3\.weight of rank 1"):
        World(2).run(work)


def test_replicas_are_compared_on_the_way(make_parts):
    def work(session):
        trainer = Trainer(session, make_parts(200), make_config(epochs=1, batch_size=16, check_every=3))
        checks = []
        plain = session.check
        session.check = lambda model: (checks.append(trainer.position.iteration), plain(model))
        trainer.run()
        return checks

    assert World(2).run(work) == [[3, 6]] * 2


def test_a_difference_on_the_way_ends_the_run(make_parts):
    def work(session):
        trainer = Trainer(session, make_parts(200), make_config(epochs=1, batch_size=16, check_every=3))
        if session.rank == 1:
            with torch.no_grad():
                trainer.model[0].bias[0] += 1
        trainer.run()

    with pytest.raises(ReplicaMismatchError, match=r"0\.bias of rank 1"):
        World(2).run(work)
