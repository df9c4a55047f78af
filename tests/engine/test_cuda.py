"""The calls that order CUDA's streams, with streams that only say what they were told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from poseidon.engine import Staged
from poseidon.engine.cuda import CudaCopies
from poseidon.engine.streams import Streams
from poseidon.schemes import Contribution


class Stream:
    """Of a device that does nothing."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told, self.device = name, told, torch.device("cuda", 0)

    def wait_stream(self, other: Stream) -> None:
        self.told.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self.told.append(f"{self.name} waits for the copies on {event.stream.name}")


class Event:
    def record(self, stream: Stream) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        self.stream.told.append(f"the host waits for the copies on {self.stream.name}")


class OnDevice:
    """What of a CUDA tensor is asked for."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self, told: list[str]) -> None:
        self.told = told

    def record_stream(self, stream: Stream) -> None:
        self.told.append(f"memory is used by {stream.name}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    told: list[str] = []
    state = SimpleNamespace(told=told, current=Stream("a", told))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: state.current)
    return state


def test_another_stream_waits_for_those_that_made_something(cuda: Any) -> None:
    streams, tensor = Streams(), OnDevice(cuda.told)
    streams.note(torch.ones(2))
    streams.note(tensor)  # type: ignore[arg-type]
    streams.join([tensor])  # type: ignore[list-item]
    assert cuda.told == []  # its own
    cuda.current = Stream("b", cuda.told)
    streams.join([tensor])  # type: ignore[list-item]
    assert cuda.told == ["b waits for a", "memory is used by b"]
    streams.clear()
    streams.join()
    assert len(cuda.told) == 2


def test_copies_come_after_what_makes_their_sources_and_before_what_uses_them(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = iter(("down", "up"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(next(names), cuda.told))
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: Event())
    device = Staged(CudaCopies(torch.device("cuda", 0)), cuda.told.append)
    moved: list[Any] = []
    device.to_host(Contribution(3), 0, moved.append)
    device._down.close()
    device.to_device(None, 0, moved.append)
    device._up.close()
    assert moved[0] == Contribution(3, origin=Contribution(3))
    assert device.received(moved[1]) is None
    assert cuda.told == ["down waits for a", "the host waits for the copies on down", "a waits for the copies on up"]
