"""Published models with random weights, each with a batch and its loss: those of zoo.py,
torchvision's, timm's and transformers'.

`MODELS` has a function by name that builds one. Modules are imported when a model is built, because
some take seconds.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import vision
import zoo
from torch.nn import functional as F

SAMPLES = 6


class Published(NamedTuple):
    """A model, a batch of it, and its loss, called as loss(output, target).

    loss: None if the model's output holds it.
    """

    module: torch.nn.Module
    batch: Any  # inputs and targets, or a dict
    loss: Callable[[Any, Any], torch.Tensor] | None


def _draw() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _of_zoo(name: str) -> Published:
    module, shape, classes = zoo.made(name)
    draw = _draw()
    if name == "gpt":
        ids = torch.randint(classes, (SAMPLES, shape[0] + 1), generator=draw)
        return Published(module, (ids[:, :-1], ids[:, 1:]), F.cross_entropy)
    x = torch.randn(SAMPLES, *shape, generator=draw)
    return Published(module, (x, torch.arange(SAMPLES) % classes), F.cross_entropy)


def _of_timm(name: str) -> Published:
    import timm

    size = 224 if name.endswith("_224") else 64
    x = torch.randn(SAMPLES, 3, size, size, generator=_draw())
    model = timm.create_model(name, num_classes=5)
    return Published(model, (x, torch.arange(SAMPLES) % 5), F.cross_entropy)


def _lraspp() -> Published:
    module = vision.torchvision.models.segmentation.lraspp_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=4
    )
    draw = _draw()
    x = torch.randn(SAMPLES, 3, 64, 64, generator=draw)
    y = torch.randint(0, 4, (SAMPLES, 64, 64), generator=draw)
    return Published(module, (x, y), lambda out, y: F.cross_entropy(out["out"], y))


# --- transformers ---

_SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
}
_WORDS = {"vocab_size": 99, **_SMALL}
_ENDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
_T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4}
_BART = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    **_ENDS,
}
_SPEECH = {
    "vocab_size": 32,
    **_SMALL,
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}
_PICTURE = {**_SMALL, "image_size": 32, "patch_size": 8}
_EXPERTS = {**_WORDS, "num_key_value_heads": 2, "num_local_experts": 4}

# the batch, the class of the model, the class of its configuration, and what that is given
_OF_TRANSFORMERS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "gpt2": (
        "tokens",
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4},
    ),
    "bert": ("text", "BertForSequenceClassification", "BertConfig", {**_WORDS, "num_labels": 3}),
    "bert masked": ("tokens", "BertForMaskedLM", "BertConfig", _WORDS),
    "roberta": (
        "text",
        "RobertaForSequenceClassification",
        "RobertaConfig",
        {**_WORDS, "num_labels": 3},
    ),
    "t5": (
        "tokens",
        "T5ForConditionalGeneration",
        "T5Config",
        {**_T5, "decoder_start_token_id": 0},
    ),
    "bart": (
        "tokens",
        "BartForConditionalGeneration",
        "BartConfig",
        {**_BART, "forced_eos_token_id": 2},
    ),
    "llama": ("tokens", "LlamaForCausalLM", "LlamaConfig", {**_WORDS, "num_key_value_heads": 2}),
    "qwen2": ("tokens", "Qwen2ForCausalLM", "Qwen2Config", {**_WORDS, "num_key_value_heads": 2}),
    "vit transformers": (
        "pictures",
        "ViTForImageClassification",
        "ViTConfig",
        {**_PICTURE, "num_labels": 3},
    ),
    "wav2vec2": (
        "sounds",
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        {**_SPEECH, "ctc_loss_reduction": "mean"},
    ),
    "mixtral": ("tokens", "MixtralForCausalLM", "MixtralConfig", _EXPERTS),
    "mixtral routed": (
        "tokens",
        "MixtralForCausalLM",
        "MixtralConfig",
        {**_EXPERTS, "output_router_logits": True},
    ),
}


def _batch(kind: str) -> dict[str, torch.Tensor]:
    """Returns a batch for a model of transformers; some tokens are padding or don't count."""
    draw = _draw()
    ids = torch.randint(5, 90, (SAMPLES, 12), generator=draw)
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    mask[4, 3:] = 0
    text = {"input_ids": ids, "attention_mask": mask}
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, :9] = -100
    pictures = torch.randn(SAMPLES, 3, 32, 32, generator=draw)
    three = torch.arange(SAMPLES) % 3
    sounds = torch.randn(SAMPLES, 800, generator=draw)
    return {
        "tokens": {**text, "labels": labels},
        "text": {**text, "labels": three},
        "pictures": {"labels": three, "pixel_values": pictures},
        "pairs": {**text, "pixel_values": pictures},
        "sounds": {
            "input_values": sounds,
            "labels": torch.randint(1, 30, (SAMPLES, 5), generator=draw),
        },
    }[kind]


def _of_transformers(kind: str, model: str, config: str, settings: dict[str, Any]) -> Published:
    import transformers

    module = getattr(transformers, model)(getattr(transformers, config)(**settings))
    return Published(module, _batch(kind), None)


def _clip() -> Published:
    import transformers

    text = {**_WORDS, "eos_token_id": 2}
    config = transformers.CLIPConfig(text_config=text, vision_config=_PICTURE, projection_dim=16)

    def match_pairs(out: Any, y: Any) -> torch.Tensor:
        logits = out.logits_per_image
        return F.cross_entropy(logits, torch.arange(len(logits), device=logits.device))

    return Published(transformers.CLIPModel(config), _batch("pairs"), match_pairs)


_TIMM = (
    "resnet18 vit_tiny_patch16_224 convnext_atto mobilenetv3_small_050 efficientnet_b0 "
    "mixer_s32_224 regnetx_002 densenet121 xcit_nano_12_p16_224 nf_resnet26"
).split()
MODELS: dict[str, Callable[[], Published]] = {
    **{f"zoo {name}": functools.partial(_of_zoo, name) for name in zoo.MODELS},
    **{f"timm {name}": functools.partial(_of_timm, name) for name in _TIMM},
    "lraspp": _lraspp,
    **{name: functools.partial(_of_transformers, *what) for name, what in _OF_TRANSFORMERS.items()},
    "clip": _clip,
}


def build(name: str) -> Published:
    """Returns a model of `MODELS`; its weights are the same each time."""
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    return MODELS[name]()
