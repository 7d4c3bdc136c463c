"""What every op computes, in NumPy, as plainly as possible: no layout, no tiles, in whatever
dtype comes in.

Tests call these in float64. Each op has its formula and the gradients of it, given dL/dy;
test_reference.py checks the gradients against differences of the formula, so that a slip here
cannot hide one in the kernels.
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def _pair(v):
    return (v, v) if isinstance(v, int) else v


# --- convolution, padding, linear ---------------------------------------------------------------


def pad2d(x: Array, padding) -> Array:
    ph, pw = _pair(padding)
    return np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)))


def pad2d_backward(x: Array, padding, dy: Array) -> Array:
    ph, pw = _pair(padding)
    return dy[:, :, ph : ph + x.shape[2], pw : pw + x.shape[3]]


def conv2d(x: Array, w: Array, b: Array, stride: int, padding) -> Array:
    x = pad2d(x, padding)
    (n, _, h, width), (k, _, r, t) = x.shape, w.shape
    y = np.zeros((n, k, (h - r) // stride + 1, (width - t) // stride + 1), x.dtype)
    for p in range(y.shape[2]):
        for q in range(y.shape[3]):
            window = x[:, :, p * stride : p * stride + r, q * stride : q * stride + t]
            y[:, :, p, q] = np.einsum("ncrt,kcrt->nk", window, w) + b
    return y


def conv2d_backward(
    x: Array, w: Array, b: Array, stride: int, padding, dy: Array
) -> tuple[Array, Array, Array]:
    padded = pad2d(x, padding)
    r, t = w.shape[2:]
    dx, dw = np.zeros_like(padded), np.zeros_like(w)
    for p in range(dy.shape[2]):
        for q in range(dy.shape[3]):
            rows, columns = slice(p * stride, p * stride + r), slice(q * stride, q * stride + t)
            dw += np.einsum("nk,ncrt->kcrt", dy[:, :, p, q], padded[:, :, rows, columns])
            dx[:, :, rows, columns] += np.einsum("nk,kcrt->ncrt", dy[:, :, p, q], w)
    return pad2d_backward(x, padding, dx), dw, dy.sum((0, 2, 3))


def linear(x: Array, w: Array, b: Array) -> Array:
    return x @ w.T + b


def linear_backward(x: Array, w: Array, b: Array, dy: Array) -> tuple[Array, Array, Array]:
    return dy @ w, dy.T @ x, dy.sum(0)


# --- pooling ------------------------------------------------------------------------------------


def _windows(x: Array, kernel, stride: int):
    """(p, q, window (N, C, R * T), its slices) of all windows that lie inside."""
    r, t = _pair(kernel)
    for p in range((x.shape[2] - r) // stride + 1):
        for q in range((x.shape[3] - t) // stride + 1):
            rows, columns = slice(p * stride, p * stride + r), slice(q * stride, q * stride + t)
            yield p, q, x[:, :, rows, columns].reshape(*x.shape[:2], r * t), rows, columns


def _pooled(x: Array, kernel, stride: int) -> Array:
    r, t = _pair(kernel)
    return np.zeros(
        (*x.shape[:2], (x.shape[2] - r) // stride + 1, (x.shape[3] - t) // stride + 1), x.dtype
    )


def max_pool2d(x: Array, kernel, stride: int) -> Array:
    y = _pooled(x, kernel, stride)
    for p, q, window, _, _ in _windows(x, kernel, stride):
        y[:, :, p, q] = window.max(2)
    return y


def max_pool2d_backward(x: Array, kernel, stride: int, dy: Array) -> Array:
    """To the first of equal largest values."""
    dx = np.zeros_like(x)
    r, t = _pair(kernel)
    for p, q, window, rows, columns in _windows(x, kernel, stride):
        won = np.eye(r * t)[window.argmax(2)].reshape(*x.shape[:2], r, t)
        dx[:, :, rows, columns] += won * dy[:, :, p, q, None, None]
    return dx


def avg_pool2d(x: Array, kernel, stride: int) -> Array:
    y = _pooled(x, kernel, stride)
    for p, q, window, _, _ in _windows(x, kernel, stride):
        y[:, :, p, q] = window.mean(2)
    return y


def avg_pool2d_backward(x: Array, kernel, stride: int, dy: Array) -> Array:
    dx = np.zeros_like(x)
    r, t = _pair(kernel)
    for p, q, _, rows, columns in _windows(x, kernel, stride):
        dx[:, :, rows, columns] += dy[:, :, p, q, None, None] / (r * t)
    return dx


# --- elementwise --------------------------------------------------------------------------------


def relu(x: Array) -> Array:
    return np.where(x < 0, 0, x)


def relu_backward(x: Array, dy: Array) -> Array:
    return np.where(x > 0, dy, 0)


def tanh(x: Array) -> Array:
    return np.tanh(x)


def tanh_backward(x: Array, dy: Array) -> Array:
    return dy / np.cosh(x) ** 2


def sigmoid(x: Array) -> Array:
    return 0.5 * (1 + np.tanh(0.5 * x))


def sigmoid_backward(x: Array, dy: Array) -> Array:
    return dy * sigmoid(x) * sigmoid(-x)


# --- over classes -------------------------------------------------------------------------------


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def softmax_backward(x: Array, dy: Array) -> Array:
    y = softmax(x)
    return y * (dy - (dy * y).sum(1, keepdims=True))


def log_softmax(x: Array) -> Array:
    x = x - x.max(1, keepdims=True)
    return x - np.log(np.exp(x).sum(1, keepdims=True))


def log_softmax_backward(x: Array, dy: Array) -> Array:
    return dy - softmax(x) * dy.sum(1, keepdims=True)


def nll(x: Array, labels: Array) -> Array:
    """Summed over samples."""
    return -x[np.arange(len(x)), labels].sum()


def nll_backward(x: Array, labels: Array, dy: float) -> Array:
    return -dy * np.eye(x.shape[1])[labels]


def cross_entropy(x: Array, labels: Array) -> Array:
    """Summed over samples."""
    return nll(log_softmax(x), labels)


def cross_entropy_backward(x: Array, labels: Array, dy: float) -> Array:
    return dy * (softmax(x) - np.eye(x.shape[1])[labels])


# --- random numbers -----------------------------------------------------------------------------


def philox(c0, c1, c2, c3, seed: int) -> Array:
    """Philox4x32-10 in Python's integers; the counters broadcast. Returns uint32 (..., 4)."""
    low = np.uint64(0xFFFFFFFF)
    a, b, c, d = (np.array(v, np.uint64) for v in np.broadcast_arrays(c0, c1, c2, c3))
    for i in range(10):
        k0 = np.uint64((seed + i * 0x9E3779B9) & 0xFFFFFFFF)
        k1 = np.uint64(((seed >> 32) + i * 0xBB67AE85) & 0xFFFFFFFF)
        m0, m1 = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (
            (m1 >> np.uint64(32)) ^ b ^ k0,
            m1 & low,
            (m0 >> np.uint64(32)) ^ d ^ k1,
            m0 & low,
        )
    return np.stack([a, b, c, d], -1).astype(np.uint32)


