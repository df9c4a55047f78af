"""Images and labels of the real digits belong together, read from the source or from the cache."""

from __future__ import annotations

import pytest
import torch

from poseidon import data
from poseidon.data import handwritten


@pytest.mark.parametrize("name", ["mnist5k", "digits"])
def test_a_label_is_what_its_image_looks_like(name, tmp_path, monkeypatch):
    monkeypatch.setenv("POSEIDON_CACHE", str(tmp_path))
    for _ in range(2):
        (images, labels), (others, right) = (part.tensors for part in getattr(data, name)())
        centres = torch.stack([images[labels == digit].mean(dim=0).flatten() for digit in range(10)])
        nearest = torch.cdist(others.flatten(1), centres).argmin(dim=1)
        assert (nearest == right).float().mean() > 0.75
        monkeypatch.setattr(handwritten, "_read_csv", lambda source: pytest.fail("read again"))
