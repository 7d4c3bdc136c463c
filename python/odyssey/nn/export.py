"""A model as an ONNX graph, from the records of one forward pass: what the kernels compute, op by op.

The ops of images, tables and plain layers are known; a model with others is refused by their names. onnx writes
the file and checks it. A batch may have any number of samples.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.arena import Arena
from ..core.program import Range, Record, Recorder, using
from ..core.tensor import Tensor, empty, no_grad
from ..errors import ConfigError
from .module import Module

SAMPLES = 16  # of the pass that is looked at: one group of lanes
OPSET = 20
NAMED = {  # ops of x alone -> ONNX's
    "relu_forward": "Relu",
    "tanh_forward": "Tanh",
    "sigmoid_forward": "Sigmoid",
    "gelu_forward": "Gelu",
    "softplus_forward": "Softplus",
    "abs_forward": "Abs",
    "exp_forward": "Exp",
}
PAIRS = {"add": "Add", "multiply": "Mul"}


class _Graph:
    """Nodes from records; values are known by their memory. `shapes`: of a sample, by the value's name."""

    def __init__(self, onnx: Any, names: dict[int, str]) -> None:
        self.make, self.names = onnx.helper, names  # offset in the arena -> parameter
        self.nodes: list[Any] = []
        self.values: dict[int, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.constants: dict[str, np.ndarray] = {}

    def add(self, op: str, inputs: list[str], shape: tuple[int, ...], **attributes: Any) -> str:
        """A node; the name of its output, whose samples have this shape."""
        name = f"{op.lower()}_{len(self.nodes)}"
        self.nodes.append(self.make.make_node(op, inputs, [name], **attributes))
        self.shapes[name] = shape
        return name

    def value(self, memory: Any, shape: tuple[int, ...]) -> str:
        """The value in some memory, of samples of this shape, which it is brought to."""
        name = self.values[id(memory)]
        if self.shapes[name] != shape:
            name = self.add("Reshape", [name, self.constant(np.array([-1, *shape], np.int64))], shape)
        return name

    def weight(self, memory: Any) -> str:
        """A parameter, or a constant such as the bias of a layer that has none."""
        return self.names[memory.offset] if isinstance(memory, Range) else self.constant(memory.array.view(np.float32))

    def constant(self, array: np.ndarray) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants[name] = array
        return name

    def record(self, r: Record) -> None:
        """The node, or nodes, of a record."""
        a, shape = r.args, self.shapes
        out = a[0]
        if r.op == "pad_forward":
            planes, h, w, ph, pw = a[-5:]
            frame = self.constant(np.array([0, 0, ph, pw, 0, 0, ph, pw], np.int64))
            made = self.add("Pad", [self.value(a[1], (planes, h, w)), frame], (planes, h + 2 * ph, w + 2 * pw))
        elif r.op == "conv2d_forward":
            _, c, h, w, k, rows, columns, stride, _ = a[-9:]
            inputs = [self.value(a[1], (c, h, w)), self.weight(a[2]), self.weight(a[3])]
            to = (k, (h - rows) // stride + 1, (w - columns) // stride + 1)
            made = self.add("Conv", inputs, to, strides=[stride, stride])
        elif r.op == "linear_forward":
            groups, i, o, _ = a[-4:]
            if groups != 1:
                raise KeyError("linear over more axes than (N, features)")
            made = self.add("Gemm", [self.value(a[1], (i,)), self.weight(a[2]), self.weight(a[3])], (o,), transB=1)
        elif r.op in ("maxpool_forward", "avgpool_forward"):
            planes, h, w, rows, columns, s = a[-6:]
            op = "MaxPool" if r.op[0] == "m" else "AveragePool"
            to = (planes, (h - rows) // s + 1, (w - columns) // s + 1)
            source = a[2] if r.op[0] == "m" else a[1]
            inputs = [self.value(source, (planes, h, w))]
            made = self.add(op, inputs, to, kernel_shape=[rows, columns], strides=[s, s])
        elif r.op in ("softmax_forward", "log_softmax_forward"):
            op = "Softmax" if r.op[0] == "s" else "LogSoftmax"
            made = self.add(op, [self.value(a[1], (a[-1],))], (a[-1],), axis=-1)
        elif r.op == "layer_norm_forward":
            inputs = [self.value(a[2], (a[-2],)), self.weight(a[3]), self.weight(a[4])]
            made = self.add("LayerNormalization", inputs, (a[-2],), axis=-1, epsilon=a[-1])
        elif r.op == "silu_forward":
            x = self.values[id(a[1])]
            made = self.add("Mul", [x, self.add("Sigmoid", [x], shape[x])], shape[x])
        elif r.op in NAMED:
            x = self.values[id(a[1])]
            made = self.add(NAMED[r.op], [x], shape[x])
        elif r.op in PAIRS:
            x = self.values[id(a[1])]
            made = self.add(PAIRS[r.op], [x, self.value(a[2], shape[x])], shape[x])
        else:
            raise KeyError(r.op)
        self.values[id(out)] = made


def onnx_model(model: Module, sample_shape: tuple[int, ...]) -> Any:
    """The graph of a model in eval mode: input "x" (N, *sample_shape) float32, normalised as the data set gives it;
    output "y" (N, ...); parameters by their names.

    Raises ConfigError: the package onnx is missing, or the model has an op that is not known here.
    """
    try:
        import onnx
    except ImportError:
        raise ConfigError("[export] ONNX needs the package onnx; install odyssey[export]") from None
    arena = Arena.of(model.named_parameters())
    recorder = Recorder(arena, 4 * arena.size, SAMPLES)
    modes = [(m, m.training) for m in model.modules()]
    try:
        with using(recorder), no_grad():
            x = empty((SAMPLES, *sample_shape), "lanes")
            y = model.eval()(x)
    finally:
        for m, training in modes:
            m.training = training
    if not isinstance(y, Tensor) or y.layout != "lanes" or y.shape[:1] != (SAMPLES,):
        raise ConfigError("[export] forward() must give a tensor (N, ...) for ONNX; use --format safetensors")
    graph = _Graph(onnx, {4 * at: name for name, at in arena.offsets.items()})
    graph.values[id(x.memory)], graph.shapes["x"] = "x", tuple(sample_shape)
    for r in recorder.records:
        try:
            graph.record(r)
        except KeyError as problem:
            raise ConfigError(
                f"[export] {problem.args[0]} has no ONNX form here; ops of images, tables and plain layers have. Use "
                "--format safetensors"
            ) from None
    last = graph.value(y.memory, y.shape[1:])
    graph.nodes.append(graph.make.make_node("Identity", [last], ["y"]))
    state = {**model.state_dict(), **graph.constants}
    floats = onnx.TensorProto.FLOAT
    made = graph.make.make_model(
        graph.make.make_graph(
            graph.nodes,
            type(model).__name__,
            [graph.make.make_tensor_value_info("x", floats, ["N", *sample_shape])],
            [graph.make.make_tensor_value_info("y", floats, ["N", *y.shape[1:]])],
            [onnx.numpy_helper.from_array(np.ascontiguousarray(value), name) for name, value in state.items()],
        ),
        opset_imports=[graph.make.make_opsetid("", OPSET)],
        producer_name="odyssey",
    )
    made.ir_version = 10  # what runtimes of the last years read
    onnx.checker.check_model(made, full_check=True)
    return made
