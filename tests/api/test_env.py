from __future__ import annotations

import pytest

from poseidon.api.env import JobEnv, read_env
from poseidon.errors import UserError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def test_torchruns_variables():
    assert read_env(TORCHRUN) == JobEnv(3, 4, 1, 2, "node0", 29400, None, 2)
    assert not read_env(TORCHRUN).one_host


def test_our_launchers_store():
    assert read_env({**TORCHRUN, "POSEIDON_STORE_FD": "7"}).store_fd == 7


def test_no_job_at_all():
    assert read_env({"MASTER_ADDR": "x", "PATH": "y"}) == JobEnv()
    assert read_env({"RANK": "", "WORLD_SIZE": ""}) == JobEnv()
    assert read_env({"RANK": "0", "WORLD_SIZE": "1"}) == JobEnv()


def test_ranks_of_one_host_without_local_ranks():
    """A launcher that sets the global variables only: each rank has a device of its own all the same."""
    job = read_env({"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"})
    assert (job.local_rank, job.local_world_size, job.one_host) == (2, 3, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": None}, "RANK not set"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE not set"),
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, "MASTER_ADDR and MASTER_PORT not set"),
        ({"RANK": "4"}, "RANK=4 is outside WORLD_SIZE=4"),
        ({"RANK": "-1"}, "RANK=-1 is outside WORLD_SIZE=4"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK=0 is outside WORLD_SIZE=0"),
        ({"RANK": "one"}, "RANK='one' is not a whole number"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http' is not a whole number"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0 is not a port"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0 is outside 1 to WORLD_SIZE=4"),
        ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE=5 is outside 1 to WORLD_SIZE=4"),
    ],
)
def test_mistakes_are_named(change, message):
    env = {key: value for key, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(UserError, match=message):
        read_env(env)
