"""Runs code blocks of the documents 001, 002 and 003, with what had to be changed in them:
run.py [DOCUMENT:BLOCK ...].

Prints of each its document and number, and the lines that were changed. The blocks stand in
tests/third_party/documents as they were found. Called alone and under mpirun by test_seeds.py.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
import types
from pathlib import Path
from typing import NamedTuple

DOCUMENTS = Path(__file__).parents[1] / "third_party" / "documents"


class Block(NamedTuple):
    """A block: texts that are changed in it; what the document has defined before it; what must
    hold behind it.

    refused: the error that it must end with instead, where the block cannot be done here. alone: it
    is of one process.
    """

    given: str
    changes: dict[str, str] = {}  # noqa: RUF012
    then: str = ""
    refused: str = ""
    alone: bool = False


TORCH = """
import torch
import torch.nn as nn
from odyssey import HorovodTrainer, PyTorchDDPTrainer
import odyssey.horovod.torch as hvd

torch.manual_seed(0)
MyModel = lambda: nn.Sequential(nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))
model = large_model = MyModel()
optimizer, loss_fn = torch.optim.SGD(model.parameters(), lr=0.01), nn.CrossEntropyLoss()
dataset = torch.utils.data.TensorDataset(torch.randn(64, 784), torch.arange(64) % 10)
train_loader = torch.utils.data.DataLoader(dataset, batch_size=16, shuffle=True)
val_loader = torch.utils.data.DataLoader(dataset, batch_size=16)
before = [p.detach().clone() for p in model.parameters()]
"""
MOVED = (
    "assert not torch.equal(before[0], model[0].weight) and torch.isfinite(model[0].weight).all()\n"
)
FITS = "assert trainer.fit(train_loader, val_loader, epochs=1).steps >= 1\n"
SEARCH = """
import sys, types
class Analysis:
    def __init__(self, best): self.best_config = best
def run(function, config, num_samples, resources_per_trial):  # for Ray Tune's, which waits for GPUs
    drawn = {name: draw() for name, draw in config.items()}
    assert 0 <= function(drawn)["accuracy"] <= 1
    return Analysis(drawn)
tune = types.SimpleNamespace(run=run, choice=lambda of: lambda: of[0], loguniform=lambda a, b: lambda: a)
sys.modules["ray.tune"] = tune
import ray
ray.tune = tune
accuracies = []
create_model = lambda hidden: nn.Sequential(nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 10))
"""
OURS = """
import numpy as np
from odyssey import Tensor, distributed, functional, nn, optim
from odyssey.distributed import *
destroy_process_group()
class Criterion:
    def __call__(self, output, targets): return functional.cross_entropy(output, targets)
criterion = Criterion()
MyModel = MyTransformerModel = lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
class Batch(Tensor): pass
g = np.random.default_rng(0)
targets = np.array([0, 1, 2, 0])
dataset = dataloader = micro_batches = [Tensor(g.standard_normal((4, 4)).astype(np.float32)) for _ in range(8)]
num_epochs = 2
"""
GROUP = OURS + "init_process_group()\nworld_size, rank = get_world_size(), get_rank()\n"
LOOP = (
    "model = DistributedDataParallel(MyModel())\noptimizer = optim.SGD(model.parameters(), "
    "lr=0.1)\n"
)
C10D = """
import torch, torch.nn as nn, time
import torch.distributed as dist
import odyssey.torch
if not dist.is_initialized():
    dist.init_process_group("odyssey")
