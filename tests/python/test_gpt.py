"""GPT: against PyTorch with the same weights, the same bits on any layout, and text from it."""

from __future__ import annotations

import numpy as np
import pytest

import odyssey
from odyssey import DistributedTrainer, Tensor, data, nn, optim
from odyssey import functional as F
from odyssey.errors import ConfigError, ShapeError

SMALL = {"vocab_size": 11, "context": 24, "layers": 2, "heads": 2, "width": 32}


def model(seed=3, **more):
    """A small GPT with weights larger than those at the start, so that every part counts."""
    made = nn.models.build("gpt", seed=seed, **{**SMALL, **more})
    rng = np.random.default_rng(seed)
    for p in made.parameters():
        p.data[...] += rng.standard_normal(p.shape).astype(np.float32) * 0.1
    return made


def batch(n=3, t=24, seed=0):
    ids = np.random.default_rng(seed).integers(0, 11, (n, t + 1))
    return ids[:, :-1], ids[:, 1:]


def in_torch(torch, weights, ids, gelu="none", heads=2, layers=2):
    """GPT-2 as it is written down, from weights by nanoGPT's names; float64."""
    f = torch.nn.functional

    def norm(x, name):
        return f.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def linear(x, name):
        return f.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    x = weights["transformer.wte.weight"][ids] + weights["transformer.wpe.weight"][: ids.shape[1]]
    for i in range(layers):
        h = f"transformer.h.{i}."
        parts = linear(norm(x, h + "ln_1"), h + "attn.c_attn").split(x.shape[2], 2)
        q, k, v = (a.view(*x.shape[:2], heads, -1).transpose(1, 2) for a in parts)
        y = f.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + linear(y, h + "attn.c_proj")
        y = f.gelu(linear(norm(x, h + "ln_2"), h + "mlp.c_fc"), approximate=gelu)
        x = x + linear(y, h + "mlp.c_proj")
    return norm(x, "transformer.ln_f") @ weights["transformer.wte.weight"].T


@pytest.mark.parametrize("bias", [False, True])
def test_loss_and_gradients_are_pytorchs(bias):
    torch = pytest.importorskip("torch")
    ours, (ids, target) = model(bias=bias), batch()
    loss = F.cross_entropy(ours(ids), target)
    loss.backward()
    weights = {
        n: torch.tensor(p.data, dtype=torch.float64, requires_grad=True)
        for n, p in ours.named_parameters()
    }
    logits = in_torch(torch, weights, torch.tensor(ids))
    wanted = torch.nn.functional.cross_entropy(
        logits.reshape(-1, 11), torch.tensor(target).reshape(-1)
    )
    wanted.backward()
    assert abs(loss.item() - wanted.item()) < 1e-6 * wanted.item()
    for name, p in ours.named_parameters():
        gradient = weights[name].grad.numpy()
        assert np.abs(p.grad.data - gradient).max() < 1e-5 * np.abs(gradient).max(), name


@pytest.mark.parametrize("transposed", [False, True])
def test_weights_under_the_names_of_nanogpt_and_transformers(transposed):
    torch = pytest.importorskip("torch")
    source = model(bias=True)
    given = {n: torch.tensor(p.data) for n, p in source.named_parameters()}
    if transposed:  # transformers' Conv1D, GPT2Model without the head, and its masks
        layers = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
        given = {
            n.removeprefix("transformer."): v.T if n.endswith(layers) else v
            for n, v in given.items()
        }
        given["h.0.attn.bias"] = torch.ones(1, 1, 24, 24)
    else:
        given = {f"_orig_mod.{n}": v for n, v in given.items()} | {
            "_orig_mod.lm_head.weight": given["transformer.wte.weight"]
        }
    ours = nn.models.build("gpt", seed=9, bias=True, gelu="tanh", **SMALL)
    ours.load_gpt2(given)
    ids, _ = batch()
    weights = {n: torch.tensor(p.data, dtype=torch.float64) for n, p in source.named_parameters()}
    wanted = in_torch(torch, weights, torch.tensor(ids), "tanh").numpy()
    assert np.abs(ours(ids).numpy() - wanted).max() < 1e-5 * np.abs(wanted).max()
    with pytest.raises(ShapeError, match="missing"):
        ours.load_gpt2({n: v for n, v in given.items() if "wpe" not in n})


def test_the_shared_weight_is_one_parameter_with_two_names():
    ours = model()
    state = ours.state_dict()
    assert {"lm_head.weight", "transformer.wte.weight"} <= state.keys()
    assert len(list(ours.named_parameters())) == len(state) - 1
    other = model(seed=5)
    other.load_state_dict({n: v for n, v in state.items() if n != "lm_head.weight"})
    assert np.array_equal(other.lm_head.weight.data, ours.transformer.wte.weight.data)


def sequences(n=14, t=24):
    x, y = batch(n, t)
    return data.arrays(x.astype(np.int32), y.astype(np.int32))


def trained(steps=3, **settings):
    """The weights after some steps of 7 sequences in shards of 2; the last shard of a batch is
    not full.
    """
    trainer = DistributedTrainer(
        nn.models.build("gpt", seed=1, dropout=0.1, **SMALL),
        optim.AdamW(lr=1e-2),
        shard_size=2,
        clip_norm=1.0,
        backend="local",
        **settings,
    )
    trainer.fit(data.DataLoader(sequences(), batch_size=7, shuffle=True), steps=steps)
    return trainer.weights_sha256()


