"""The baseline of time_to_accuracy.py: LeNet-5 on MNIST with PyTorch's DistributedDataParallel
over Gloo.

The same recipe as `odyssey train`: initial weights and order of the samples (of one seed), batch,
SGD with momentum and weight decay, learning rates of the same schedule, normalisation, and an
evaluation after each epoch that the processes share. So both reach about the same accuracies and
differ in time. The training set lies in memory as normalised float32 tensors and the orders are
computed beforehand, so no time goes into a data loader; that is in PyTorch's favour. Started
without RANK in the environment it starts its own processes. Not meant for anything but comparing.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import common
import nets


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2, help="processes, one thread each")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the training set")
    parser.add_argument(
        "--global-batch-size", type=int, default=128, help="samples of a step, over all processes"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and order")
    parser.add_argument(
        "--tuned", action="store_true", help="channels-last memory format and fused optimizer"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    return parser.parse_args()


def launch(processes: int) -> int:
    """Starts this script once per rank; returns the first exit code that is not 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(processes),
        "OMP_NUM_THREADS": "1",
    }
    children = [
        subprocess.Popen(
            [sys.executable, *sys.argv], env={**os.environ, **shared, "RANK": str(rank)}
        )
        for rank in range(processes)
    ]
    try:
        codes = [one.wait() for one in children]
    finally:
        for one in children:
            if one.poll() is None:
                one.kill()
    return next((code for code in codes if code), 0)


def tensors(train: bool) -> tuple[Any, Any]:
    """All images as float32, normalised as odyssey does it, and all labels."""
    import numpy as np
    import torch

    from odyssey import data

    dataset = data.load("mnist", train=train)
    x, y = dataset.gather(np.arange(len(dataset)))
    return torch.from_numpy(x), torch.from_numpy(y).long()


def main() -> int:
    wanted = options()
    if "RANK" not in os.environ:
        common.print_machine()
        return launch(wanted.processes)

    import torch
    import torch.distributed as dist

    from odyssey.data.sampler import permutation
    from odyssey.nn.models import build
    from odyssey.optim import schedule
    from odyssey.settings.recipes import RECIPES

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    recipe = RECIPES["lenet5"]
    layout = torch.channels_last if wanted.tuned else torch.contiguous_format
    inner = nets.torch_model("lenet5")
    initial = build("lenet5", seed=wanted.seed).state_dict()
    inner.load_state_dict({key: torch.from_numpy(value) for key, value in initial.items()})
    inner = inner.to(memory_format=layout)
    net = torch.nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(
        net.parameters(),
        lr=recipe["lr"],
        momentum=recipe["momentum"],
        weight_decay=recipe["weight_decay"],
        fused=wanted.tuned,
    )
    images, labels = tensors(train=True)
    test_images, test_labels = tensors(train=False)
    mine = slice(rank * len(test_images) // size, (rank + 1) * len(test_images) // size)
    batch = wanted.global_batch_size
    total = wanted.epochs * -(-len(images) // batch)
    factor = schedule(
        recipe["schedule"], total_steps=total, warmup_steps=min(recipe["warmup_steps"], total // 5)
    )
    orders = [
        torch.from_numpy(permutation(len(images), wanted.seed, epoch).copy())
        for epoch in range(wanted.epochs)
    ]
    history: list[dict[str, float]] = []
    step = 0
    for epoch in range(wanted.epochs):
        dist.barrier()
        start = time.perf_counter()
        loss_sum = 0.0
        for at in range(0, len(images), batch):
            whole = orders[epoch][at : at + batch]
            part = whole[rank * len(whole) // size : (rank + 1) * len(whole) // size]
            for group in optimizer.param_groups:
                group["lr"] = recipe["lr"] * factor(step)
            optimizer.zero_grad()
            loss = inner.loss(net(images[part].to(memory_format=layout)), labels[part])
            loss.backward()
            optimizer.step()
            loss_sum += loss.item() * len(part)
            step += 1
        seconds = time.perf_counter() - start
        with torch.no_grad():
            right = sum(
                (inner(x.to(memory_format=layout)).argmax(1) == y).sum()
                for x, y in zip(
                    test_images[mine].split(1024), test_labels[mine].split(1024), strict=True
                )
            )
        dist.all_reduce(right)
        record = {
            "epoch": epoch + 1,
            "seconds": seconds,
            "test_accuracy": right.item() / len(test_images),
        }
        history.append({**record, "train_loss_of_rank": loss_sum / (len(images) / size)})
        if rank == 0:
            print(
                f"epoch {epoch + 1}: {seconds:.2f} s, test accuracy "
                f"{100 * record['test_accuracy']:.2f} %",
                flush=True,
            )
    if rank == 0 and wanted.json is not None:
        content = {
            "history": history,
            "test_accuracy": history[-1]["test_accuracy"],
            "torch": torch.__version__,
        }
        wanted.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    dist.barrier()
    sys.stdout.flush()
    # Gloo's threads may end a process that leaves in order: "terminate called without an active
    # exception"
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
