"""A model as an ONNX graph, from the records of one forward pass: what the kernels compute, op
by op.

What an op is called there is declared with the op (`ONNX` of odyssey.core); a node that keeps the
shape needs nothing here. A model with an op that has no form is refused by its name. A GPT's
records are of tokens in lanes: its graph is written from its layers. onnx writes the file and
checks it. A batch may have any number of samples, and a GPT's sequences any length.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..base import install_extra
from ..core import ONNX, Arena, Range, Record, Recorder, Tensor, empty, no_grad, using
from ..errors import ConfigError
from ..nn import GPT, LayerNorm, Linear, Module, in_mode

SAMPLES = 16  # of the pass that is looked at: one group of lanes
OPSET = 20


class _Graph:
    """Nodes from records; values are known by their memory.

    `shapes`: of a sample, by the value's name.
    """

    def __init__(self, onnx: Any, names: dict[int, str]) -> None:
        # offset in the arena -> parameter
        self.make = onnx.helper
        self.names = names
        self.nodes: list[Any] = []
        self.values: dict[int, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.constants: dict[str, np.ndarray] = {}
        self.fills: dict[int, float] = {}  # memory of one number

    def add(self, op: str, inputs: list[str], shape: tuple[int, ...], **attributes: Any) -> str:
        """A node; the name of its output, whose samples have this shape."""
        name = f"/{op.lower()}_{len(self.nodes)}"  # which is no name of a column or a parameter
        self.nodes.append(self.make.make_node(op, inputs, [name], **attributes))
        self.shapes[name] = shape
        return name

    def value(self, memory: Any, shape: tuple[int, ...]) -> str:
        """The value in some memory, of samples of this shape, which it is brought to."""
        name = self.values[id(memory)]
        if self.shapes[name] != shape:
            name = self.add(
                "Reshape", [name, self.constant(np.array([-1, *shape], np.int64))], shape
            )
        return name

    def weight(self, memory: Any) -> str:
        """A parameter, or a constant such as the bias of a layer that has none."""
        return (
            self.names[memory.offset]
            if isinstance(memory, Range)
            else self.constant(memory.array.view(np.float32))
        )

    def number(self, value: float) -> str:
        return self.constant(np.array(value, np.float32))

    def constant(self, array: np.ndarray) -> str:
        name = f"/constant_{len(self.constants)}"
        self.constants[name] = array
        return name

    def record(self, r: Record) -> None:
        """The node, or nodes, of a record.

        Raises KeyError, with the op's name: it has no ONNX form.
        """
        kind = ONNX[r.op]
        a = r.named
        output = getattr(self, f"_{kind.lower()}", self._keep_shape)(kind, a)
        if output is None:
            raise KeyError(r.op)
        if output:
            self.values[id(r.args[0])] = output

    def _keep_shape(self, kind: str, a: dict[str, Any], **attributes: Any) -> str:
        """A node of x, or of a and b, or of x and the number a, that keeps the shape."""
        first = self.values[id(a["x"] if "x" in a else a["a"])]
        shape = self.shapes[first]
        operands = (
            [self.value(a["b"], shape)] if "b" in a else [self.number(a["a"])] if "a" in a else []
        )
        return self.add(kind, [first, *operands], shape, **attributes)

    def _add(self, kind: str, a: dict[str, Any]) -> str | None:
        """An operation of two values of a shape, or of a value and constants: one number, or one
        for each number of the last axis.
        """
        if "d0" not in a:
            return self._keep_shape(kind, a)
        side = "a" if id(a["a"]) in self.fills else "b"  # of the constant
        constant = a[side]
        x = a["b" if side == "a" else "a"]
        if id(x) not in self.values:
            return None
        name = self.values[id(x)]
        shape = self.shapes[name]
        if id(constant) in self.fills:
            return self.add(kind, [name, self.number(self.fills[id(constant)])], shape)
        try:
            numbers = constant.array
        except AttributeError:  # it is computed
            return None
        strides = [a[f"{side}{axis}"] for axis in range(5)]
        strides_of_x = [a["a3"], a["a4"]]
        is_vector = strides == [0, 0, 0, 1, 0] and strides_of_x == [SAMPLES, 1]
        if not is_vector or shape[-1:] != (a["d3"],) or numbers.size != a["d3"]:
            return None
        return self.add(kind, [name, self.constant(numbers.view(np.float32))], shape)

    _mul = _add

    def _leakyrelu(self, kind: str, a: dict[str, Any]) -> str:
        return self._keep_shape(kind, {"x": a["x"]}, alpha=a["slope"])

    def _swish(self, kind: str, a: dict[str, Any]) -> str:
        x = self.values[id(a["x"])]
        return self.add("Mul", [x, self.add("Sigmoid", [x], self.shapes[x])], self.shapes[x])

    def _softmax(self, kind: str, a: dict[str, Any]) -> str:
        return self.add(kind, [self.value(a["x"], (a["F"],))], (a["F"],), axis=-1)

    _logsoftmax = _softmax

    def _pad(self, kind: str, a: dict[str, Any]) -> str | None:
        if "ph" in a:
            planes, h, w, top, left = (a[name] for name in ("planes", "H", "W", "ph", "pw"))
            below = top
            right = left
            value = None
        # into a frame
        elif id(a["y"]) in self.fills and (a["from_x"], a["d0"], a["d1"]) == (0, 1, 1):
            planes = a["d2"]
            h = a["d3"]
            w = a["d4"] // SAMPLES
            high = a["y2"] // a["y3"]
            wide = a["y3"] // SAMPLES
            top = a["from_y"] // a["y3"]
            left = a["from_y"] % a["y3"] // SAMPLES
            below = high - h - top
            right = wide - w - left
            value = self.fills[id(a["y"])]
        else:
            return None
        frame = self.constant(np.array([0, 0, top, left, 0, 0, below, right], np.int64))
        inputs = [self.value(a["x"], (planes, h, w)), frame]
        inputs += [] if value is None else [self.number(value)]
        return self.add(kind, inputs, (planes, h + top + below, w + left + right))

    def _constant(self, kind: str, a: dict[str, Any]) -> str:
        self.fills[id(a["y"])] = a["a"]
        return ""  # it is what others are written into

    def _conv(self, kind: str, a: dict[str, Any]) -> str:
        stride = a["S"]
        dilation = a.get("D", 1)
        inputs = [
            self.value(a["x"], (a["C"], a["H"], a["W"])),
            self.weight(a["w"]),
            self.weight(a["b"]),
        ]
        over = ((a["H"], a["R"]), (a["W"], a["T"]))
        to = (a["K"], *((n - dilation * (taps - 1) - 1) // stride + 1 for n, taps in over))
        attributes = {
            "strides": [stride, stride],
            "dilations": [dilation, dilation],
            "group": a.get("groups", 1),
        }
        return self.add(kind, inputs, to, **attributes)

    def _gemm(self, kind: str, a: dict[str, Any]) -> str:
        if a["G"] != 1:
            raise KeyError("linear over more axes than (N, features)")
        inputs = [self.value(a["x"], (a["I"],)), self.weight(a["w"]), self.weight(a["b"])]
        return self.add(kind, inputs, (a["O"],), transB=1)

    def _maxpool(self, kind: str, a: dict[str, Any]) -> str:
        planes, h, w, rows, columns, s = (a[name] for name in ("planes", "H", "W", "R", "T", "S"))
        inputs = [self.value(a["x"], (planes, h, w))]
        to = (planes, (h - rows) // s + 1, (w - columns) // s + 1)
        return self.add(kind, inputs, to, kernel_shape=[rows, columns], strides=[s, s])

    _averagepool = _maxpool

    def _layernormalization(self, kind: str, a: dict[str, Any]) -> str:
        inputs = [self.value(a["x"], (a["F"],)), self.weight(a["w"]), self.weight(a["b"])]
        return self.add(kind, inputs, (a["F"],), axis=-1, epsilon=a["eps"])

    def _batchnormalization(self, kind: str, a: dict[str, Any]) -> str:
        shape = a["C"], a["P"]
        inputs = [
            self.value(a["x"], shape),
            *(self.weight(a[name]) for name in ("w", "b", "mean", "variance")),
        ]
        return self.add(kind, inputs, shape, epsilon=a["eps"])

    def _reducesum(self, kind: str, a: dict[str, Any]) -> str | None:
        """Pools the last n places of each feature alone."""
        n = a["r2"]
        strides = [a[name] for name in ("sk0", "sk1", "sk2", "sr0", "sr1", "sr2")]
        if (a["k2"], a["r0"], a["r1"]) != (SAMPLES, 1, 1) or strides != [
            0,
            n * SAMPLES,
            1,
            0,
            0,
            SAMPLES,
        ]:
            return None
        axis = self.constant(np.array([-1], np.int64))
        return self.add(kind, [self.value(a["x"], (a["k1"], n)), axis], (a["k1"],), keepdims=0)


class _Decoder(_Graph):
    """A GPT's graph, from ids (N, T) int64 to logits (N, T, vocab_size)."""

    def __call__(self, op: str, *inputs: str | np.ndarray, **attributes: Any) -> str:
        return self.add(
            op, [i if isinstance(i, str) else self.constant(i) for i in inputs], (), **attributes
        )

    def linear(self, layer: Linear, x: str) -> str:
        y = self("MatMul", x, layer.weight.numpy().T)
        return y if layer.bias is None else self("Add", y, layer.bias.numpy())

    def norm(self, layer: LayerNorm, x: str) -> str:
        parts = [p.numpy() for p in (layer.weight, layer.bias) if p is not None]
        return self("LayerNormalization", x, *parts, axis=-1, epsilon=layer.eps)

    def attention(self, layer: Any, x: str, width: int, mask: str) -> str:
        d = width // layer.heads
        names = [f"{letter}_{len(self.nodes)}" for letter in "qkv"]
        self.nodes.append(
            self.make.make_node(
                "Split", [self.linear(layer.c_attn, x)], names, axis=2, num_outputs=3
            )
        )
        split_shape = np.array([0, 0, layer.heads, d], np.int64)
        permutations = [[0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]]
        q, k, v = (
            self("Transpose", self("Reshape", f, split_shape), perm=to)
            for f, to in zip(names, permutations, strict=True)
        )
        scores = self("Add", self("Mul", self("MatMul", q, k), np.array(d**-0.5, np.float32)), mask)
        y = self(
            "Transpose", self("MatMul", self("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3]
        )
        return self.linear(layer.c_proj, self("Reshape", y, np.array([0, 0, width], np.int64)))

    def decoder(self, model: GPT) -> str:
        inner = model.transformer
        number = np.array
        length = self("Gather", self("Shape", "x"), number(1, np.int64))
        places = self("Range", number(0, np.int64), length, number(1, np.int64))
        token, place = (p.weight.numpy() for p in (inner.wte, inner.wpe))
        x = self("Add", self("Gather", token, "x"), self("Gather", place, places))
        square = self("Concat", *[self("Unsqueeze", length, number([0], np.int64))] * 2, axis=0)
        mask = self(
            "Trilu",
            self("Expand", number([[-np.inf]], np.float32), square),
            number(1, np.int64),
            upper=1,
        )
        for block in inner.h:
            x = self(
                "Add", x, self.attention(block.attn, self.norm(block.ln_1, x), model.width, mask)
            )
            wide = self(
                "Gelu",
                self.linear(block.mlp.c_fc, self.norm(block.ln_2, x)),
                approximate=block.mlp.gelu,
            )
            x = self("Add", x, self.linear(block.mlp.c_proj, wide))
        return self.linear(model.lm_head, self.norm(inner.ln_f, x))


def onnx_model(model: Module, sample_shape: tuple[int, ...] = (), columns: Any = None) -> Any:
    """The graph of a model in eval mode: input "x" (N, *sample_shape) float32, normalised as the
    data set gives it; output "y" (N, ...); parameters by their names. Of a GPT x is (N, T)
    int64, and y (N, T, vocab_size).

    columns: of a table (data.tables.Columns). The graph then does with a row what `odyssey predict`
    does: NaN is filled in, columns are normalised, strings become categories. If all columns are
    numbers, "x" holds them as they are. Otherwise each column is an input (N, 1), float32 or
    string. Metadata "columns" lists the numbers of a sample, "inputs" the input of each column.

    Raises ConfigError: the package onnx is missing, or the model has an op that is not known here.
    """
    try:
        import onnx
    except ImportError:
        raise ConfigError(
            f"[export] ONNX needs the package onnx; {install_extra('export')}"
        ) from None
    if isinstance(model, GPT):
        graph = _Decoder(onnx, {})
        logits = ["N", "T", model.lm_head.weight.shape[0]]
        inputs = [("x", onnx.TensorProto.INT64, ["N", "T"])]
        return _build_proto(onnx, graph, model, graph.decoder(model), inputs, logits, {})
    arena = Arena.of(model.named_parameters(), model.named_buffers())
    recorder = Recorder(arena, 4 * arena.size, SAMPLES)
    recorder.conv_algorithm = "direct"  # ONNX has one kind of convolution
    with in_mode(model, False), using(recorder), no_grad():
        x = empty((SAMPLES, *sample_shape), "lanes")
        y = model(x)
    if not isinstance(y, Tensor) or y.layout != "lanes" or y.shape[:1] != (SAMPLES,):
        raise ConfigError(
            "[export] forward() must give a tensor (N, ...) for ONNX; use --format safetensors"
        )
    graph = _Graph(onnx, {4 * offset: name for name, offset in arena.offsets.items()})
    graph.values[id(x.memory)] = "x"
    graph.shapes["x"] = tuple(sample_shape)
    inputs = [("x", onnx.TensorProto.FLOAT, ["N", *sample_shape])]
    if columns is not None:
        inputs, sample = _convert_columns(onnx, graph, columns, model.state_dict())
        graph.values[id(x.memory)] = sample
    for r in recorder.records:
        try:
            graph.record(r)
        except KeyError as problem:
            raise ConfigError(
                f"[export] {problem.args[0]} has no ONNX form here; ops of images, tables and "
                "plain layers have. Use --format safetensors"
            ) from None
    output = graph.value(y.memory, y.shape[1:])
    proto = _build_proto(
        onnx, graph, model, output, inputs, ["N", *y.shape[1:]], model.state_dict()
    )
    if columns is not None:
        about = {"columns": json.dumps(columns.features)}
        if columns.categories:
            names = [name for name, _, _ in inputs]
            about["inputs"] = json.dumps(dict(zip(columns.names, names, strict=True)))
        onnx.helper.set_model_props(proto, about)
    return proto


Input = tuple[str, int, list[Any]]  # name, type and shape of an input of a graph


def _convert_columns(
    onnx: Any, graph: _Graph, columns: Any, parameters: Any
) -> tuple[list[Input], str]:
    """Adds the nodes that convert the columns of a table to the numbers of a sample.

    Returns:
        The inputs of the graph, and the name of the value that holds samples (N, F).
    """
    number = onnx.TensorProto.FLOAT
    text = onnx.TensorProto.STRING
    if not columns.categories:
        width = len(columns.names)
        graph.shapes["x"] = (width,)
        return [("x", number, ["N", width])], _convert_numbers(graph, "x", columns, columns.names)
    inputs: list[Input] = []
    parts = []
    used = {"y", *parameters}
    for column in columns.names:
        name = column
        while name in used:  # "y" is the output
            name += "_"
        used.add(name)
        graph.shapes[name] = (1,)
        categories = columns.categories.get(column)
        inputs.append((name, number if categories is None else text, ["N", 1]))
        if categories is None:
            parts.append(_convert_numbers(graph, name, columns, [column]))
        else:
            texts = graph.constant(np.array([list(categories)], dtype=object))
            shape = (len(categories),)
            is_category = graph.add("Equal", [name, texts], shape)
            parts.append(graph.add("Cast", [is_category], shape, to=number))
    return inputs, graph.add("Concat", parts, (len(columns.features),), axis=1)


def _convert_numbers(graph: _Graph, name: str, columns: Any, names: Sequence[str]) -> str:
    """Adds the nodes that fill in and normalise columns of numbers, and returns their result.

    name: the value (N, len(names)) that holds the columns `names`.
    """
    shape = graph.shapes[name]

    def constants(numbers: Mapping[str, float], default: float) -> str:
        return graph.constant(
            np.array([numbers.get(column, default) for column in names], np.float32)
        )

    if any(column in columns.fill for column in names):
        is_missing = graph.add("IsNaN", [name], shape)
        name = graph.add("Where", [is_missing, constants(columns.fill, math.nan), name], shape)
    if any(column in columns.mean for column in names):
        shifted = graph.add("Sub", [name, constants(columns.mean, 0.0)], shape)
        name = graph.add("Div", [shifted, constants(columns.std, 1.0)], shape)
    return name


def content(
    model: Module | None,
    arrays: dict[str, Any],
    sample_shape: tuple[int, ...] | None,
    columns: Any = None,
) -> bytes:
    """A model as the bytes of an ONNX file.

    Raises ConfigError: as onnx_model, or samples are not known.
    """
    if model is None:
        raise ConfigError("[export] ONNX needs the model, not its weights alone; give it")
    if not sample_shape and not isinstance(model, GPT):
        raise ConfigError(
            "[export] it is not known what samples are; give sample_shape=, or use format "
            "safetensors"
        )
    return onnx_model(model, tuple(sample_shape or ()), columns).SerializeToString()


def _build_proto(
    onnx: Any,
    graph: _Graph,
    model: Module,
    output: str,
    inputs: Sequence[Input],
    output_shape: list[Any],
    state: Any,
) -> Any:
    """The checked model of a graph whose value `output` is its output, of this shape."""
    graph.nodes.append(graph.make.make_node("Identity", [output], ["y"]))
    # others, such as a count of batches, do nothing
    used = {name for node in graph.nodes for name in node.input}
    state = {name: value for name, value in {**state, **graph.constants}.items() if name in used}
    proto = graph.make.make_model(
        graph.make.make_graph(
            graph.nodes,
            type(model).__name__,
            [graph.make.make_tensor_value_info(*value) for value in inputs],
            [graph.make.make_tensor_value_info("y", onnx.TensorProto.FLOAT, output_shape)],
            [
                onnx.numpy_helper.from_array(np.asarray(value, order="C"), name)
                for name, value in state.items()
            ],
        ),
        opset_imports=[graph.make.make_opsetid("", OPSET)],
        producer_name="odyssey",
    )
    proto.ir_version = 10  # what runtimes of the last years read
    onnx.checker.check_model(proto, full_check=True)
    return proto
