"""odyssey.torch.DistributedDataParallel, DataLoader: the same bits on any number of ranks; wrong
loops are refused.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed (extra [torch])"
)


def test_loops_have_the_same_bits_on_any_number_of_ranks(launch):
    hashes = set()
    for ranks in (0, 3):
        done = launch.python("-W", "ignore", HERE / "own_loop.py", ranks=ranks)
        assert done.returncode == 0, done.stderr
        hashes |= set(done.stdout.splitlines())
    assert len(hashes) == 1 and len(hashes.pop().split()) == 6


def test_a_gan_as_documented_has_the_same_bits_on_any_number_of_ranks(launch):
    """The block of docs/pytorch.md, two optimizers over one net, as it is written there."""
    text = (HERE.parents[1] / "docs" / "pytorch.md").read_text()
    (code,) = (
        block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "of_G = " in block
    )
    ends = (
        "\nimport hashlib\n"
        "state = [*net.state_dict().values(), *(s['exp_avg'] for o in (of_G, of_D) for s in "
        "o.state.values())]\n"
        "print(len(state), hashlib.sha256(b''.join(t.numpy().tobytes() for t in "
        "state)).hexdigest())\n"
    )
    hashes = set()
    for ranks in (0, 2, 4):
        done = launch.python("-W", "ignore", "-c", code + ends, ranks=ranks)
        assert done.returncode == 0, done.stderr
        hashes |= {line for line in done.stdout.splitlines() if line}
    assert len(hashes) == 1 and hashes.pop().startswith("30 "), hashes


@pytest.fixture
def net():
    import torch

    from odyssey.torch import DistributedDataParallel

    return DistributedDataParallel(torch.nn.Linear(4, 2), shard_size=2)


@pytest.fixture
def batch():
    import torch

    return (torch.ones(5, 4),)


def test_a_step_inside_the_loop(net, batch):
    import torch

    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pytest.raises(
        Exception, match=r"optimizer.step\(\) before the loop over shards\(\) has ended"
    ):
        for (x,) in net.shards(batch):
            net(x).sum().backward()
            optimizer.step()
    with pytest.raises(Exception, match="step after it"):  # the loop did not end
        optimizer.step()
    for (x,) in net.shards(batch):
        net(x).sum().backward()
    torch.optim.SGD(torch.nn.Linear(1, 1).parameters()).step()
    optimizer.step()


@pytest.mark.parametrize("none", [True, False])
def test_zero_grad_inside_the_loop(net, batch, none):
    import torch

    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pytest.raises(
        Exception, match=r"call zero_grad\(\) before the loop over shards, clip and step after it"
    ):
        for (x,) in net.shards(batch):
            net(x).sum().backward()
            optimizer.zero_grad(set_to_none=none)


def test_clipping_inside_the_loop(net, batch):
    import torch

    with pytest.raises(Exception, match="clip and step after it"):
        for (x,) in net.shards(batch):
            net(x).sum().backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)


@pytest.mark.parametrize("is_reached", [True, False])
def test_a_write_into_one_gradient_inside_the_loop(batch, is_reached):
    import torch

    from odyssey.torch import DistributedDataParallel

    module = torch.nn.ModuleList([torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)])
    net = DistributedDataParallel(module, shard_size=2)
    with pytest.raises(Exception, match=r"the gradient of [01].bias was changed while a shard"):
        for (x,) in net.shards(batch):
            module[0](x).sum().backward()
            module[0 if is_reached else 1].bias.grad[0] = 0


def test_several_backward_passes_and_hooks_of_the_users_own(batch):
    """Hooks that are older than the net change a gradient before the net sees it."""
    import torch

    from odyssey.torch import DistributedDataParallel

    def clamp(parameter: torch.Tensor) -> None:
        parameter.grad.clamp_(max=0.5)

    gradients = []
    for passes in (1, 2):
        torch.manual_seed(0)
        module = torch.nn.Linear(4, 2)
        module.weight.register_post_accumulate_grad_hook(clamp)
        net = DistributedDataParallel(module, shard_size=2)
        for (x,) in net.shards(batch):
            for _ in range(passes):
                (net(x).sum() / passes).backward()
        gradients.append(module.bias.grad.clone())
        assert float(module.weight.grad.max()) == 0.5
    assert torch.equal(*gradients)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_backward_of_one_parameter_outside(net, name):
    with pytest.raises(Exception, match=r"backward\(\) outside of shards\(\)"):
        getattr(net.module, name).square().sum().backward()


def test_backward_outside_and_missing(net, batch):
    with pytest.raises(Exception, match=r"backward\(\) outside of shards\(\)"):
        net(batch[0]).sum().backward()
    with pytest.raises(Exception, match=r"a shard without backward\(\)"):
        for (x,) in net.shards(batch):
            net(x)
    with pytest.raises(Exception, match=r"shards\(\) inside a loop over shards\(\)"):
        for _ in net.shards(batch):
            for (x,) in net.shards(batch):
                net(x).sum().backward()


def test_what_is_refused(net):
    import torch

    from odyssey.errors import ConfigError
    from odyssey.torch import DataLoader, DistributedDataParallel

    with pytest.raises(ConfigError, match="weight is float64 on cpu; float32 is allowed"):
        DistributedDataParallel(torch.nn.Linear(2, 2).double())
    with pytest.raises(ConfigError, match="ReLU has no parameter that requires a gradient"):
        DistributedDataParallel(torch.nn.ReLU())
    with pytest.raises(ConfigError, match=r"DataLoader\(sampler=...\)"):
        DataLoader([1, 2], 2, sampler=[0, 1])
    data = torch.utils.data.TensorDataset(torch.ones(8, 4))
    with pytest.raises(ConfigError, match="the DataLoader's shard_size is 4, and .* is 2"):
        next(net.shards(next(iter(DataLoader(data, 8, shard_size=4)))))
    with pytest.raises(ConfigError, match="a batch without samples"):
        next(net.shards((1,)))


@pytest.mark.parametrize("learns", [True, False])
def test_another_net_within_the_loop(net, batch, learns):
    """Its gradients and running statistics would be those of this rank's shards."""
    import torch

    from odyssey.torch import DistributedDataParallel

    other = DistributedDataParallel(torch.nn.BatchNorm1d(2)).requires_grad_(learns)
    says = (
        "reaches the parameters of another: set requires_grad_"
        if learns
        else "move the running statistics of another"
    )
    with pytest.raises(Exception, match=says):
        for (x,) in net.shards(batch):
            other(net(x[:1].repeat(2, 1))).sum().backward()


