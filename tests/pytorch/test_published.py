"""Programs as other projects publish them, over backend odyssey: only imports, the backend's
name and paths changed.
"""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from pytorch.published import RUN, changed, mnist

needs = {
    name: pytest.mark.skipif(
        not all(importlib.util.find_spec(m) for m in ("torch", "torchvision", "PIL", name)),
        reason=f"torchvision or {name} is not installed (extra [published])",
    )
    for name in ("lightning", "timm", "keras")
}

WEIGHTS = """
import pathlib, timm, safetensors.torch
model = timm.create_model("resnet50d")
folder = pathlib.Path("hub") / f"models--{model.pretrained_cfg['hf_hub_id'].replace('/', '--')}"
for name in ("refs", "snapshots/0"):
    (folder / name).mkdir(parents=True)
(folder / "refs" / "main").write_text("0")
safetensors.torch.save_file(model.half().state_dict(), folder / "snapshots" / "0" / "model.safetensors")
"""


@pytest.mark.long
@needs["timm"]
def test_accelerates_cv_example(launch):
    """Its pictures, and random weights in the place of those that it would load from a hub."""
    from PIL import Image

    # Accelerate takes no other name than gloo on CPUs, but a group that is there
    start = '    torch.distributed.init_process_group("odyssey")\n    accelerator = Accelerator('
    example = changed(
        launch,
        "accelerate/cv_example.py",
        ("import torch\n", "import torch\nimport odyssey.torch\n"),
        ("    accelerator = Accelerator(", start),
    )
    (launch.folder / "weights.py").write_text(WEIGHTS)
    assert launch.python("-W", "ignore", RUN, "weights.py").returncode == 0
    (launch.folder / "pets").mkdir()
    for i in range(5):
        pixels = np.random.default_rng(i).integers(0, 256, (40, 40, 3), np.uint8)
        Image.fromarray(pixels).save(launch.folder / "pets" / f"{('cat', 'dog')[i % 2]}_{i}.jpg")
    launch.environment.update(
        HF_HUB_CACHE=str(launch.folder / "hub"), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1"
    )
    # under torchrun ranks are connected by Gloo: who waits leaves the cores to the workers that
    # load pictures
    torchrun = ("-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    done = launch.python(*torchrun, RUN, example, "--data_dir", "pets", "--cpu", timeout=600)
    (launch.folder / "hub").rename(launch.folder / "read")
    for path in (launch.folder / "read").rglob("*.safetensors"):
        path.unlink()  # 50 MB
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [
        "epoch 0",
        "epoch 1",
        "epoch 2",
    ]


@pytest.mark.long
@needs["lightning"]
def test_fabrics_image_classifier(launch):
    example = changed(
        launch,
        "lightning/train_fabric.py",
        (
            "from lightning.fabric import Fabric, seed_everything\n",
            "from lightning.fabric import Fabric, seed_everything\n"
            "from lightning.fabric.strategies import DDPStrategy\nimport odyssey.torch\n",
        ),
        (
            "fabric = Fabric()",
            'fabric = Fabric(strategy=DDPStrategy(process_group_backend="odyssey"))',
        ),
        ('path.join(path.dirname(__file__), "..", "..", "..", "Datasets")', '"data"'),
    )
    mnist(launch.folder / "data")
    # what `fabric run --accelerator=cpu --devices=2` sets
    launch.environment.update(
        LT_CLI_USED="1", LT_ACCELERATOR="cpu", LT_DEVICES="2", OMP_NUM_THREADS="1"
    )
    done = launch.python("-W", "ignore", RUN, example, "--epochs", 2, "--batch-size", 16, ranks=2)
    assert done.returncode == 0, done.stderr
    assert "distributed_backend=odyssey" in done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("Test set")]
    assert len(said) == 4 and len(set(said)) == 2, said  # two epochs, the same on both ranks


KERAS = """
import os
os.environ["KERAS_BACKEND"] = "torch"
import keras, numpy as np, torch
from odyssey.torch import DistributedTrainer

keras.utils.set_random_seed(0)
dropout = keras.layers.TorchModuleWrapper(torch.nn.Dropout(0.2))
layers = [keras.layers.Dense(16, activation="relu"), dropout, keras.layers.Dense(3)]
model = keras.Sequential([keras.Input((8,)), keras.layers.Rescaling(0.5), *layers])
g = np.random.default_rng(0)
x, y = torch.from_numpy(g.standard_normal((96, 8), np.float32)), torch.from_numpy(g.integers(0, 3, 96))
trainer = DistributedTrainer(model, torch.optim.Adam(model.parameters(), lr=1e-2), shard_size=8)
history = trainer.fit([(x[:48], y[:48]), (x[48:], y[48:])], epochs=3)
sha = trainer.weights_sha256()
if trainer.comm.rank == 0:
    print(sha, history.train_loss.hex(), float(np.sum(model.predict(x.numpy(), verbose=0))))
"""


@needs["keras"]
def test_a_keras_model_has_the_same_bits_on_any_ranks(launch):
    (launch.folder / "program.py").write_text(KERAS)
    done = [launch.python("-W", "ignore", "program.py", ranks=ranks) for ranks in (0, 2)]
    assert [d.returncode for d in done] == [0, 0], [d.stderr for d in done]
    assert len({d.stdout for d in done}) == 1 and len(done[0].stdout) > 64