"""
LOADS = "m = nn.Linear(4, 3)\n"
NEURAL = {"neural_arch.distributed": "odyssey.distributed"}
CPU = {".cuda()": ""}
FIVE = {"from distributed import": "from odyssey import"}

BLOCKS: dict[str, Block] = {
    "001:1": Block(TORCH, FIVE, MOVED),
    "001:2": Block(TORCH, FIVE, "assert history.steps >= 50 and " "history.records[0]['grad_norm'] " "> 0\n"),
    "001:3": Block(TORCH + "accuracy = 0.5\n", {**FIVE, "horovod.torch": "odyssey.horovod.torch"}, MOVED),
    "001:4": Block(TORCH + SEARCH, FIVE),
    "001:5": Block("import sys, types; sys.modules['tensorflow'] = " "types.ModuleType('tensorflow')\n", FIVE,
                   refused="there is no TensorFlowDistributedTrainer: .* KERAS_BACKEND=torch"),
    "001:6": Block("", FIVE, "assert config.workers(8) == 8 and " "len(config.fit_options()['callbacks']) == 2\n"),
    "001:7": Block(TORCH, {}, FITS + MOVED),
    "001:8": Block(TORCH, {}, FITS + MOVED),
    "001:9": Block(TORCH, {}, FITS + "assert trainer.strategy.compression == 'fp16'\n"),
    "001:10": Block(
        TORCH,
        {"from deepspeed import DeepSpeedConfig\n": "DeepSpeedConfig = dict\n"},
        refused="use zero_stage.*, 1 to 3",
    ),
    "001:11": Block(TORCH, {}, MOVED),
    "001:12": Block(TORCH, {}, "assert trainer.zero == 3\n" + FITS),
    "001:14": Block(TORCH, {}, FITS + "import os\nassert trainer.comm.rank " "or " "os.listdir('runs')\n"),
    "001:15": Block(TORCH + "samples_per_second = 1.0\n", {}, MOVED),
    "001:16": Block(TORCH + "trainer = PyTorchDDPTrainer(model)\n", {}, MOVED),
    "001:17": Block(TORCH, {}, "assert abs(trainer.rate - 0.001 * 8**0.5) < 1e-9\n" + FITS),
    "001:18": Block(TORCH + "from torch.optim.lr_scheduler import CosineAnnealingLR\n", {},
                    "trainer = PyTorchDDPTrainer(model, optimizer=optimizer, scheduler=scheduler, "
                    "scheduler_interval='epoch')\n" + FITS),
    "001:19": Block(TORCH, {}, FITS),
    "001:20": Block(TORCH, {}, FITS + "again = PyTorchDDPTrainer(model, " "checkpoint_dir='checkpoints')\n"
                    "assert len(again.fit(train_loader, epochs=2).records) == 2 and again.steps " "> trainer.steps\n"),
    "001:21": Block(TORCH + "num_gpus, rank, batch_size = 2, 0, 8\n", {},
                    "trainer = PyTorchDDPTrainer(model)\n" + FITS),
    "002:1": Block(C10D.replace("if not dist", "if 0 and not dist"),
                   {"backend='nccl'": "'odyssey'", "    torch.cuda.set_device(dist.get_rank())\n": "",
                    "DDP(model, device_ids=[rank])": "DDP(model)"},
                   "dist.is_initialized() or setup_distributed()\nm = nn.Linear(4, 3)\n"
                   "t = DistributedTrainer(m, torch.optim.SGD(m.parameters(), 0.1), 2, " "dist.get_rank())\n"
                   "assert t.train_step(torch.ones(2, 4), torch.tensor([0, 1])) > 0\n"),
    "002:2": Block("", {"horovod.torch": "odyssey.horovod.torch", "    torch.cuda.set_device(hvd.local_rank())\n": ""},
                   "setup_horovod()\nm = nn.Linear(4, 3)\nt = HorovodTrainer(m, " "torch.optim.SGD(m.parameters(), " "0.1))\n"
                   "assert t.train_step(torch.ones(2, 4), torch.tensor([0, 1])) > 0\n"),
    "002:4": Block(C10D, CPU, "t = allreduce_example(); assert len(allgather_example()) == " "dist.get_world_size()\n"
                              "assert broadcast_example().shape == t.shape\n"),
    "002:7": Block(C10D + LOADS, {}, "t = OverlappedTrainer(m, " "torch.optim.SGD(m.parameters(), " "0.1), 2)\n"
                                      "t.train_step_overlapped(torch.ones(2, " "4), " "torch.tensor([0, " "1]))\n"),
    "002:8": Block(C10D, {}, "class T:\n    def train_step(self, x, y): return 1.0\n"
                             "PerformanceMonitor().monitor_training(T(), [(1, 2)] * 3)\n"),
    "002:9": Block(C10D, {**CPU, "        torch.cuda.synchronize()\n": ""}, "profile_communication()\n"),
    "003:1": Block(OURS, {**NEURAL, '"gloo")  #': '"auto")  #', "DistributedDataParallel(model)\n":
                   "DistributedDataParallel(model)\noptimizer = optim.SGD(model.parameters(), " "lr=0.1)\n"},
                   "assert ddp_model.reductions >= 8\n"),
    "003:4": Block(GROUP, NEURAL, "assert len(list(sampler)) >= 8 // world_size\n"),
    "003:6": Block(OURS, {**NEURAL, 'backend="gloo"': "", "DistributedDataParallel(model)\n":
                          "DistributedDataParallel(model)\n    optimizer = " "optim.SGD(model.parameters(), " "lr=0.1)\n"}),
    "003:7": Block(OURS, {**NEURAL, "neural_arch.core.tensor": "odyssey", 'backend="gloo"': ""},
                   "assert len(gathered) == world_size and scattered.shape == (2, 3)\n"),
    "003:8": Block(GROUP + LOOP, NEURAL, "assert model.reductions >= 1\n"),
    "003:9": Block("from pathlib import Path; Path('train.py').write_text('import " "odyssey')\n", NEURAL,
                   "assert exit_code == 0\n", alone=True),
    "003:10": Block(GROUP, {}, "assert per_process_batch_size == 32 // world_size\n"),
    "003:11": Block(GROUP + "model = MyModel()\n", {}, "assert ddp_model.module is model\n"),
    "003:12": Block(GROUP, {**NEURAL, "neural_arch.core.tensor": "odyssey"},
                    "assert info['world_size'] == world_size\n"),
    "003:13": Block(GROUP + LOOP, {}, "assert model.reductions >= 8\n"),
    "003:14": Block("", NEURAL, "assert TensorParallel(2).tp == 2\n"),
    "003:16": Block(OURS, {**NEURAL, "neural_arch.core.tensor": "odyssey"}, alone=True),
    "003:17": Block(GROUP, {}, "assert rank == get_rank()\n"),
}  # fmt: skip


def blocks(document: str) -> dict[str, str]:
    """The blocks of a document by "DOCUMENT:NUMBER"."""
    found = re.findall(
        r"^## (\d+)\n\n```python\n(.*?)^```",
        (DOCUMENTS / f"{document}.md").read_text(),
        re.S | re.M,
    )
    return {f"{document}:{number}": text for number, text in found}


def changed(text: str, changes: dict[str, str]) -> tuple[str, int]:
    """A block with its changes, and how many of its lines these are."""
    made = text
    for old, new in changes.items():
        assert old in made, old
        made = made.replace(old, new)
    codes = difflib.SequenceMatcher(
        a=text.splitlines(), b=made.splitlines(), autojunk=False
    ).get_opcodes()
    return made, sum(max(b - a, d - c) for kind, a, b, c, d in codes if kind != "equal")


def run(name: str, text: str, folder: Path) -> int:
    """Runs a block in a directory of its own; the number of its lines that were changed."""
    block = BLOCKS[name]
    made, lines = changed(text, block.changes)
    here = folder / name.replace(":", "-")
    here.mkdir(parents=True, exist_ok=True)
    os.chdir(here)
    module = types.ModuleType("__main__" if '__name__ == "__main__"' in text else "block")
    sys.modules["block"] = module
    error = ""
    try:
        exec(compile(block.given, f"before {name}", "exec"), module.__dict__)
        exec(compile(made, name, "exec"), module.__dict__)
        exec(compile(block.then, f"behind {name}", "exec"), module.__dict__)
    except Exception as problem:
        if not block.refused:
            raise
        error = str(problem)
    # MLflow asks a TensorFlow that is imported for its Tensor
    for stand_in in ("tensorflow", "ray.tune"):
        sys.modules.pop(stand_in, None)
    assert re.search(block.refused, error), error
    return lines


def ranks() -> int:
    """Ranks that run this."""
    from odyssey import comm

    return comm.world().size


def main() -> None:
    given = sys.argv[1:]
    folder = Path.cwd()
    known = {
        name: text for document in ("001", "002", "003") for name, text in blocks(document).items()
    }
    alone = ranks() == 1
    for name in given or [name for name, block in BLOCKS.items() if alone or not block.alone]:
        print(json.dumps([name, run(name, known[name], folder)]), flush=True)


if __name__ == "__main__":
    main()
