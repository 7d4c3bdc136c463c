"""Run by test_device_scripts.py under a launcher: scripts as users write them for GPUs, over backend
"odyssey", with tensors on a device.

device_scripts.py DEVICE SCRIPT...

DEVICE is cpu, pretend or cuda, with a GPU for each rank. Each rank prints the hash of the weights for each script. On the pretended device, streams are
checked (pretend_streams.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import odyssey.torch  # noqa: F401  registers the backend

sys.path.append(str(Path(__file__).parents[1]))
from pytorch import pretend_pinned, pretend_streams

DEVICE = sys.argv[1]
FEATURES = 7
STEPS = 3


class Net(nn.Module):
    """Blocks of which a forward pass skips one, so its parameters have no gradient."""

    def __init__(self, skips: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(12, 3)
        self.skips = skips
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.first(x).relu()
        for number, block in enumerate(self.blocks):
            if not (self.skips and number == self.calls % 3):
                x = block(x)
        return self.last(x)


def make_net(skips: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(skips)


def draw_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns the batches of this rank, in memory of the host."""
    draw = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    x = torch.randn(STEPS, 8, FEATURES, generator=draw)
    return [(one, one[:, :3].argmax(1)) for one in x]


def digest(tensors: Any) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().cpu().numpy().tobytes())
    return total.hexdigest()[:16]


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x, y in draw_batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(DEVICE)), y.to(DEVICE)).backward()
        optimizer.step()


# --- the scripts ---


def train_ddp(skips: bool = False, **options: Any) -> str:
    model = DistributedDataParallel(make_net(skips).to(DEVICE), **options)
    train(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    return digest(model.parameters())


def ddp() -> str:
    return train_ddp()


def ddp_static_graph() -> str:
    return train_ddp(static_graph=True)


def ddp_unused() -> str:
    return train_ddp(skips=True, find_unused_parameters=True)


def ddp_accumulates() -> str:
    model = DistributedDataParallel(make_net().to(DEVICE), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, (x, y) in enumerate(draw_batches()):
        is_last = number == STEPS - 1
        with contextlib.nullcontext() if is_last else model.no_sync():
            F.cross_entropy(model(x.to(DEVICE)), y.to(DEVICE)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return digest(model.parameters())


def ddp_autocast() -> str:
    model = DistributedDataParallel(make_net().to(DEVICE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in draw_batches():
        optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x.to(DEVICE)), y.to(DEVICE))
        loss.backward()
        optimizer.step()
    return digest(model.parameters())


def train_fsdp(**options: Any) -> str:
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    model = make_net().to(DEVICE)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    train(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    return digest(parameter.full_tensor() for parameter in model.parameters())


def fsdp() -> str:
    return train_fsdp()


def fsdp_bf16() -> str:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return train_fsdp(mp_policy=policy, reshard_after_forward=False)


def accelerate() -> str:
    from accelerate import Accelerator, InitProcessGroupKwargs

    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="odyssey")])
    assert accelerator.device.type == DEVICE, accelerator.device
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    draw = torch.Generator().manual_seed(9)
    x = torch.randn(48, FEATURES, generator=draw)
    samples = torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))
    loader = torch.utils.data.DataLoader(samples, batch_size=4)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for x, y in loader:
        assert x.device.type == DEVICE
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    correct = accelerator.gather_for_metrics((model(x).argmax(1) == y).float())
    assert len(correct) == 4 * accelerator.num_processes
    return digest(accelerator.unwrap_model(model).parameters())


def lightning() -> str:
    import vision  # noqa: F401  Lightning's metrics import torchvision
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            x, y = batch
            assert x.device.type == DEVICE
            loss = F.cross_entropy(self.net(x), y)
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    draw = torch.Generator().manual_seed(9)
    x = torch.randn(48, FEATURES, generator=draw)
    samples = torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))
    module = Module()
    trainer = Trainer(
        accelerator=lightning_accelerator(),
        devices=dist.get_world_size(),
        strategy=DDPStrategy(process_group_backend="odyssey"),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(samples, batch_size=4))
    return digest(module.parameters())


SCRIPTS = {
    script.__name__: script
    for script in (
        ddp,
        ddp_static_graph,
        ddp_unused,
        ddp_accumulates,
        ddp_autocast,
        fsdp,
        fsdp_bf16,
        accelerate,
        lightning,
    )
}

# --- what Accelerate and Lightning ask CUDA for, from the pretended device ---


def lightning_accelerator() -> Any:
    """Returns what stands for accelerator="gpu" with the device of this program."""
    from lightning.pytorch.accelerators import CPUAccelerator

    class PretendAccelerator(CPUAccelerator):
        def setup_device(self, device: torch.device) -> None:
            assert device.type == DEVICE

        @staticmethod
        def get_parallel_devices(devices: int) -> list[torch.device]:
            return [torch.device(DEVICE, 0)] * devices

    by_name = {"cpu": "cpu", "cuda": "gpu"}
    return by_name.get(DEVICE) or PretendAccelerator()


@contextlib.contextmanager
def device_for_libraries() -> Iterator[None]:
    """Lets Accelerate and Lightning take the pretended device, as they take CUDA.

    Accelerate finds a device by its name. Lightning wraps a model on a stream of torch.cuda, for
    which the stream of the training doesn't wait. So here it wraps the model on that stream.
    """
    from accelerate.state import DistributedType, PartialState

    def choose_backend(self: Any, cpu: Any, sagemaker: Any, backend: str) -> tuple[str, Any]:
        is_cpu = DEVICE == "cpu"
        return backend, DistributedType.MULTI_CPU if is_cpu else DistributedType.MULTI_GPU

    with (
        mock.patch.object(PartialState, "_prepare_backend", choose_backend),
        mock.patch.object(torch.cuda, "Stream", contextlib.nullcontext),
        mock.patch.object(torch.cuda, "stream", contextlib.nullcontext),
        mock.patch.object(torch.get_device_module("pretend"), "device_count", dist.get_world_size),
    ):
        yield


def main() -> None:
    torch.set_num_threads(1)
    os.environ["ACCELERATE_TORCH_DEVICE"] = DEVICE
    with contextlib.ExitStack() as settings:
        if DEVICE == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            del os.environ["ACCELERATE_TORCH_DEVICE"]
        else:
            # PyTorch gives backward passes the stream of forward()
            pretend_streams.use(own_stream=False)
        dist.init_process_group("odyssey")
        if DEVICE != "cuda":
            settings.enter_context(device_for_libraries())
        if DEVICE == pretend_streams.pretend.NAME:
            settings.enter_context(pretend_pinned.offered())
        for name in sys.argv[2:]:
            # in one write, so that lines of ranks don't mix
            sys.stdout.write(f"script {name} {SCRIPTS[name]()}\n")
            sys.stdout.flush()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
