"""Other programs' ways to keep a checkpoint, each as its documentation shows it, behind the same
three functions.

A saver has one folder. `save(step, state)` returns when the checkpoint is there by that program's
own word; `load()` gives the newest one. PyTorch's formats are pickles, which is why they may stand
in this folder alone: the files that are read here were written here. What it is not: a comparison
of speeds.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import warnings
from pathlib import Path

import numpy as np

State = dict[str, np.ndarray]


class Saver:
    """needs: the module without which it cannot be had. in_place: a save overwrites the only
    checkpoint.
    """

    needs = "torch"
    in_place = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, step: int, state: State) -> None:
        raise NotImplementedError

    def load(self) -> tuple[int, State]:
        raise NotImplementedError

    def close(self) -> None:
        pass

    @classmethod
    def available(cls) -> bool:
        return importlib.util.find_spec(cls.needs) is not None

    @classmethod
    def prepare(cls) -> None:
        """Imports what it needs, before processes are forked."""
        import torch

        torch.set_num_threads(1)


def _tensors(state: State) -> dict:
    import torch

    return {name: torch.from_numpy(array) for name, array in state.items()}


class TorchSave(Saver):
    """torch.save to the same path."""

    def save(self, step: int, state: State) -> None:
        import torch

        torch.save({"step": step, "model": _tensors(state)}, self.folder / "checkpoint.pt")

    def load(self) -> tuple[int, State]:
        import torch

        found = torch.load(self.folder / "checkpoint.pt", weights_only=True)
        return found["step"], {name: tensor.numpy() for name, tensor in found["model"].items()}


class TorchSaveReplace(TorchSave):
    """torch.save to a file aside, fsync, os.replace."""

    in_place = False

    def save(self, step: int, state: State) -> None:
        import torch

        aside = self.folder / "checkpoint.tmp"
        with open(aside, "wb") as file:
            torch.save({"step": step, "model": _tensors(state)}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, self.folder / "checkpoint.pt")


class Dcp(Saver):
    """torch.distributed.checkpoint, always to the same checkpoint_id."""

    @classmethod
    def prepare(cls) -> None:
        super().prepare()
        import torch.distributed.checkpoint  # noqa: F401

    def place(self, step: int) -> Path:
        return self.folder / "checkpoint"

    def save(self, step: int, state: State) -> None:
        import torch
        import torch.distributed.checkpoint as dcp

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "no process group": meant so
            dcp.save(
                {"step": torch.tensor(step), "model": _tensors(state)},
                checkpoint_id=self.place(step),
            )

    def load(self) -> tuple[int, State]:
        return self._load(self.place(0))

    def _load(self, path: Path) -> tuple[int, State]:
        import torch
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint import FileSystemReader

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            known = FileSystemReader(path).read_metadata().state_dict_metadata
            names = [name.removeprefix("model.") for name in known if name.startswith("model.")]
            model = {n: torch.zeros(known[f"model.{n}"].size, dtype=torch.float32) for n in names}
            state = {"step": torch.tensor(0), "model": model}
            dcp.load(state, checkpoint_id=path)
        return int(state["step"]), {name: tensor.numpy() for name, tensor in model.items()}


class DcpPerStep(Dcp):
    """torch.distributed.checkpoint, a directory for each step; the newest with metadata counts,
    two are kept.
    """

    in_place = False

    def place(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _steps(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("step-*") if (path / ".metadata").is_file())

    def save(self, step: int, state: State) -> None:
        super().save(step, state)
        for old in self._steps()[:-2]:
            shutil.rmtree(old)

    def load(self) -> tuple[int, State]:
        return self._load(self._steps()[-1])


class Safetensors(Saver):
    """safetensors.numpy.save_file to the same path."""

    needs = "safetensors"

    @classmethod
    def prepare(cls) -> None:
        import safetensors.numpy  # noqa: F401

    def save(self, step: int, state: State) -> None:
        from safetensors.numpy import save_file

        save_file(state, self.folder / "checkpoint.safetensors", metadata={"step": str(step)})

    def load(self) -> tuple[int, State]:
        from safetensors import safe_open

        with safe_open(self.folder / "checkpoint.safetensors", framework="numpy") as file:
            return int(file.metadata()["step"]), {
                name: file.get_tensor(name) for name in file.keys()
            }


class OrbaxForce(Saver):
    """orbax StandardCheckpointer, always to the same path, force=True."""

    needs = "orbax.checkpoint"

    @classmethod
    def available(cls) -> bool:
        return (
            importlib.util.find_spec("orbax") is not None
            and importlib.util.find_spec("jax") is not None
        )

    @classmethod
    def prepare(cls) -> None:
        import orbax.checkpoint  # noqa: F401

    def save(self, step: int, state: State) -> None:
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(
                self.folder / "checkpoint", {"step": np.array(step), "model": state}, force=True
            )

    def load(self) -> tuple[int, State]:
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer() as checkpointer:
            found = checkpointer.restore(self.folder / "checkpoint")
        return int(found["step"]), {
            name: np.asarray(array) for name, array in found["model"].items()
        }


class OrbaxManager(OrbaxForce):
    """orbax CheckpointManager, max_to_keep=2."""

    in_place = False

    def __init__(self, folder: Path) -> None:
        import orbax.checkpoint as ocp

        super().__init__(folder)
        settings = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self.manager = ocp.CheckpointManager(folder, options=settings)

    def save(self, step: int, state: State) -> None:
        import orbax.checkpoint as ocp

        self.manager.save(
            step, args=ocp.args.StandardSave({"step": np.array(step), "model": state})
        )

    def load(self) -> tuple[int, State]:
        import orbax.checkpoint as ocp

        found = self.manager.restore(self.manager.latest_step(), args=ocp.args.StandardRestore())
        return int(found["step"]), {
            name: np.asarray(array) for name, array in found["model"].items()
        }

    def close(self) -> None:
        self.manager.close()


SAVERS: dict[str, type[Saver]] = {
    "torch.save, same path": TorchSave,
    "torch.save, fsync, os.replace": TorchSaveReplace,
    "DCP, same checkpoint_id": Dcp,
    "DCP, directory per step": DcpPerStep,
    "safetensors save_file, same path": Safetensors,
    "orbax StandardCheckpointer, force=True": OrbaxForce,
    "orbax CheckpointManager": OrbaxManager,
}
