"""The simulator against an independent calculation of ideal times: seconds per iteration, and bytes.

Of each row: Gbit/s, nodes, MB that a node sends by PS and by hybrid, then the systems in their order.
"""

from __future__ import annotations

import pytest

from poseidon.simulation import Network, System, simulate
from tests.simulation import papers

SYSTEMS = (
    System("ddp"),
    System("fsdp"),
    System("ps", "none"),
    System("ps", "backward"),
    System("ps", "full"),
    System("hybrid", "backward"),
    System("hybrid", "full"),
)

ALEXNET = [
    (1, 2, 243.9, 36.6, (2.1232, 2.0400, 2.2886, 2.1229, 2.0402, 0.3900, 0.3079)),
    (1, 8, 426.8, 199.2, (3.6545, 3.5689, 3.8176, 3.6518, 3.5691, 1.7497, 1.6669)),
    (10, 2, 243.9, 36.6, (0.2885, 0.2696, 0.4540, 0.2882, 0.2516, 0.2553, 0.2553)),
    (10, 4, 365.8, 95.8, (0.3913, 0.3209, 0.5559, 0.3902, 0.3074, 0.2673, 0.2673)),
    (10, 8, 426.8, 199.2, (0.4438, 0.3582, 0.6068, 0.4411, 0.3583, 0.2884, 0.2884)),
    (40, 2, 243.9, 36.6, (0.2521, 0.2503, 0.3011, 0.2502, 0.2502, 0.2553, 0.2553)),
    (40, 8, 426.8, 199.2, (0.2541, 0.2505, 0.3393, 0.2503, 0.2503, 0.2884, 0.2884)),
]

VGG19_22K = [
    (1, 2, 916.2, 88.3, (7.9708, 7.6632, 8.5841, 7.9703, 7.6634, 1.0482, 0.9369)),
    (1, 8, 1603.4, 197.1, (13.7186, 13.4075, 14.3284, 13.7145, 13.4076, 1.9576, 1.6598)),
    (10, 2, 916.2, 88.3, (1.0776, 1.0019, 1.6910, 1.0771, 0.9306, 0.9271, 0.9271)),
    (10, 4, 1374.3, 144.6, (1.4618, 1.1939, 2.0740, 1.4601, 1.1533, 0.9324, 0.9324)),
    (10, 8, 1603.4, 197.1, (1.6557, 1.3445, 2.2654, 1.6516, 1.3446, 0.9431, 0.9431)),
    (40, 2, 916.2, 88.3, (0.9300, 0.9255, 1.1166, 0.9252, 0.9252, 0.9271, 0.9271)),
    (40, 8, 1603.4, 197.1, (0.9343, 0.9258, 1.2602, 0.9252, 0.9252, 0.9431, 0.9431)),
]


@pytest.mark.parametrize(("model", "rows"), [("alexnet", ALEXNET), ("vgg19_22k", VGG19_22K)])
def test_seconds_and_bytes_are_those_of_the_calculation(model, rows):
    job = getattr(papers, model)()
    for rate, nodes, dense, mixed, seconds in rows:
        found = [simulate(job, Network(nodes, rate * 1e9), system) for system in SYSTEMS]
        assert [outcome.seconds for outcome in found] == pytest.approx(seconds, rel=0.01), (model, rate, nodes)
        sent = [outcome.bytes_sent / 1e6 for outcome in found]
        assert sent == pytest.approx([dense] * 5 + [mixed] * 2, rel=1e-3), (model, rate, nodes)
