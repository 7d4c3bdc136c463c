"""Trains published models on a device and on the CPU: models_on_device.py DEVICE NAME...

All ranks of a group run it. Rank 0 trains a model of published_models.py alone on the CPU, then 1,
2, ... ranks train it on the device. Rank 0 prints a line for each model: "same", or what differs.
Models of `DIFFER_FROM_CPU` are compared with rank 0 alone on the device.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import published_models
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from odyssey import comm as communication
from odyssey.torch import DistributedTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "layouts"))

import cases  # noqa: E402

STEPS = 2
#: Models for which PyTorch computes something else on the CPU than on any other device.
DIFFER_FROM_CPU = {
    "lraspp": "with deterministic algorithms, devices interpolate by another formula",
    "wav2vec2": "layers are dropped by the CPU's generator, and dropout is drawn from the device's",
}


def train(comm: communication.Communicator, name: str, device: str) -> dict[str, np.ndarray]:
    """Returns everything that a user may look at after a few steps of a model on a device."""
    module, batch, loss = published_models.build(name)
    module.to(device)
    trainer = DistributedTrainer(
        module,
        torch.optim.AdamW(module.parameters(), lr=1e-3),
        loss,
        shard_size=2,
        clip_norm=1.0,
        comm=comm,
        progress=cases.Quiet(),
    )
    # PyTorch has fused attention for CPUs and GPUs only
    with sdpa_kernel(SDPBackend.MATH):
        history = trainer.fit([batch] * STEPS)
        evaluation = trainer.evaluate([batch])
    return {
        **dict(sorted(trainer.named_state().items())),
        "loss": np.array([history.train_loss]),
        "norm": np.array([trainer.gradient_norm()]),
        "fingerprints": np.array(trainer.fingerprints()),
        "evaluation": np.array([evaluation.loss]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device")
    parser.add_argument("names", nargs="+", choices=published_models.MODELS)
    given = parser.parse_args()
    if given.device == "pretend":
        import pretend  # noqa: F401
    team = cases.Processes(communication.world("auto"))
    for name in given.names:
        where = given.device if name in DIFFER_FROM_CPU else "cpu"
        expected = team.alone(lambda comm, name=name, where=where: train(comm, name, where))
        for ranks in range(1, team.world.size + 1):
            found = team.run(ranks, lambda comm, name=name: train(comm, name, given.device))
            if team.leads:
                outcome = cases.judged(expected, found)
                print(f"{name}, {ranks} ranks: {outcome.kind} {outcome.text}".strip(), flush=True)
        team.meet()


if __name__ == "__main__":
    main()
