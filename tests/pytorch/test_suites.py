"""Other projects' own tests over odyssey: PyTorch's, Horovod's, Accelerate's; which of them
fail, and why.

What is not listed passes or is skipped by the test itself. A listed one that passes fails here as
well.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None, reason="torch is not installed (extra [torch])"
    ),
]

PYTORCH = {
    "test_monitored_barrier_gloo": "torch refuses monitored_barrier for all back ends but Gloo's",
    "test_monitored_barrier_gloo_subgroup": "the same",
    "test_monitored_barrier_gloo_rank_0_timeout": "the same",
}

BY_ORDER = (
    "calls are matched by their order, not by names: no name is there twice, and who "
    "makes one call more is named"
)
JOINED = "what a joined rank cannot take part in is an error on all ranks, not on the caller alone"
HOROVOD = {
    "test_horovod_allgather_duplicate_name_error": BY_ORDER,
    "test_horovod_allreduce_duplicate_name_error": BY_ORDER,
    "test_horovod_broadcast_duplicate_name_error": BY_ORDER,
    "test_horovod_reducescatter_duplicate_name_error": BY_ORDER,
    "test_horovod_join_allgather": JOINED,
    "test_horovod_join_broadcast": JOINED,
    "test_horovod_allgather_async_fused": "allgather_async has gathered when it returns, as "
    "ranks may have any rows",
    "test_horovod_reducescatter_adasum": "Adasum is refused, with a ValueError where this test "
    "wants a RuntimeError",
    "test_broadcast_state_no_grad": "broadcast_optimizer_state makes no gradients; Horovod takes "
    "a step of zeros",
    "test_optimizer_no_named_parameters": "it reads Horovod's private _parameter_names",
    "test_sparse_embeddings": "its second part gives dense gradients to SparseAdam, which torch "
    "refuses by now",
}

ACCELERATE = {
    "test_sync": "",
    "test_ops": "",
    "test_script": "",
    "test_distributed_data_loop": "must make the same calls in the same order",
    "test_ddp_comm_hook": "device_ids and output_device arguments only work with",
    "test_merge_weights": "KeyError: None",
}


def outcomes(launch, *program: object) -> dict[str, tuple[str, str]]:
    done = launch.python("-W", "ignore", *program, timeout=3000)
    lines = [line.split(" ", 2) for line in done.stdout.splitlines() if line.startswith("test_")]
    assert lines, done.stderr
    return {name: (outcome, why) for name, outcome, why in ((*line, "")[:3] for line in lines)}


def compared(found: dict[str, tuple[str, str]], expected: dict[str, str]) -> Counter[str]:
    """How many passed, failed and were skipped. Fails: others failed than those expected to."""
    failed = {name: why for name, (outcome, why) in found.items() if outcome == "failed"}
    assert not {name: why for name, why in failed.items() if name not in expected}
    assert not [name for name in expected if name not in failed], (
        "they pass now: take them off the list"
    )
    counts = Counter(outcome for outcome, _ in found.values())
    print(dict(counts))
    return counts


def test_torchs_tests_of_collectives_and_ddp(launch):
    suite = HERE / "torchs_suite.py"
    found = outcomes(launch, suite, "odyssey")
    assert len(found) > 250
    for_gloo = [
        name
        for name, (outcome, why) in found.items()
        if outcome == "skipped" and "gloo" in why.lower()
    ]
    counts = compared({**found, **outcomes(launch, suite, "alias", *for_gloo)}, PYTORCH)
    assert counts["passed"] + counts["failed"] >= 90


def test_horovods_tests(launch):
    launch.environment["ODYSSEY_TIMEOUT"] = "60"
    counts = compared(outcomes(launch, HERE / "horovods_suite.py"), HOROVOD)
    assert counts["passed"] + counts["failed"] >= 103


@pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed"
)
@pytest.mark.parametrize("script", ACCELERATE)
def test_accelerates_scripts(launch, script):
    """Three of them fail on CPUs whatever the back end is: one joins uneven inputs, which
    Accelerate does on GPUs alone (Gloo's ranks then wait for each other until torch's
    timeout), one gives DDP the number of a GPU, one wants FSDP's settings from a
    configuration.
    """
    torchrun = ("-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    done = launch.python(*torchrun, HERE / "accelerates_suite.py", "odyssey", script, timeout=900)
    if ACCELERATE[script]:
        assert done.returncode and ACCELERATE[script] in done.stderr, done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(f"completed {script}") == 2
