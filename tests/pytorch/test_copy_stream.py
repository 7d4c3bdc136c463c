"""The order in which samples are copied to a GPU beside its computations, on streams that note
what is asked of them. No GPU runs this.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from odyssey.torch.device import CopyStream  # noqa: E402

GPU = torch.device("cuda", 0)


class NotedStream:
    """A stream that notes calls in a list."""

    def __init__(self, name: str, notes: list[tuple[Any, ...]]) -> None:
        self.name = name
        self.notes = notes

    def record_event(self) -> str:
        self.notes.append(("record event", self.name))
        return "event"

    def wait_event(self, event: str) -> None:
        self.notes.append(("wait", self.name, event))


class NotedCuda:
    """What torch.cuda has of streams."""

    def __init__(self) -> None:
        self.notes: list[tuple[Any, ...]] = []
        self.active = "compute"

    def Stream(self, device: torch.device) -> NotedStream:  # noqa: N802 (PyTorch's name)
        self.notes.append(("make stream", device))
        return NotedStream("copy", self.notes)

    def current_stream(self, device: torch.device) -> NotedStream:
        return NotedStream(self.active, self.notes)

    @contextlib.contextmanager
    def stream(self, stream: NotedStream) -> Iterator[None]:
        before, self.active = self.active, stream.name
        yield
        self.active = before


class NotedTensor(torch.Tensor):
    """A tensor that notes copies to the GPU, instead of making them."""

    cuda: NotedCuda

    def pin_memory(self) -> NotedTensor:  # type: ignore[override]
        self.cuda.notes.append(("pin", tuple(self.shape), self.is_contiguous()))
        return self

    def to(self, device: torch.device, non_blocking: bool = False) -> NotedTensor:  # type: ignore[override]
        self.cuda.notes.append(("copy", self.cuda.active, device, non_blocking))
        return self

    def contiguous(self) -> NotedTensor:  # type: ignore[override]
        return noted(torch.Tensor.contiguous(self.as_subclass(torch.Tensor)), self.cuda)

    def record_stream(self, stream: NotedStream) -> None:  # type: ignore[override]
        self.cuda.notes.append(("used by", stream.name))


def noted(tensor: torch.Tensor, cuda: NotedCuda) -> NotedTensor:
    result = tensor.as_subclass(NotedTensor)
    result.cuda = cuda
    return result


def test_a_shard_is_computed_after_its_copies_and_its_memory_stays_until_then():
    cuda = NotedCuda()
    copies = CopyStream(GPU, cuda)
    x, y = (noted(torch.zeros(shape), cuda) for shape in ((4, 2), (4,)))
    inputs, (targets, text) = copies.bring((x, (y, "a text")))
    assert (inputs is x, targets is y, text) == (True, True, "a text")
    copy = ("copy", "copy", GPU, True)
    assert cuda.notes == [
        ("make stream", GPU),
        ("pin", (4, 2), True),
        copy,
        ("pin", (4,), True),
        copy,
        ("record event", "copy"),
        ("wait", "compute", "event"),
        ("used by", "compute"),
        ("used by", "compute"),
    ]
    assert cuda.active == "compute"
    cuda.notes.clear()
    copies.bring(x)
    assert ("make stream", GPU) not in cuda.notes


def test_a_tensor_whose_elements_share_memory_is_pinned_as_a_copy():
    cuda = NotedCuda()
    expanded = noted(torch.zeros(1).expand(5), cuda)
    CopyStream(GPU, cuda).bring(expanded)
    assert ("pin", (5,), True) in cuda.notes


def test_nothing_to_copy_waits_for_nothing():
    cuda = NotedCuda()
    on_device = torch.zeros(3, device="meta")
    assert CopyStream(GPU, cuda).bring({"x": on_device, "n": 3}) == {"x": on_device, "n": 3}
    assert cuda.notes == [("make stream", GPU)]
