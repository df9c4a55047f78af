"""Sparse factors: coded or not, the same bits by every comm, and fewer bytes; what is no coding is a named error."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from poseidon.api import Session
from poseidon.errors import PoseidonError
from poseidon.transport import Kind
from tests.copies import LateCopies
from tests.matrix.harness import Case, assert_equals_one_process, build, on_ranks, vectors
from tests.ranks import run_ranks

COMMS = ["sfb", "block", "project_adam", "hybrid"]


class Thinned(nn.Module):
    """ReLU, and a dropout that is the same for a row wherever it is: which entries it drops depends on the row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(40, 96), nn.ReLU(), nn.Linear(96, 72), nn.ReLU(), nn.Linear(72, 48, bias=False)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            if isinstance(layer, nn.ReLU):
                x = x * ((x * 1e4).long() % 2 == 0)  # makes -0.0 of negative gradients
        return x


def case(**options: Any) -> Case:
    return Case(Thinned, vectors(40), options={"merge_bytes": 0, **options})


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("devices", [[1, 1, 1], [2, 2]], ids=str)
def test_coded_or_not_the_bits_are_the_same(comm: str, devices: list[int]) -> None:
    sizes = [4, 0, 6, 3][: sum(devices)]
    never = on_ranks(case(sparse="never"), build(case()), comm, sizes, devices)
    always = on_ranks(case(sparse="always"), build(case()), comm, sizes, devices)
    for (one, _), (other, _) in zip(never, always, strict=True):
        for left, right in zip(one, other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
    for report in (report for _, report in [*never, *always]):
        dense, planned = report["bytes_dense_per_iteration"], report["bytes_planned_per_iteration"]
        assert sum(sizes) != 12 or dense == pytest.approx(planned, rel=0.02)
    before, after = (sum(report["bytes_sent_per_iteration"] for _, report in ranks) for ranks in (never, always))
    assert after < before


@pytest.mark.parametrize("comm", COMMS)
def test_equals_one_process(comm: str) -> None:
    for report in assert_equals_one_process(case(sparse="always"), comm, [2, 5, 3]):
        counted = [its for by in report["traffic"].values() for scheme, its in by.items() if scheme != "ps"]
        assert any(its["sent"] < its["dense"] for its in counted)


def test_with_servers_of_their_own() -> None:
    for comm in ("block", "project_adam"):
        assert_equals_one_process(case(sparse="always"), comm, [2, 4], servers=2)


def test_from_a_device_with_memory_of_its_own() -> None:
    assert_equals_one_process(case(sparse="always"), "sfb", [2, 4], copies=LateCopies)


def test_with_staleness() -> None:
    """Rounds overlap; reruns of what is applied as late as allowed are the same, coded or not."""

    base = build(case())

    def digest(session: Session, sparse: str) -> str:
        model = copy.deepcopy(base)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        options: dict[str, Any] = {"staleness": 2, "staleness_mode": "fixed", "merge_bytes": 0, "sparse": sparse}
        session.distribute(model, optimizer, comm="sfb", **options)
        for step in range(8):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + session.rank)
            model(torch.randn(4, 40, generator=generator)).square().mean().backward()
            optimizer.step()
        return session.digest(model)

    digests = [run_ranks(3, lambda session, how=how: digest(session, how)) for how in ("never", "always")]
    assert len({each for ranks in digests for each in ranks}) == 1


def test_under_autocast_and_in_double() -> None:
    def autocast(model: nn.Module, _: Any, inputs: Any, number: torch.Tensor, __: Any) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(*inputs)
        (output.float().square().mean(1) * number).mean().backward()

    def doubled(generator: torch.Generator, rows: int) -> tuple[torch.Tensor]:
        return (torch.randn(rows, 40, generator=generator).double(),)

    kinds = [
        Case(Thinned, vectors(40), step=autocast, options={"merge_bytes": 0}),
        Case(lambda: Thinned().double(), doubled, options={"merge_bytes": 0}),
    ]
    for kind in kinds:
        digests = []
        for sparse in ("never", "always"):
            kind.options["sparse"] = sparse
            ranks = on_ranks(kind, build(kind), "sfb", [4, 3])
            digests.append([seen for seen, _ in ranks])
        for one, other in zip(*digests, strict=True):
            for left, right in zip(one, other, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("odd", [math.nan, math.inf, 1e-42, -0.0])
def test_odd_numbers_arrive(odd: float) -> None:
    def body(session: Session) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(64, 8, bias=False)
        session.distribute(model, torch.optim.SGD(model.parameters(), lr=0.0), comm="sfb", sparse="always")
        for _ in range(2):
            model.weight.grad = None
            x = torch.zeros(3, 64)
            x[1, 5] = odd if session.rank == 0 else 1.0
            x[2] = -0.0
            model(x).sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad

    first, second = run_ranks(2, body)
    assert first.view(torch.int32).equal(second.view(torch.int32))
    assert not first[:, :5].signbit().any()
    if math.isnan(odd):
        assert first[:, 5].isnan().all()
    else:
        torch.testing.assert_close(first[:, 5], torch.full((8,), (odd + 1.0) / 2))


def test_auto_codes_where_links_are_slow() -> None:
    from poseidon.planning import Rates, Timing

    found = {}
    for name, link in (("slow", 1e6), ("fast", 1e12)):
        timing = Timing(Rates(link, 0.0, 1e12), {}, {})
        for _, report in on_ranks(case(timing=timing), build(case()), "sfb", [8, 8]):
            found[name] = report["bytes_sent_per_iteration"] / report["bytes_dense_per_iteration"]
    assert found["slow"] < 0.85 < 1.0 < found["fast"]


def test_a_transfer_that_is_none_ends_the_run_by_name() -> None:
    def body(session: Session) -> str:
        exchange = session._exchange
        assert exchange is not None
        send = exchange.send

        def tampered(peer: int, header: Any, payload: Any, *priority: int) -> None:
            if header.kind is Kind.FACTORS and header.dense and session.rank == 0:
                payload = memoryview(b"\xff" * len(payload))
            send(peer, header, payload, *priority)

        exchange.send = tampered  # type: ignore[method-assign]
        model = Thinned()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.distribute(model, optimizer, comm="sfb", sparse="always")

        def train() -> None:
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(4, 40)).sum().backward()
                optimizer.step()

        with pytest.raises(PoseidonError) as error:
            train()
        return str(error.value)

    for said in run_ranks(2, body):
        assert "cannot use coded factors: RuntimeError: rank 0, unit " in said
        assert "mark more than" in said
