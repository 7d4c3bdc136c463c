"""Published models and what odyssey.torch says of their losses: looked_at.py; prints a line for
each, in float32 and in bfloat16 (autocast), kind first.

torchvision's and timm's classifiers with cross entropy, transformers' models with the losses that
they hold, all with random weights; then those whose losses look across the batch.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import timm
import torch
import transformers as hf
import vision
from torch.nn import functional as F

from odyssey.torch import huggingface, separable

warnings.filterwarnings("ignore")
G = torch.Generator().manual_seed(0)
PICTURES = (
    "resnet18 vit_tiny_patch16_224 convnext_atto mobilenetv3_small_050 efficientnet_b0 "
    "mixer_s32_224 regnetx_002 densenet121 xcit_nano_12_p16_224 nf_resnet26"
).split()


def look(name: str, module: torch.nn.Module, batch: tuple[Any, Any], loss: Any) -> None:
    def run(both: tuple[Any, Any], precision: str) -> torch.Tensor:
        x, y = both
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            return loss(module(**x) if isinstance(x, dict) else module(x), y)

    for precision in ("fp32", "bf16"):
        count = huggingface.label_counter(module)
        kind, _ = separable.looked_at(
            [module.train()],
            functools.partial(run, precision=precision),
            batch,
            weight=None if count is None else functools.partial(weigh, count),
        )
        print(kind, name, precision, flush=True)


def weigh(count: Any, both: tuple[Any, Any]) -> float:
    """Returns the weight of a shard of a model that counts its labels."""
    batch, _ = both
    return float(count(None, batch))


def main() -> None:
    for name in PICTURES:
        size = 224 if name.endswith("_224") else 64
        model = timm.create_model(name, num_classes=5)
        look(
            name,
            model,
            (torch.randn(4, 3, size, size, generator=G), torch.arange(4) % 5),
            F.cross_entropy,
        )
    segments = vision.torchvision.models.segmentation.lraspp_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=4
    )
    maps = torch.randn(4, 3, 64, 64), torch.randint(0, 4, (4, 64, 64))
    look("lraspp", segments, maps, lambda out, y: F.cross_entropy(out["out"], y))

    ids = torch.randint(5, 90, (6, 12), generator=G)
    mask = torch.ones_like(ids)
    mask[0, 7:], mask[4, 3:] = 0, 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, :9] = -100
    text, three = {"input_ids": ids, "attention_mask": mask}, torch.arange(6) % 3
    tokens = {**text, "labels": labels}
    small = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 40,
    }
    words = {"vocab_size": 99, **small}
    ends = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    t5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4}
    bart = {
        "vocab_size": 99,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
    }
    bart |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, **ends}
    speech = {
        "vocab_size": 32,
        **small,
        "conv_dim": (16, 16),
        "conv_stride": (5, 4),
        "conv_kernel": (10, 4),
    }
    speech |= {
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 2,
    }
    picture = {**small, "image_size": 32, "patch_size": 8}
    experts = {**words, "num_key_value_heads": 2, "num_local_experts": 4}
    sounds = {"input_values": torch.randn(6, 800), "labels": torch.randint(1, 30, (6, 5))}
    for model, batch in (
        (hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4)), tokens),
        (
            hf.BertForSequenceClassification(hf.BertConfig(**words, num_labels=3)),
            {**text, "labels": three},
        ),
        (hf.BertForMaskedLM(hf.BertConfig(**words)), tokens),
        (
            hf.RobertaForSequenceClassification(hf.RobertaConfig(**words, num_labels=3)),
            {**text, "labels": three},
        ),
        (hf.T5ForConditionalGeneration(hf.T5Config(**t5, decoder_start_token_id=0)), tokens),
        (hf.BartForConditionalGeneration(hf.BartConfig(**bart, forced_eos_token_id=2)), tokens),
        (hf.LlamaForCausalLM(hf.LlamaConfig(**words, num_key_value_heads=2)), tokens),
        (hf.Qwen2ForCausalLM(hf.Qwen2Config(**words, num_key_value_heads=2)), tokens),
        (
            hf.ViTForImageClassification(hf.ViTConfig(**picture, num_labels=3)),
            {"labels": three, "pixel_values": None},
        ),
        (hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**speech, ctc_loss_reduction="mean")), sounds),
        (hf.MixtralForCausalLM(hf.MixtralConfig(**experts)), tokens),
        (hf.MixtralForCausalLM(hf.MixtralConfig(**experts, output_router_logits=True)), tokens),
    ):
        if "pixel_values" in batch:
            batch["pixel_values"] = torch.randn(6, 3, 32, 32)
        look(type(model).__name__, model, (batch, ()), lambda out, y: huggingface.loss(out))
    clip = hf.CLIPConfig(
        text_config={**words, "eos_token_id": 2}, vision_config=picture, projection_dim=16
    )

    def pairs(out: Any, y: Any) -> torch.Tensor:
        logits = out.logits_per_image
        return F.cross_entropy(logits, torch.arange(len(logits)))

    look(
        "CLIPModel",
        hf.CLIPModel(clip),
        ({**text, "pixel_values": torch.randn(6, 3, 32, 32)}, ()),
        pairs,
    )


if __name__ == "__main__":
    main()