def test_a_module_that_was_moved_and_a_batch_in_a_plain_loop(net, batch):
    import torch

    from odyssey.torch import DataLoader, DistributedDataParallel

    later = DistributedDataParallel(net.module, shard_size=2)
    with pytest.raises(Exception, match="weight is not where it was"):
        next(net.shards(batch))
    later.double()
    with pytest.raises(Exception, match="weight is not where it was"):
        next(later.shards(batch))
    with pytest.raises(Exception, match=r"`for x, y in net.shards\(batch\)`"):
        for _, _ in DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 4)), batch_size=2):
            pass


def test_ranks_with_other_modules_are_told(launch):
    code = "import torch, odyssey.torch\nfrom odyssey import comm\nn = 2 + comm.world().rank\n"
    done = launch.python(
        "-c", code + "odyssey.torch.DistributedDataParallel(torch.nn.Linear(n, 1))", ranks=2
    )
    assert done.returncode == 64
    assert "the parameters of rank 1 differs from that of rank 0" in done.stderr


def test_a_batch_of_what_is_not_cut_is_refused(net):
    import numpy as np
    import torch

    with pytest.raises(Exception, match="a batch with a ndarray, which is not cut; give tensors"):
        next(net.shards((torch.ones(5, 4), np.ones(5))))


MEAN = """
import torch, odyssey.torch
torch.manual_seed(0)
x = torch.randn(21, 4)
net = odyssey.torch.DistributedDataParallel(torch.nn.Linear(4, 2), shard_size=4)
whole = net.module(x).square().mean().item()
for batch in (x, x[:3]):  # of six shards and of one
    losses = []
    for (part,) in net.shards((batch,)):
        loss = net(part).square().mean()
        loss.backward()
        losses.append((loss, len(part)))
    print(repr(net.mean(losses)), whole, net.mean([]))
"""


def test_the_mean_of_a_loss_is_the_same_on_any_number_of_ranks(launch):
    lines = set()
    for ranks in (0, 2, 5):
        done = launch.python("-c", MEAN, ranks=ranks)
        assert done.returncode == 0 and not done.stderr, done.stderr
        lines |= {line for line in done.stdout.splitlines() if line}
    assert len(lines) == 2
    found = [[float(word) for word in line.split()] for line in lines]
    assert min(abs(mean / whole - 1) for mean, whole, _ in found) < 1e-5 and all(
        none != none for *_, none in found
    )
