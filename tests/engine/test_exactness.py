"""Gradients and parameters equal one process on the concatenated batch; replicas and reruns equal bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
from torch.nn import functional as F

from poseidon.api import Session
from tests.engine.nets import assert_exact, batch, build, clone, grads, sgd, share
from tests.ranks import run_ranks

STEPS = 4
SIZES = {"equal": [8, 8], "uneven": [5, 9], "three": [4, 7, 3], "one without rows": [6, 0, 5]}


def one_process(name: str, sizes: list[int]) -> list[Any]:
    """Per step: gradients, then parameters after it."""
    model = build(name)
    optimizer = sgd(model)
    result = []
    for step in range(STEPS):
        x, y = batch(step, sum(sizes))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        seen = grads(model)
        optimizer.step()
        result.append((seen, [p.detach().clone() for p in model.parameters()]))
    return result


def distributed(name: str, sizes: list[int], comm: str, overlap: str, **options: Any) -> list[Any]:
    base = build(name)

    def body(session: Session) -> Any:
        model = clone(base, session.rank)
        optimizer = sgd(model)
        session.distribute(model, optimizer, comm=comm, overlap=overlap, rule="paper", **options)  # type: ignore[arg-type]
        result = []
        for step in range(STEPS):
            x, y = share(batch(step, sum(sizes)), session.rank, sizes)
            optimizer.zero_grad()
            if len(x):
                F.cross_entropy(model(x), y).backward()
                seen = grads(model)
                optimizer.step()
            else:
                session.rows(0)
                optimizer.step()
                seen = grads(model)
            result.append((seen, [p.detach().clone() for p in model.parameters()]))
        return result, session.digest(model), session.report(model)

    return run_ranks(len(sizes), body)


@pytest.mark.parametrize("overlap", ["none", "backward"])
@pytest.mark.parametrize("comm", ["ps", "sfb", "hybrid", "block", "project_adam"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("name", ["mlp", "lenet"])
def test_equals_one_process(name: str, sizes: list[int], comm: str, overlap: str) -> None:
    want = one_process(name, sizes)
    ranks = distributed(name, sizes, comm, overlap)
    for steps, _, _ in ranks:
        for (got_grads, got_params), (want_grads, want_params) in zip(steps, want, strict=True):
            assert_exact(got_grads, want_grads)
            assert_exact(got_params, want_params)
    assert len({digest for _, digest, _ in ranks}) == 1


@pytest.mark.parametrize("comm", ["ps", "sfb", "hybrid", "block", "project_adam"])
def test_reruns_and_overlaps_give_the_same_bits(comm: str) -> None:
    digests = {
        distributed("lenet", [4, 7, 3], comm, overlap)[0][1] for overlap in ("none", "backward", "none", "backward")
    }
    assert len(digests) == 1


@pytest.mark.parametrize("options", [{"kv_bytes": 1024}, {"merge_bytes": 0}, {"merge_bytes": 1 << 24}])
@pytest.mark.parametrize("comm", ["ps", "hybrid"])
def test_cutting_and_merging_do_not_change_the_result(comm: str, options: dict[str, int]) -> None:
    plain = distributed("lenet", [5, 9, 2], comm, "backward")
    cut = distributed("lenet", [5, 9, 2], comm, "backward", **options)
    assert {d for _, d, _ in plain} == {d for _, d, _ in cut}


@pytest.mark.parametrize("comm", ["ps", "sfb", "hybrid", "block", "project_adam"])
def test_measured_payload_is_the_planned_payload(comm: str) -> None:
    for _, _, report in distributed("lenet", [8, 8, 8], comm, "backward", sparse="never"):
        assert report["iterations"] == STEPS - 1
        assert report["bytes_dense_per_iteration"] == pytest.approx(report["bytes_planned_per_iteration"], rel=0.02)
        assert report["bytes_sent_per_iteration"] > report["bytes_dense_per_iteration"] > 0


def test_schemes_follow_the_papers_rule() -> None:
    (_, _, report), *_ = distributed("mlp", [8, 8], "hybrid", "backward")
    assert report["schemes"] == {"0": "sfb", "2": "sfb", "4": "sfb"}
    (_, _, report), *_ = distributed("mlp", [60, 60, 60], "hybrid", "backward")
    # K (M + N) (P - 1) against M N (P - 1) x 2 / P: 60 x 364 > 12800; 60 x 500 < 40000; 60 x 210 > 1333
    assert report["schemes"] == {"0": "ps", "2": "sfb", "4": "ps"}
    (_, _, report), *_ = distributed("mlp", [8, 8], "ps", "backward")
    assert set(report["schemes"].values()) == {"ps"}
