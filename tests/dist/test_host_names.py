"""Two hosts train together whatever their own names mean to them, and on whichever of their networks they meet."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.dist.test_run import script
from tests.netns import network_hosts

pytestmark = pytest.mark.slow
DEADLINE_S = 90.0
SUM = """
import sys
import photinus, torch, torch.distributed as dist
with photinus.init(backend=sys.argv[1], timeout_s=40):
    for group in [None, dist.new_group(backend="gloo")] if len(sys.argv) > 2 else [None]:
        total = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(total, group=group)
        assert total.item() == 10
    dist.barrier()
"""
RUN = ["-m", "photinus", "run", "--cpu", "--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "host-0"]
TORCHRUN = ["-m", "torch.distributed.run", *RUN[4:]]


@pytest.mark.parametrize(
    ("own_name", "other_network", "launcher", "words"),
    [
        (None, False, RUN, ["photinus", "gloo too"]),
        ("127.0.1.1", True, RUN, ["photinus", "gloo too"]),
        ("127.0.1.1", True, TORCHRUN, ["photinus"]),
        ("127.0.1.1", False, TORCHRUN, ["gloo"]),
        ("127.0.1.1", True, None, ["photinus"]),
        ("127.0.1.1", False, None, ["gloo"]),
    ],
    ids=["unknown name", "two networks", "torchrun, two networks", "torchrun, gloo", "by hand", "by hand, gloo"],
)
def test_two_hosts_meet_whatever_their_own_names_mean_to_them(tmp_path, own_name, other_network, launcher, words):
    path = str(script(tmp_path, SUM))
    with network_hosts(2, own_name=own_name, other_network=other_network) as hosts:
        started = []
        for number, host in enumerate(hosts):
            environ = {**os.environ, "OMP_NUM_THREADS": "1", "PHOTINUS_HOST_ID": host.name}
            environ["TMPDIR"] = str(tmp_path)  # where torchrun leaves a folder
            environ.pop("GLOO_SOCKET_IFNAME", None)
            if launcher is not None:
                commands = [([*launcher, "--node-rank", str(number)], environ)]
            else:
                place = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "host-0", "MASTER_PORT": "29500"}
                ranks = [{"RANK": str(2 * number + local), "LOCAL_RANK": str(local)} for local in range(2)]
                commands = [([], {**environ, **place, **rank}) for rank in ranks]
            for flags, variables in commands:
                command = [sys.executable, *flags, path, *words]
                output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
                started.append(host.start(command, env=variables, **output))
        try:
            said = [process.communicate(timeout=DEADLINE_S)[0] for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
    assert [process.returncode for process in started] == [0] * len(started), "\n-----\n".join(said)
