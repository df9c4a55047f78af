"""The papers' cost model: floats that cross a node's link per iteration, both directions counted (P17, section 3.2).

An M x N fully connected layer sees K rows per worker and iteration; P1 workers, P2 server shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

Scheme = Literal["ps", "sfb", "rows", "adam", "block"]


def ps_floats(m: int, n: int, workers: int, servers: int) -> float:
    """Floats at a node that is both worker and server, gradients up and averages down (P17, table 1)."""
    return 2 * m * n * (workers + servers - 2) / servers


def ps_server_floats(m: int, n: int, workers: int, servers: int) -> float:
    """Floats at a node that only serves (P17, table 1)."""
    return 2 * workers * m * n / servers


def ps_worker_floats(m: int, n: int) -> float:
    """Floats at a node that only works (P17, table 1)."""
    return 2 * m * n


def sfb_floats(m: int, n: int, rows: int, workers: int) -> float:
    """Floats at a worker that broadcasts and receives sufficient factors (P17, table 1)."""
    return 2 * rows * (workers - 1) * (m + n)


def adam_server_floats(m: int, n: int, rows: int, workers: int) -> float:
    """Floats at a node that only serves: factors of all workers in, the whole matrix to each (P17, table 1)."""
    return workers * (m * n + rows * (m + n))


def adam_worker_floats(m: int, n: int, rows: int) -> float:
    """Floats at a node that only works: its factors up, the whole matrix down (P17, table 1)."""
    return m * n + rows * (m + n)


def adam_floats(m: int, n: int, rows: int, workers: int) -> float:
    """Floats at the node that owns the shard when factors go up and the whole matrix comes down (P17, table 1)."""
    return (workers - 1) * (m * n + rows * m + rows * n)


def block_floats(m: int, n: int, rows: int, workers: int, servers: int, dedicated: bool = False) -> float:
    """Floats at the node that moves most when every server owns one block of W, cut along its longer side: factors go
    up to the blocks' owners, who multiply them, and blocks come down to all (P15's "factors up, matrix down",
    balanced).

    Args:
        dedicated: servers are nodes that do not work.
    """
    long, short = max(m, n), min(m, n)
    block = (
        rows * (long / servers + short) + m * n / servers
    )  # what one worker and one owner have to do with each other
    return (max(workers, servers) if dedicated else workers + servers - 2) * block


def rows_floats(n: int, rows: int, workers: int) -> float:
    """Floats at a worker that broadcasts and receives the touched rows of an embedding of N columns; `rows`: different
    ones on each worker. A row's index counts as one float."""
    return 2 * rows * (workers - 1) * (n + 1)


def ps_busiest_floats(m: int, n: int, workers: int, servers: int, dedicated: bool) -> float:
    """Floats at the node that moves most by PS.

    Args:
        dedicated: servers are nodes that do not work.
    """
    if dedicated:
        return max(ps_worker_floats(m, n), ps_server_floats(m, n, workers, servers))
    return ps_floats(m, n, workers, servers)


def best_scheme(m: int, n: int, rows: int, workers: int, servers: int, dedicated: bool = False) -> Scheme:
    """The papers' rule for a fully connected layer (P17, algorithm 1): SFB when it moves no more floats than PS, at the
    node that moves most.

    A layer that saw no row has no factors worth a message: it goes by PS. One worker alone sends nothing by either; its
    server would have to add up the whole matrix, so the rule's "no more" takes SFB.
    """
    if rows < 1:
        return "ps"
    by_ps = ps_busiest_floats(m, n, workers, servers, dedicated)
    return "sfb" if sfb_floats(m, n, rows, workers) <= by_ps else "ps"


def best_of_embedding(m: int, n: int, rows: int, workers: int, servers: int, dedicated: bool = False) -> Scheme:
    """Of an embedding of M rows, of which `rows` are touched: as rows when that moves no more floats than PS."""
    if rows < 1 or workers < 2:
        return "ps"
    by_ps = ps_busiest_floats(m, n, workers, servers, dedicated)
    return "rows" if rows_floats(n, rows, workers) <= by_ps else "ps"


def sharded_bytes(params: Iterable[tuple[tuple[int, ...], int, bool]], nodes: int) -> int:
    """Bytes that a node sends per iteration where each has its rows of all parameters (FSDP, reshard_after_forward=
    False): its rows of each to every other node, and of each gradient every other node's rows to it. What is cut
    unevenly is filled up.

    Args:
        params: (shape, bytes of an element, trained?) of each.
    """
    parts = ((math.ceil(shape[0] / nodes) * math.prod(shape[1:]) * size, trained) for shape, size, trained in params)
    return sum((nodes - 1) * part * (2 if trained else 1) for part, trained in parts)
