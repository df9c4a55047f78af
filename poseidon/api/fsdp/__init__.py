"""comm=fsdp: PyTorch's own FSDP2 (``fully_shard``) under the same interface, as the second reference.

Import :mod:`poseidon.api.fsdp.model` where it is used: PyTorch's part takes a second to import.
"""
