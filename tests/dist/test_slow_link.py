"""A training on three hosts (network namespaces), between two of which the network is slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from photinus.cli.main import main
from photinus.runlog.run import Run
from photinus.runlog.stragglers import slow_links, stragglers
from photinus.runlog.units import step_time
from tests.dist.test_run import script
from tests.faults.test_run_several_hosts import HostJob, assert_ended_well
from tests.netns import network_hosts

TRAIN = """
import sys, torch, photinus
from torch import nn
with photinus.init("photinus", "cpu", seed=1):
    plain = nn.Sequential(nn.Linear(16, 65_536), nn.ReLU(), nn.Linear(65_536, 4))
    model, optimizer = photinus.wrap(plain, torch.optim.SGD(plain.parameters(), lr=0.01))
    data = torch.utils.data.TensorDataset(torch.randn(240, 16), torch.randint(4, (240,)))
    options = {"report": QUIET, "save": photinus.Saving(every_epochs=9)}
    loop = photinus.Loop(model, optimizer, data, batch_size=6, epochs=1, out=sys.argv[1], **options)
    for inputs, targets in loop:
        loop.backward(nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize("slow", [True, False])
def test_the_link_between_two_hosts_is_named_and_no_rank_is(
    slow: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = script(tmp_path, TRAIN), tmp_path / "run"
    with network_hosts(3) as hosts:
        for here, there in ((1, 2), (2, 1)) * slow:
            hosts[here].slow_down_what_goes_to(hosts[there], "160mbit")
        flags = ["--nnodes", 3, "--master-addr", hosts[0].name, "--nproc-per-node", 1, "--cpu"]
        assert_ended_well(*[HostJob(host, tmp_path, [*flags, path, out]) for host in hosts])
    run = Run(out)
    run.refresh()
    assert any(peer >= 0 for window in run.windows for peer, _, _ in window.links)
    found = slow_links(run.windows, run.hosts)
    if not slow:
        assert found == [], [window.links for window in run.windows]
        return
    assert [link.ranks for link in found] == [(1, 2)], [window.links for window in run.windows]
    assert found[0].text(run.hosts, step_time(found[0].excess_s)).startswith("host host-1 ↔ host-2: ")
    assert stragglers(run.windows) == []
    assert main(["top", "--once", str(out)]) == 0
    assert "host host-1 ↔ host-2: " in capsys.readouterr().out
