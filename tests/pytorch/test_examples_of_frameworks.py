"""Lightning's and Accelerate's own examples over backend odyssey, on one and three ranks.

Data and weights are small local ones. Apart from them, only lengths, and what a user would write
for the backend, are changed.
"""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
from pytorch.published import HERE, changed, mnist


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(
        bool(missing), reason=f"{', '.join(missing)} not installed (extra [published])"
    )


STRATEGY = (
    "DDPStrategy(process_group_backend='odyssey', find_unused_parameters=True), "
    "accelerator='cpu', devices={ranks}, num_nodes=1, logger={logger}, "
    "enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False"
)
IMPORT = "from lightning.pytorch.strategies import DDPStrategy\n"


def strategy(ranks: int, logger: bool = False) -> str:
    return f"strategy={STRATEGY.format(ranks=ranks, logger=logger)}"


def classifier(launch, ranks: int) -> list[str]:
    """The image classifier, with Lightning's command line."""
    path = changed(
        launch,
        "lightning/backbone_image_classifier.py",
        ('path.join(path.dirname(__file__), "..", "..", "Datasets")', '"data"'),
        ("[55000, 5000]", "[240, 80]"),
    )
    options = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "devices": ranks,
        "strategy": "lightning.pytorch.strategies.DDPStrategy",
        "strategy.process_group_backend": "odyssey",
        "enable_progress_bar": "false",
        "logger": "false",
    }
    return [path.name, *(f"--trainer.{name}={value}" for name, value in options.items())]


def transformer(launch, ranks: int) -> list[str]:
    path = changed(
        launch,
        "lightning/transformer.py",
        ("import lightning as L\n", "import lightning as L\n" + IMPORT),
        ("[n - 4000, 2000, 2000]", "[n - 40, 20, 20]"),
        ("max_epochs=20", f"max_epochs=1, {strategy(ranks)}"),
    )
    words = np.random.default_rng(0).integers(0, 40, (35, 60))
    lines = [" ".join(f"w{word}" for word in line) for line in words]
    (launch.folder / "data" / "wikitext-2.txt").write_text("\n".join(lines) + "\n")
    return [path.name]


def gan(launch, ranks: int) -> list[str]:
    path = changed(
        launch,
        "lightning/generative_adversarial_net.py",
        ("import torch\n", "import torch\n" + IMPORT),
        ("MNISTDataModule()", "MNISTDataModule(val_split=80, num_workers=0)"),
        ('accelerator="gpu", devices=1', f"max_epochs=1, {strategy(ranks, logger=True)}"),
    )
    return [path.name]


def run(launch, ranks: int, framework: str, programs: list[list[str]]) -> dict[str, set[str]]:
    """Runs programs and returns the hashes of the weights that ranks have, by program."""
    launch.environment["OMP_NUM_THREADS"] = "1"
    words = ("-W", "ignore", HERE / "run_in_turn.py", json.dumps(programs), framework)
    done = launch.python(*words, ranks=ranks, timeout=900)
    assert done.returncode == 0, done.stderr
    hashes: dict[str, list[str]] = {words[0]: [] for words in programs}
    for line in done.stdout.splitlines():
        if line.startswith("weights "):
            _, program, weights = line.split()
            hashes[program].append(weights)
    assert all(len(some) == max(ranks, 1) for some in hashes.values()), done.stdout
    print(done.stdout)
    return {program: set(some) for program, some in hashes.items()}


@needs("torch", "lightning", "jsonargparse", "torchvision", "requests", "tensorboard")
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 3])
def test_lightnings_examples_leave_all_ranks_with_the_same_weights(launch, ranks):
    mnist(launch.folder / "data")
    programs = [make(launch, ranks) for make in (classifier, transformer, gan)]
    hashes = run(launch, ranks, "lightning", programs)
    assert all(len(some) == 1 for some in hashes.values()), hashes


