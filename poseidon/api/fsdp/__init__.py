"""comm=fsdp: PyTorch's own FSDP2 (``fully_shard``) under the same interface, as the second reference."""

from poseidon.api.fsdp.model import FSDP

__all__ = ["FSDP"]
