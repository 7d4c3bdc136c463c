"""Jobs, hosts and a SLURM of the test beds."""

from __future__ import annotations

import pytest

from beds import faults, netns
from beds import slurm as slurms


@pytest.fixture
def job(tmp_path):
    """Starts jobs in a folder of the test, and ends what is left of them: job(command, ...) as
    faults.Job.
    """
    started = []

    def start(command, **settings):
        started.append(faults.Job(command, tmp_path, **settings))
        return started[-1]

    yield start
    for one in started:
        one.end()


@pytest.fixture(scope="module")
def hosts_of_module(tmp_path_factory):
    if why := netns.why_not():
        pytest.skip(why)
    with netns.Hosts(4, tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


@pytest.fixture
def four_hosts(hosts_of_module):
    """netns.Hosts(4), whole at the start of each test; its jobs are ended after it."""
    yield hosts_of_module
    hosts_of_module.restore()


@pytest.fixture(scope="module")
def slurm_of_module(tmp_path_factory):
    if why := slurms.why_not():
        pytest.skip(why)
    with netns.Hosts(4, tmp_path_factory.mktemp("slurm")) as hosts, slurms.Slurm(hosts) as slurm:
        yield slurm


@pytest.fixture
def slurm(slurm_of_module):
    """slurm.Slurm on four idle nodes; its jobs are ended after each test."""
    yield slurm_of_module
    slurm_of_module.restore()
