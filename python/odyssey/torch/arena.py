"""A module's parameters, gradients and buffers in memory that torch, NumPy and the reductions see.

Parameters become views of one array, with their strides (channels-last stays what it is), the
trained ones first, so that gradients are an array of the same layout. Running statistics of
normalisations become views of another (norms.py). What shares memory with parameters moves with
them.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection

import torch
from torch import nn

from ..comm import Communicator
from ..errors import ConfigError
from .device import Device, on_host
from .memory import aligned_sizes, of_parameters, view
from .norms import Norms


class ModuleArena:
    """The memory of a module; its parameters and running statistics are moved here, their values
    stay.

    named: parameters by name, each once, those that are trained first. trained: how many these are.
    device: where they are. size: floats of their gradients. params: all parameters, a flat float32
    tensor; extent: floats of them,
    wherever they are (zero.py). grads: gradients of the parameters `held`; gradients: their places.
    norms: statistics and all other buffers. aliases: what shares memory with parameters. Raises
    ConfigError: a parameter or module cannot be trained this way; the message names it.
    """

    def __init__(self, module: nn.Module, device: Device) -> None:
        _check_module(module)
        self.module = module
        self.device = device
        trained = {name for name, p in named_parameters(module) if p.requires_grad}
        if not trained:
            raise ConfigError(
                f"[torch] {type(module).__name__} has no parameter that requires a gradient"
            )
        self.norms = Norms(module, list(module.named_parameters()), self.device)
        self.arrange(trained)

    def arrange(self, trained: Collection[str]) -> None:
        """Puts the parameters of these names first, with places for their gradients, the others
        behind them.
        """
        parameters = named_parameters(self.module)
        self.named = sorted(parameters, key=lambda pair: pair[0] not in trained)
        self.trained = sum(name in trained for name, _ in parameters)
        tensors = [p for _, p in self.named]
        self.aliases = of_parameters(self.module, self.named, self.buffers)
        for p in tensors:
            # elements side by side, each at its own place
            if not torch.ops.aten.is_non_overlapping_and_dense(p):
                p.data = p.data.contiguous()
        self.at, self.extent = aligned_sizes(tensors)
        self.size = self.end(self.trained)
        self.params = self.device.zeros(self.extent)
        for p, offset in zip(tensors, self.at, strict=True):
            place = view(self.params, offset, p)
            place.copy_(p.data)
            p.data = place
        for alias in self.aliases:
            alias.follow()
        self.settle()

    def settle(self) -> None:
        """The parameters are where they will be found."""
        self._addresses = [p.data_ptr() for _, p in self.named]

    def end(self, parameters: int) -> int:
        """Where the first so many parameters end, in floats."""
        return self.at[parameters] if parameters < len(self.at) else self.extent

    def hold(self, run: range) -> None:
        """Has memory for the gradients of these trained parameters."""
        self.held = run
        self.grads = self.device.zeros(self.end(run.stop) - self.end(run.start))
        self.gradients = self.views(self.grads)

    def shares(self, first: int, stop: int, ranks: int) -> list[range]:
        """Parameters `first` to `stop` - 1 cut into runs of about as many floats, one for each
        rank.
        """
        starts = self.at[:stop]
        lo = self.end(first)
        hi = self.end(stop)
        cuts = [
            bisect.bisect_left(starts, lo + (hi - lo) * r / ranks, first) for r in range(ranks)
        ] + [stop]
        return [range(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]

    def moved(self) -> str | None:
        """The name of a parameter that is not where it was put, or None."""
        pairs = zip(self.named, self._addresses, strict=True)
        return next((name for (name, p), address in pairs if p.data_ptr() != address), None)

    def check(self) -> None:
        """ConfigError if a parameter is not where it was put: what is trained would not be what
        is saved.
        """
        if name := self.moved():
            raise ConfigError(
                f"[torch] {name} is not where it was: a later trainer or DistributedDataParallel "
                "of this module, or module.to(), has moved it; use the later one, or make a new one"
            )

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The places of gradients in a flat tensor of their layout."""
        lo = self.end(self.held.start)
        return [view(flat, self.at[i] - lo, self.named[i][1]) for i in self.held]

    def send(self, comm: Communicator) -> None:
        """Gives all ranks the values of rank 0; a collective call."""
        with on_host(self.params) as parameters:
            comm.broadcast(parameters)
        for _, b in self.buffers:
            contiguous = b.detach().cpu().clone(memory_format=torch.contiguous_format)
            raw = contiguous.view(-1).view(torch.uint8).numpy()
            if raw.size:
                comm.broadcast(raw)
                if not torch.ops.aten.is_non_overlapping_and_dense(b) and 0 in b.stride():
                    b.data = contiguous.to(b.device)  # numbers of expand() share memory
                    continue
                with torch.no_grad():  # a buffer may be a parameter
                    b.copy_(contiguous)
        self.norms.keep()

    @property
    def buffers(self) -> list[tuple[str, torch.Tensor]]:
        """All buffers by name, as they are now."""
        return [(plain_name(name), buffer) for name, buffer in self.module.named_buffers()]