def unit(bits: Array) -> Array:
    """Floats in [0, 1) from the upper 24 bits."""
    return (bits >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def dropout_kept(
    shape: tuple[int, ...], p: float, seed: int, step: int, first: int, layer: int
) -> Array:
    """Which elements of (N, ...) stay; sample n is number first + n of the global batch."""
    n, f = shape[0], int(np.prod(shape[1:]))
    words = philox(np.arange(-(-f // 4))[None, :], first + np.arange(n)[:, None], step, layer, seed)
    return (unit(words).reshape(n, -1)[:, :f] >= np.float32(p)).reshape(shape)


def uniform(n: int, seed: int, stream: int, low: float, high: float) -> Array:
    numbers = unit(philox(np.arange(-(-n // 4)), 0, stream, 0x74696E69, seed)).reshape(-1)[:n]
    return numbers * (np.float32(high) - np.float32(low)) + np.float32(low)


# --- optimizers: the formulas of PyTorch's documentation, state in and out ------------------------


def sgd(w, state, g, t, *, lr, momentum=0.0, weight_decay=0.0, nesterov=False):
    g = g + weight_decay * w
    if momentum:
        buffer = g if t == 1 else momentum * state["b"] + g
        state["b"] = buffer
        g = g + momentum * buffer if nesterov else buffer
    return w - lr * g


def rmsprop(w, state, g, t, *, lr, alpha=0.99, eps=1e-8, weight_decay=0.0):
    g = g + weight_decay * w
    state["v"] = alpha * state.get("v", 0) + (1 - alpha) * g**2
    return w - lr * g / (np.sqrt(state["v"]) + eps)


def adam(w, state, g, t, *, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, decoupled=False):
    if decoupled:
        w = w - lr * weight_decay * w
    else:
        g = g + weight_decay * w
    state["m"] = betas[0] * state.get("m", 0) + (1 - betas[0]) * g
    state["v"] = betas[1] * state.get("v", 0) + (1 - betas[1]) * g**2
    m, v = state["m"] / (1 - betas[0] ** t), state["v"] / (1 - betas[1] ** t)
    return w - lr * m / (np.sqrt(v) + eps)
