from __future__ import annotations

from poseidon.transport.health import DRAIN_SECONDS, GRACE_SECONDS, Health


def connected() -> Health:
    health = Health({1, 2})
    for rank in (1, 2):
        for channel in (0, 1):
            health.hello(rank, channel, 10 * rank + channel)
    return health


def test_silent():
    health = Health({1, 2})
    assert health.silent() == [1, 2]
    health.hello(1, 0, 7)
    health.hello(1, 0, 8)
    assert health.silent() == [1, 2]
    health.hello(1, 1, 9)
    assert health.silent() == [2]


def test_death_ends_both_connections():
    health = connected()
    assert health.next_due() is None
    health.inbound_ended(0, 10, 100.0)
    health.inbound_ended(1, 11, 100.1)
    assert health.lost(100.1) == []
    assert health.lost(100.1 + GRACE_SECONDS) == [1]
    assert health.lost(1000) == []
    assert health.gone == {1}


def test_one_broken_connection_may_be_a_peer_that_still_flushes_the_other():
    health = connected()
    health.outbound_ended(1, 100.0)
    health.inbound_ended(1, 11, 100.0)
    assert health.lost(100 + DRAIN_SECONDS - 0.1) == []
    health.bye(1, 1)
    assert health.lost(100 + DRAIN_SECONDS - 0.1) == []
    health.bye(1, 0)
    assert health.lost(1000) == []
    assert health.next_due() is None


def test_one_broken_connection_is_a_loss_in_the_end():
    health = connected()
    health.outbound_ended(2, 100.0)
    assert health.next_due() == 100 + DRAIN_SECONDS
    assert health.lost(100 + DRAIN_SECONDS) == [2]


def test_who_said_goodbye_is_never_lost():
    health = connected()
    health.bye(1, 0)
    health.bye(1, 1)
    health.inbound_ended(0, 10, 0)
    health.inbound_ended(1, 11, 0)
    health.outbound_ended(1, 0)
    assert health.lost(1000) == []


def test_strangers():
    health = connected()
    assert not health.inbound_ended(0, 99, 0)
    assert health.inbound_ended(0, 10, 0)
    assert not health.inbound_ended(0, 10, 0)  # the number, used again by somebody else