def test_training_has_the_same_bits_in_every_layout():
    wanted = trained()
    for settings in (
        {"num_gpus": 3},
        {"threads": 2},
        {"execution": "eager"},
        {"accumulation_steps": 1, "num_gpus": 2},
    ):
        assert trained(**settings) == wanted, settings


def test_a_trainers_loss_is_the_mean_over_tokens():
    ours, (x, y) = model(), batch(7)
    wanted = F.cross_entropy(ours(x), y).item()
    trainer = DistributedTrainer(
        ours, optim.SGD(lr=0.1), shard_size=2, backend="local", metrics=["accuracy"]
    )
    said = trainer.evaluate(data.DataLoader(sequences(7), batch_size=7))
    assert abs(said.loss - wanted) < 1e-5
    assert said.accuracy == pytest.approx(np.mean(np.argmax(ours(x).numpy(), 2) == y), abs=1e-6)


def test_without_the_shared_weight_there_are_stages():
    ours = nn.models.build("gpt", tied=False, **SMALL)
    assert ours.lm_head.weight is not ours.transformer.wte.weight
    assert len(list(ours.named_parameters())) == len(ours.state_dict())


def test_targets_that_are_ignored():
    torch = pytest.importorskip("torch")
    logits, target = (
        np.random.default_rng(0).standard_normal((3, 7, 5)).astype(np.float32),
        batch(3, 7)[1] % 5,
    )
    target[0, 2:] = -100
    x = Tensor(logits, requires_grad=True)
    loss = F.cross_entropy(x, target)
    loss.backward()
    t = torch.tensor(logits, requires_grad=True)
    wanted = torch.nn.functional.cross_entropy(t.reshape(-1, 5), torch.tensor(target).reshape(-1))
    wanted.backward()
    assert abs(loss.item() - wanted.item()) < 1e-6
    assert np.abs(x.grad.numpy() - t.grad.numpy()).max() < 1e-6


def test_dropout_is_a_function_of_the_token():
    x = Tensor(np.ones((5, 7, 6), np.float32))
    nn.manual_seed(4)
    whole = F.dropout(x, 0.5).numpy()
    assert 0.3 < (whole == 0).mean() < 0.7
    assert not np.array_equal(whole[0], whole[1])


def test_weight_decay_leaves_vectors_alone():
    ours = model(bias=True)
    before = ours.state_dict()
    optimizer = optim.AdamW(ours.named_parameters(), lr=0.1, weight_decay=0.5)
    optimizer.undecayed = optim.vectors
    optimizer.step()
    for name, p in ours.named_parameters():
        assert np.allclose(p.data, before[name] * (0.95 if p.ndim > 1 else 1), rtol=1e-6), name


def test_text_is_the_same_with_a_cache_and_without():
    ours, prompt = model(), [3, 1, 4]
    said = [
        list(ours.generate(prompt, 30, temperature, top_k, seed=7, use_cache=cache))
        for temperature, top_k in ((0.0, None), (1.0, None), (0.8, 3))
        for cache in (True, False)
    ]
    assert said[0] == said[1] and said[2] == said[3] and said[4] == said[5] and said[0] != said[2]
    assert list(ours.generate(prompt, 30, seed=8)) != said[2]
    with pytest.raises(ConfigError, match="at least 1"):
        next(ours.generate([], 1))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_logits_have_the_same_bits_in_any_batch(precision):
    ours, (ids, _) = model().eval(), batch(5, 19)
    with odyssey.autocast(precision):
        whole = ours(ids).numpy()
        for i in (0, 3):
            assert np.array_equal(ours(ids[i : i + 1]).numpy()[0], whole[i])
            assert np.array_equal(ours(ids[i : i + 1, :1]).numpy()[0], whole[i, :1])


class Block(nn.Module):
    """As a user writes it."""

    def __init__(self, width, heads):
        super().__init__()
        self.l1, self.attn, self.l2 = (
            nn.LayerNorm(width),
            nn.MultiheadAttention(width, heads),
            nn.LayerNorm(width),
        )
        self.f = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attn(self.l1(x), is_causal=True)
        return x + self.f(self.l2(x))


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, 16), nn.Embedding(8, 16)
        self.blocks = nn.Sequential(Block(16, 2), Block(16, 2))
        self.head = nn.Linear(16, 11)

    def forward(self, ids):
        return self.head(self.blocks(self.tokens(ids) + self.places(np.arange(8))))


@pytest.mark.parametrize("flat", [False, True])
def test_a_users_own(flat):
    def loss(y, target):
        return (
            F.cross_entropy(y.reshape(-1, 11), target.reshape(-1))
            if flat
            else F.cross_entropy(y, target)
        )

    nn.manual_seed(0)
    trainer = DistributedTrainer(
        Text(), optim.AdamW(lr=3e-3), loss=loss, shard_size=4, backend="local"
    )
    history = trainer.fit(data.DataLoader(sequences(12, 8), batch_size=12), epochs=60)
    assert history.records[0]["train_loss"] > 2.2 and history.train_loss < 1.2


def test_what_cannot_be():
    with pytest.raises(ConfigError, match="multiple of the heads"):
        nn.GPT(11, width=10, heads=3)
    with pytest.raises(ConfigError, match="unexpected keyword"):
        nn.models.build("gpt", vocab_size=11, colour="red")
    with pytest.raises(ShapeError, match="at most 24 tokens"):
        model()(batch(1, 25)[0])