def plain_name(name: str) -> str:
    """Returns a name without what `torch.compile` puts before it, so that compiled and plain
    modules load each other's checkpoints.
    """
    return name.replace("_orig_mod.", "")


def named_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Returns the parameters of a module by plain names, each once."""
    return [(plain_name(name), p) for name, p in module.named_parameters()]


def _check_module(module: nn.Module) -> None:
    for name, part in module.named_modules():
        kind = type(part).__name__
        layer = f"{name} ({kind})" if name else kind
        if isinstance(part, nn.SyncBatchNorm):
            raise ConfigError(
                f"[torch] {layer} talks to other ranks within a step, so its bits depend on their "
                "number; use BatchNorm, whose statistics are of a shard, or GroupNorm"
            )
        if getattr(part, "sparse", False) is True and isinstance(
            part, nn.Embedding | nn.EmbeddingBag
        ):
            raise ConfigError(
                f"[torch] {layer} has sparse gradients, which no tree adds; use sparse=False"
            )
    for name, p in module.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ConfigError(f"[torch] {name} has no shape yet; run the module on a sample first")
        if p.numel() > 1 and not any(p.stride()) and bool(p.detach().isnan().all()):
            raise ConfigError(
                f"[torch] {name} is in parts, as an earlier trainer of this module has zero=3; "
                "make the new one in `with trainer.gathered():` of that"
            )
        if p.is_meta:
            raise ConfigError(
                f"[torch] {name} is on the device meta, where it has no values; create the module "
                "on the CPU or a GPU"
            )
        if p.dtype != torch.float32 or p.layout != torch.strided:
            raise ConfigError(
                f"[torch] {name} is {str(p.dtype).removeprefix('torch.')} on {p.device}; float32 "
                "is allowed: module.float(), and precision='bf16' for autocast"
            )
    for name, buffer in module.named_buffers():
        if buffer.layout != torch.strided or buffer.is_quantized:
            kind = "quantized" if buffer.is_quantized else "sparse"
            raise ConfigError(
                f"[torch] the buffer {name} is {kind}, which checkpoints can't hold as a buffer; "
                "register its parts as buffers, such as indices and values, and build it in "
                "forward(), or set it as an attribute without register_buffer()"
            )
    _check_devices(module)


def _check_devices(module: nn.Module) -> None:
    """Raises ConfigError: parameters and buffers of a module are on several devices."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    if not tensors:
        return
    first_name, first = tensors[0]
    for name, tensor in tensors:
        if tensor.device != first.device:
            raise ConfigError(
                f"[torch] {first_name} is on {first.device}, and {name} on {tensor.device}; move "
                f"the module to one device: module.to({str(first.device)!r})"
            )