DATASETS = '''
"""In the place of Hugging Face's package: sentences that are made here."""

import random


class Split(list):
    column_names = ["idx", "sentence1", "sentence2", "label"]


class Splits(dict):
    def map(self, function, batched, remove_columns):
        made = {}
        for name, rows in self.items():
            columns = {key: [row[key] for row in rows] for key in rows[0]}
            columns = {**columns, **function(columns)}
            kept = [key for key in columns if key not in remove_columns]
            made[name] = Split(
                {key: columns[key][i] for key in kept} for i in range(len(rows))
            )
        return Splits(made)

    def rename_column(self, old, new):
        rename = {old: new}
        return Splits(
            (name, Split({rename.get(key, key): row[key] for key in row} for row in rows))
            for name, rows in self.items()
        )


def load_dataset(path, name):
    draw = random.Random(0)

    def sentence():
        return " ".join(f"w{draw.randrange(20)}" for _ in range(draw.randrange(3, 9)))

    def rows(n):
        return Split(
            {"idx": i, "sentence1": sentence(), "sentence2": sentence(), "label": i % 2}
            for i in range(n)
        )

    return Splits(train=rows(96), validation=rows(40))
'''

EVALUATE = '''
"""In the place of Hugging Face's package: the accuracy."""


class Metric:
    def __init__(self):
        self.correct = self.samples = 0

    def add_batch(self, predictions, references):
        self.correct += int((predictions == references).sum())
        self.samples += len(references)

    def compute(self):
        found = {"accuracy": self.correct / self.samples, "samples": self.samples}
        self.__init__()
        return found


def load(path, name):
    return Metric()
'''

WEIGHTS = """
import pathlib, safetensors.torch, timm, torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

torch.manual_seed(0)
special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
words = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(20))])}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
pair = "[CLS] $A [SEP] $B:1 [SEP]:1"
ends = [("[CLS]", 2), ("[SEP]", 3)]
tokenizer.post_processor = processors.TemplateProcessing(
    single="[CLS] $A [SEP]", pair=pair, special_tokens=ends
)
names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special))
PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained("bert-base-cased")
sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
config = BertConfig(vocab_size=len(words), max_position_embeddings=32, **sizes)
BertForSequenceClassification(config).save_pretrained("bert-base-cased")

model = timm.create_model("test_resnet")
folder = pathlib.Path("hub") / f"models--{model.pretrained_cfg['hf_hub_id'].replace('/', '--')}"
for name in ("refs", "snapshots/0"):
    (folder / name).mkdir(parents=True)
(folder / "refs" / "main").write_text("0")
safetensors.torch.save_file(model.state_dict(), folder / "snapshots" / "0" / "model.safetensors")
"""

# on CPUs Accelerate takes a group that is there, and no other name than gloo
GROUP = '    torch.distributed.init_process_group("odyssey")\n    accelerator = Accelerator('


def language(launch) -> list[str]:
    path = changed(
        launch,
        "accelerate/nlp_example.py",
        ("    accelerator = Accelerator(", GROUP),
    )
    (launch.folder / "datasets.py").write_text(DATASETS)
    (launch.folder / "evaluate.py").write_text(EVALUATE)
    return [path.name, "--cpu"]


def vision(launch) -> list[str]:
    from PIL import Image

    path = changed(
        launch,
        "accelerate/cv_example.py",
        ("    accelerator = Accelerator(", GROUP),
        ('create_model("resnet50d"', 'create_model("test_resnet"'),
        ("num_workers=4", "num_workers=0"),
        ('"image_size": 224', '"image_size": 32'),
    )
    (launch.folder / "pets").mkdir()
    for i in range(30):
        pixels = np.random.default_rng(i).integers(0, 256, (40, 40, 3), np.uint8)
        Image.fromarray(pixels).save(launch.folder / "pets" / f"{('cat', 'dog')[i % 2]}_{i}.jpg")
    return [path.name, "--cpu", "--data_dir", "pets"]


@pytest.mark.long
@needs("torch", "accelerate", "transformers", "tokenizers", "timm", "torchvision", "PIL")
def test_accelerates_examples_leave_all_ranks_with_the_same_weights(launch):
    launch.environment.update(HF_HUB_CACHE=str(launch.folder / "hub"), HF_HUB_OFFLINE="1")
    launch.environment["PYTHONPATH"] += f":{HERE}"
    programs = [language(launch), vision(launch)]
    (launch.folder / "weights.py").write_text("import vision\n" + WEIGHTS)
    done = launch.python("-W", "ignore", "weights.py", timeout=300)
    assert done.returncode == 0, done.stderr
    for ranks in (1, 3):
        hashes = run(launch, ranks, "accelerate", programs)
        assert all(len(some) == 1 for some in hashes.values()), hashes
