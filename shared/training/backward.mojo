"""The backward pass of a tape: records derived from its nodes, the newest op first.

The same walk as `_walk` of python/odyssey/tensor.py, with the backward records of functional.py, in the same order.
Gradients of parameters are added by the kernels; those of activations are new memory.
"""

from .ops import code
from .program import float_bits
from .tape import Arg, NUMBER, Node, RESHAPE, Tape

comptime NONE = Arg(NUMBER, -1)
"""No gradient."""


def backward(mut t: Tape, loss: Int) raises:
    """Appends the backward pass of a loss.

    Args:
        t: It gets the records.
        loss: The number of a value of one float.

    Raises:
        Error: No gradient goes back to a parameter.
    """
    if t.values[loss].node < 0:
        raise Error(
            "[model] no parameter has a part in the output; let forward() use"
            " its layers"
        )
    t.backward = True
    t.device = t.values[loss].device
    var seed = t.alloc(16)
    t.emit(comptime (code("fill")), seed, float_bits(1), 1)
    # gradients so far, by value; nodes are numbered in the order in which they were recorded
    var pending = Dict[Int, Arg]()
    pending[loss] = seed
    while len(pending):
        var newest = -1
        for value in pending.keys():
            if newest < 0 or t.values[value].node > t.values[newest].node:
                newest = value
        var dy = NONE
        try:
            dy = pending.pop(newest)
        except:
            pass  # it is there
        var node = t.nodes[t.values[newest].node].copy()
        t.device = t.values[node.inputs[0]].device  # where they are wanted
        var grads = _gradients(t, node, dy)
        for i in range(len(node.inputs)):
            var source = node.inputs[i]
            if not t.wants(source):
                continue
            var found = pending.get(source)
            if found:
                var sum = t.activation(t.values[source].features())
                t.emit(
                    comptime (code("add")),
                    sum,
                    found.value(),
                    grads[i],
                    t.values[source].floats,
                )
                pending[source] = sum
            else:
                pending[source] = grads[i]


def _gradients(mut t: Tape, node: Node, dy: Arg) -> List[Arg]:
    """Emits the backward of one op; the gradients of its inputs, NONE where none is wanted.
    """
    var op = node.op
    var x = node.inputs[0]
    ref s = node.sizes
    if op == RESHAPE:
        return [dy]
    elif op == comptime (code("add")):
        return [dy, dy]
    elif op == comptime (code("multiply")):
        var da = _new(t, x)
        t.emit(op, da, dy, node.saved[1], s[0])
        var db = _new(t, x)
        t.emit(op, db, dy, node.saved[0], s[0])
        return [da, db]
    elif op == comptime (code("scale")):
        var dx = _new(t, x)
        t.emit(op, dx, dy, s[0], s[1])
        return [dx]
    elif op == comptime (code("copy")):
        var dx = _new(t, x)
        t.emit(op, dx, dy, s[0])
        return [dx]
    elif op == comptime (code("linear_forward")):
        return [_linear(t, node, dy)]
    elif op == comptime (code("conv2d_forward")):
        return [_conv2d(t, node, dy)]
    var dx = _new(t, x)
    if op == comptime (code("pad_forward")):
        t.emit(
            comptime (code("pad_backward")),
            dx,
            dy,
            s[0],
            s[1],
            s[2],
            s[3],
            s[4],
            rows=True,
        )
    elif op == comptime (code("maxpool_forward")):
        t.emit(
            comptime (code("maxpool_backward")),
            dx,
            dy,
            node.saved[0],
            node.saved[1],
            s[0],
            s[1],
            s[2],
            s[3],
            s[4],
            s[5],
            0,
            rows=True,
        )
    elif op == comptime (code("avgpool_forward")):
        t.emit(
            comptime (code("avgpool_backward")),
            dx,
            dy,
            s[0],
            s[1],
            s[2],
            s[3],
            s[4],
            s[5],
            rows=True,
        )
    elif op == comptime (code("relu_forward")):
        _saved(t, comptime (code("relu_backward")), dx, dy, node)
    elif op == comptime (code("tanh_forward")):
        _saved(t, comptime (code("tanh_backward")), dx, dy, node)
    elif op == comptime (code("sigmoid_forward")):
        _saved(t, comptime (code("sigmoid_backward")), dx, dy, node)
    elif op == comptime (code("dropout")):
        t.emit(op, dx, dy, s[0], s[1], s[2], s[3], rows=True)
    elif op == comptime (code("softmax_forward")):
        _classes(t, comptime (code("softmax_backward")), dx, dy, node)
    elif op == comptime (code("log_softmax_forward")):
        _classes(t, comptime (code("log_softmax_backward")), dx, dy, node)
    elif op == comptime (code("cross_entropy_forward")):
        t.emit(
            comptime (code("cross_entropy_backward")),
            dx,
            dy,
            node.saved[0],
            node.saved[1],
            s[0],
            s[1],
            rows=True,
        )
    elif op == comptime (code("nll_forward")):
        t.emit(
            comptime (code("nll_backward")),
            dx,
            dy,
            node.saved[0],
            s[0],
            s[1],
            rows=True,
        )
    return [dx]


def _new(mut t: Tape, value: Int) -> Arg:
    """Memory for the gradient of a value."""
    return t.activation(t.values[value].features())


def _saved(mut t: Tape, op: Int, dx: Arg, dy: Arg, node: Node):
    t.emit(op, dx, dy, node.saved[0], node.sizes[0], rows=True)


def _classes(mut t: Tape, op: Int, dx: Arg, dy: Arg, node: Node):
    t.emit(op, dx, dy, node.saved[0], node.sizes[0], node.sizes[1], rows=True)


def _bias_gradient(mut t: Tape, node: Node, n: Int) -> Arg:
    """Where the kernel adds the gradient of a bias; scratch memory if there is none.
    """
    var db = node.saved[3]
    return t.alloc(4 * n) if db.kind == NUMBER else db


def _linear(mut t: Tape, node: Node, dy: Arg) -> Arg:
    """Those of the parameters, then that of the input if it is wanted."""
    ref s = node.sizes  # G, I, O
    var x = node.inputs[0]
    var db = _bias_gradient(t, node, s[2])
    var scratch = t.alloc(4 * t.values[x].floats)
    t.emit(
        comptime (code("linear_backward_weight")),
        node.saved[2],
        db,
        dy,
        node.saved[0],
        scratch,
        s[0],
        s[1],
        s[2],
        rows=True,
    )
    if not t.wants(x):
        return NONE
    var dx = _new(t, x)
    t.emit(
        comptime (code("linear_backward_input")),
        dx,
        dy,
        node.saved[1],
        s[0],
        s[1],
        s[2],
        rows=True,
    )
    return dx


def _conv2d(mut t: Tape, node: Node, dy: Arg) -> Arg:
    """Those of the parameters, then that of the input if it is wanted."""
    ref s = node.sizes  # G, C, H, W, K, R, T, S
    var x = node.inputs[0]
    var db = _bias_gradient(t, node, s[4])
    t.emit(
        comptime (code("conv2d_backward_weight")),
        node.saved[2],
        db,
        dy,
        node.saved[0],
        s[0],
        s[1],
        s[2],
        s[3],
        s[4],
        s[5],
        s[6],
        s[7],
        rows=True,
    )
    if not t.wants(x):
        return NONE
    var dx = _new(t, x)
    t.emit(
        comptime (code("conv2d_backward_input")),
        dx,
        dy,
        node.saved[1],
        s[0],
        s[1],
        s[2],
        s[3],
        s[4],
        s[5],
        s[6],
        s[7],
        rows=True,
    )
    return dx
