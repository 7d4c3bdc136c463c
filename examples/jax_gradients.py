"""Gradients that JAX computes, averaged over ranks by odyssey: JAX's arrays on a CPU are read as
NumPy views.

    mpirun -n 2 python examples/jax_gradients.py
    python examples/jax_gradients.py

Every rank takes its own samples of each batch, all apply the same mean. Needs JAX (pip install
jax). What it is not: the same bits on any number of ranks; each adds up its own samples inside JAX.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from odyssey import data
from odyssey import distributed as dist


def loss(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    """The mean cross-entropy of a net of two layers; x (N, 784), y (N,)."""
    logits = jax.nn.relu(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]
    return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(y)), y])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="3 steps")
    args = parser.parse_args()
    steps = 3 if args.quick else args.steps

    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    keys = jax.random.split(jax.random.key(0), 2)
    params = {
        "w1": jax.random.normal(keys[0], (784, 64)) * 0.05,
        "b1": jnp.zeros(64),
        "w2": jax.random.normal(keys[1], (64, 10)) * 0.1,
        "b2": jnp.zeros(10),
    }
    gradient = jax.jit(jax.value_and_grad(loss))
    loader = data.DataLoader(data.load("mnist", train=True).take(64 * steps), batch_size=64)
    for x, y in loader:
        mine = slice(len(y) * rank // ranks, len(y) * (rank + 1) // ranks)
        value, grads = gradient(params, np.reshape(x[mine], (-1, 784)), np.asarray(y[mine]))
        flat, back = ravel_pytree(grads)
        mean = np.empty(flat.shape, np.float32)
        # np.asarray: a view, nothing is copied
        dist.all_reduce(np.asarray(flat), dist.ReduceOp.MEAN, out=mean)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, back(jnp.asarray(mean)))
    value = dist.metric_average(float(value), "loss")
    if rank == 0:
        print(f"step {steps}: loss {value:.3f} on {ranks} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
