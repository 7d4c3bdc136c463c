"""A model as an ONNX graph, from the records of one forward pass: what the kernels compute, op by op.

The ops of images, tables and plain layers are known; a model with others is refused by their names. A GPT's records
are of tokens in lanes: its graph is written from its layers. onnx writes the file and checks it. A batch may have any
number of samples, and a GPT's sequences any length.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.arena import Arena
from ..core.program import Range, Record, Recorder, using
from ..core.tensor import Tensor, empty, no_grad
from ..errors import ConfigError
from .gpt import GPT
from .layers import LayerNorm, Linear
from .module import Module, in_mode

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
        self.fills: dict[int, float] = {}  # memory of one number

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

    def convolution(
        self,
        a: Any,
        c: int,
        h: int,
        w: int,
        k: int,
        rows: int,
        columns: int,
        stride: int,
        apart: int = 1,
        group: int = 1,
    ) -> str:
        inputs = [self.value(a[1], (c, h, w)), self.weight(a[2]), self.weight(a[3])]
        to = (k, *((n - apart * (taps - 1) - 1) // stride + 1 for n, taps in ((h, rows), (w, columns))))
        return self.add("Conv", inputs, to, strides=[stride, stride], dilations=[apart, apart], group=group)

    def record(self, r: Record) -> None:
        """The node, or nodes, of a record."""
        a, shape = r.args, self.shapes
        out = a[0]
        if r.op == "pad_forward":
            planes, h, w, ph, pw = a[-5:]
            frame = self.constant(np.array([0, 0, ph, pw, 0, 0, ph, pw], np.int64))
            made = self.add("Pad", [self.value(a[1], (planes, h, w)), frame], (planes, h + 2 * ph, w + 2 * pw))
        elif r.op == "conv2d_forward":
            made = self.convolution(a, *a[-8:-1])
        elif r.op == "conv2d_general_forward":
            made = self.convolution(a, *a[-9:])
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
        elif r.op == "fill":
            self.fills[id(out)] = a[1]
            return
        elif r.op == "copy_strided" and id(out) in self.fills and a[3:6] == [0, 1, 1]:  # into a frame
            (planes, h, w), (plane, row) = a[6:9], a[11:13]
            w, high, wide, top, left = w // SAMPLES, plane // row, row // SAMPLES, a[2] // row, a[2] % row // SAMPLES
            frame = self.constant(np.array([0, 0, top, left, 0, 0, high - h - top, wide - w - left], np.int64))
            inputs = [self.value(a[1], (planes, h, w)), frame, self.constant(np.array(self.fills[id(out)], np.float32))]
            made = self.add("Pad", inputs, (planes, high, wide))
        elif r.op == "batch_norm_forward":
            channels, pixels, epsilon = a[8], a[9], a[11]
            inputs = [self.value(a[2], (channels, pixels)), *map(self.weight, a[3:7])]
            made = self.add("BatchNormalization", inputs, (channels, pixels), epsilon=epsilon)
        elif r.op == "reduce_sum" and a[4:8] == [SAMPLES, 1, 1, a[7]] and a[8:] == _last_axis(a[7]):
            axis = self.constant(np.array([-1], np.int64))
            made = self.add("ReduceSum", [self.value(a[1], (a[3], a[7])), axis], (a[3],), keepdims=0)
        elif r.op == "scale":
            x = self.values[id(a[1])]
            made = self.add("Mul", [x, self.constant(np.array(a[2], np.float32))], shape[x])
        elif r.op == "leaky_relu":
            x = self.values[id(a[1])]
            made = self.add("LeakyRelu", [x], shape[x], alpha=a[2])
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


def _last_axis(n: int) -> list[int]:
    """Strides of the sum over the last n places of each feature: of what stays, and of what is added."""
    return [0, n * SAMPLES, 1, 0, 0, SAMPLES]


class _Decoder(_Graph):
    """A GPT's graph, from ids (N, T) int64 to logits (N, T, vocab_size)."""

    def __call__(self, op: str, *inputs: str | np.ndarray, **attributes: Any) -> str:
        return self.add(op, [i if isinstance(i, str) else self.constant(i) for i in inputs], (), **attributes)

    def linear(self, layer: Linear, x: str) -> str:
        y = self("MatMul", x, layer.weight.numpy().T)
        return y if layer.bias is None else self("Add", y, layer.bias.numpy())

    def norm(self, layer: LayerNorm, x: str) -> str:
        parts = [p.numpy() for p in (layer.weight, layer.bias) if p is not None]
        return self("LayerNormalization", x, *parts, axis=-1, epsilon=layer.eps)

    def attention(self, layer: Any, x: str, width: int, mask: str) -> str:
        d = width // layer.heads
        found = [f"{what}_{len(self.nodes)}" for what in "qkv"]
        self.nodes.append(self.make.make_node("Split", [self.linear(layer.c_attn, x)], found, axis=2, num_outputs=3))
        apart = np.array([0, 0, layer.heads, d], np.int64)
        turned = [[0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]]
        q, k, v = (self("Transpose", self("Reshape", f, apart), perm=to) for f, to in zip(found, turned, strict=True))
        scores = self("Add", self("Mul", self("MatMul", q, k), np.array(d**-0.5, np.float32)), mask)
        y = self("Transpose", self("MatMul", self("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
        return self.linear(layer.c_proj, self("Reshape", y, np.array([0, 0, width], np.int64)))

    def decoder(self, model: GPT) -> str:
        inner, number = model.transformer, np.array
        length = self("Gather", self("Shape", "x"), number(1, np.int64))
        places = self("Range", number(0, np.int64), length, number(1, np.int64))
        token, place = (p.weight.numpy() for p in (inner.wte, inner.wpe))
        x = self("Add", self("Gather", token, "x"), self("Gather", place, places))
        square = self("Concat", *[self("Unsqueeze", length, number([0], np.int64))] * 2, axis=0)
        mask = self("Trilu", self("Expand", number([[-np.inf]], np.float32), square), number(1, np.int64), upper=1)
        for block in inner.h:
            x = self("Add", x, self.attention(block.attn, self.norm(block.ln_1, x), model.width, mask))
            wide = self("Gelu", self.linear(block.mlp.c_fc, self.norm(block.ln_2, x)), approximate=block.mlp.gelu)
            x = self("Add", x, self.linear(block.mlp.c_proj, wide))
        return self.linear(model.lm_head, self.norm(inner.ln_f, x))


def onnx_model(model: Module, sample_shape: tuple[int, ...] = ()) -> Any:
    """The graph of a model in eval mode: input "x" (N, *sample_shape) float32, normalised as the data set gives it;
    output "y" (N, ...); parameters by their names. Of a GPT x is (N, T) int64, and y (N, T, vocab_size).

    Raises ConfigError: the package onnx is missing, or the model has an op that is not known here.
    """
    try:
        import onnx
    except ImportError:
        raise ConfigError("[export] ONNX needs the package onnx; install odyssey[export]") from None
    if isinstance(model, GPT):
        graph = _Decoder(onnx, {})
        logits = ["N", "T", model.lm_head.weight.shape[0]]
        return _made(onnx, graph, model, graph.decoder(model), ["N", "T"], onnx.TensorProto.INT64, logits, {})
    arena = Arena.of(model.named_parameters(), model.named_buffers())
    recorder = Recorder(arena, 4 * arena.size, SAMPLES)
    with in_mode(model, False), using(recorder), no_grad():
        x = empty((SAMPLES, *sample_shape), "lanes")
        y = model(x)
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
    last, floats = graph.value(y.memory, y.shape[1:]), onnx.TensorProto.FLOAT
    return _made(onnx, graph, model, last, ["N", *sample_shape], floats, ["N", *y.shape[1:]], model.state_dict())


def _made(
    onnx: Any, graph: _Graph, model: Module, last: str, given: list[Any], kind: int, shape: list[Any], state: Any
) -> Any:
    """The checked model of a graph whose value `last` is the output, of this shape."""
    graph.nodes.append(graph.make.make_node("Identity", [last], ["y"]))
    state = {**state, **graph.constants}
    made = graph.make.make_model(
        graph.make.make_graph(
            graph.nodes,
            type(model).__name__,
            [graph.make.make_tensor_value_info("x", kind, given)],
            [graph.make.make_tensor_value_info("y", onnx.TensorProto.FLOAT, shape)],
            [onnx.numpy_helper.from_array(np.asarray(value, order="C"), name) for name, value in state.items()],
        ),
        opset_imports=[graph.make.make_opsetid("", OPSET)],
        producer_name="odyssey",
    )
    made.ir_version = 10  # what runtimes of the last years read
    onnx.checker.check_model(made, full_check=True)
    return made
