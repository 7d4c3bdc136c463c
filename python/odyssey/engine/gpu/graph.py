"""CUDA graphs: what a piece of a step enqueues, captured once and enqueued as one from then on.

Enqueueing costs the host some microseconds per launch, and the device a gap between launches; a
LeNet-5 step of 64 samples has about thirty. A graph has one launch and smaller gaps. The same
launches run in the same order, so no bit changes. What changes from step to step is in device
memory (StepContext), so a graph is valid as long as addresses are.

The driver is asked directly, as MAX has no call for capture. Where it has none, or refuses,
launches are enqueued one by one; ODYSSEY_GPU_GRAPHS=0 asks for that.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable

from ...core.cuda import driver
from ...core.gpu_native import Gpu
from ...errors import DeviceError

# capture mode: calls of other threads, say of NCCL's, are none of this capture's business
THREAD_LOCAL = 1


class Graph:
    """Graph of what `enqueue` puts into a device's compute queue; nothing of it is run here.

    Raises DeviceError: the driver has no graphs, or something in it cannot be captured. The queue
    is as it was.
    """

    def __init__(self, gpu: Gpu, enqueue: Callable[[], None]) -> None:
        self._exec: ctypes.c_void_p | None = None
        self._stream = gpu.stream()
        self._gpu = gpu
        graph = ctypes.c_void_p()
        executable = ctypes.c_void_p()
        driver().call("cuStreamBeginCapture_v2", self._stream, THREAD_LOCAL)
        problem: BaseException | None = None
        collects = gc.isenabled()
        gc.disable()  # what is collected may free device memory, which ends a capture
        try:
            enqueue()
        # a capture that nobody ends would take everything that follows
        except BaseException as error:
            problem = error
        finally:
            if collects:
                gc.enable()
        try:
            driver().call("cuStreamEndCapture", self._stream, ctypes.byref(graph))
            if isinstance(problem, Exception):
                raise DeviceError(f"[gpu] what was captured failed: {problem}")
            driver().call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, 0)
            self._exec = executable
        finally:
            if graph.value:
                driver().call("cuGraphDestroy", graph)
            if problem is not None and not isinstance(problem, Exception):
                raise problem

    def launch(self) -> None:
        """Enqueues it."""
        self._gpu.stream()  # makes the device this thread's current one
        driver().call("cuGraphLaunch", self._exec, self._stream)

    def close(self) -> None:
        """Gives it back, once nothing of it is under way."""
        if self._exec is not None:
            driver().call("cuGraphExecDestroy", self._exec)
            self._exec = None

    def __del__(self) -> None:
        self.close()
