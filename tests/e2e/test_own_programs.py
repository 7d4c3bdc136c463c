"""Programs as users bring them: pictures, a regression, an augmentation; the same bits on ranks
and over resumes.
"""

from __future__ import annotations

import json
import textwrap

import numpy as np
import pytest

Image = pytest.importorskip("PIL.Image")

FOLDER = """
    import numpy as np, odyssey
    from odyssey import data, nn, optim
    class Gray:  # a data set of one's own, of what another one gives
        def __init__(self, folder): self.folder, self.classes = folder, folder.classes
        def __len__(self): return len(self.folder)
        def __getitem__(self, i):
            pixels, k = self.folder[i]
            return pixels.mean(axis=0, dtype=np.float32) / 255 - 0.5, k
    kind = Gray if "gray" in sys.argv else lambda folder: folder
    train = data.DataLoader(kind(data.ImageFolder("imgs/train", 20)), batch_size=16, shuffle=True)
    test = data.DataLoader(kind(data.ImageFolder("imgs/test", 20)), batch_size=16)
    model = nn.models.build("convnet", sample_shape=(1 if "gray" in sys.argv else 3, 20, 20), classes=3)
    trainer = odyssey.DistributedTrainer(model, optim.Adam(lr=1e-3), shard_size=4)
    history = trainer.fit(train, test, epochs=2, **saving)
    figures = [history.train_loss, history.test_accuracy]
"""

REGRESSION = """
    import numpy as np, odyssey
    from odyssey import data, nn, optim
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 8)).astype(np.float32)
    y = (x @ rng.normal(size=(8, 1))).astype(np.float32)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    trainer = odyssey.DistributedTrainer(net, optim.Adam(lr=1e-2), loss=nn.MSELoss())
    history = trainer.fit(data.DataLoader(data.arrays(x, y), batch_size=100, shuffle=True), epochs=5, **saving)
    figures = [history.train_loss]
"""

AUGMENTATION = """
    import numpy as np, odyssey
    from odyssey import data, nn, optim
    base = data.load("mnist", train=True).take(256)
    def flipped(image, rng):
        return image[:, :, ::-1] if rng.random() < 0.5 else image
    class Own:
        classes = 10
        def __init__(self): self.x, self.y = base.gather(np.arange(len(base)))
        def __len__(self): return len(self.y)
        def __getitem__(self, i): return self.x[i], int(self.y[i])
    class Drawing(Own):  # as in many programs for PyTorch
        rng = np.random.default_rng(0)
        def __getitem__(self, i):
            image, label = super().__getitem__(i)
            return flipped(image, self.rng), label
    made = {"drawing": Drawing, "own": Own, "arrays": lambda: base}[sys.argv[2]]()
    transform = None if sys.argv[2] == "drawing" else flipped
    loader = data.DataLoader(made, batch_size=32, shuffle=True, transform=transform)
    trainer = odyssey.DistributedTrainer(nn.LeNet5(), optim.SGD(lr=0.05), shard_size=8)
    history = trainer.fit(loader, epochs=2, **saving)
    figures = [history.train_loss]
"""

AROUND = """
import json, sys
import odyssey
limit = int(sys.argv[1])
saving = {{"checkpoint_dir": "kept", "checkpoint_every": 4, "steps": limit if limit > 0 else None}} if limit else {{}}
odyssey.manual_seed(0)
{program}
if trainer.comm.rank == 0:
    print(json.dumps([trainer.weights_sha256(), figures]))
"""

PROGRAMS = {
    "folder": (FOLDER, ""),
    "gray folder": (FOLDER, "gray"),
    "regression": (REGRESSION, ""),
    "augmented, own": (AUGMENTATION, "own"),
    "augmented, arrays": (AUGMENTATION, "arrays"),
}


@pytest.fixture
def pictures(tmp_path):
    draw = np.random.default_rng(0)
    for part, count in (("train", 20), ("test", 6)):
        for k in range(3):
            (tmp_path / "imgs" / part / "abc"[k]).mkdir(parents=True)
            for i in range(count):
                pixels = draw.integers(0, 120, (24, 22, 3), np.uint8)
                pixels[: 8 * k + 8] += 60
                Image.fromarray(pixels).save(tmp_path / "imgs" / part / "abc"[k] / f"{i:02}.png")


def run(launch, program, limit, *words, ranks):
    path = launch.folder / "program.py"
    path.write_text(AROUND.format(program=textwrap.dedent(program)))
    return launch.python(path, limit, *words, ranks=ranks)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.long if n in ("gray folder", "augmented, arrays") else ())
        for n in PROGRAMS
    ],
)
def test_the_same_bits_on_one_rank_and_three_and_over_a_resume(launch, pictures, name):
    program, word = PROGRAMS[name]

    def said(limit, ranks):
        done = run(launch, program, limit, *filter(None, [word]), ranks=ranks)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    whole = said(0, 1)
    assert said(0, 3) == whole
    assert said(6, 3)[0] != whole[0]
    assert said(-1, 2) == whole  # goes on


@pytest.mark.parametrize("ranks", [0, 3])
def test_an_augmentation_that_draws_by_itself_is_told_of_transform(launch, ranks):
    done = run(launch, AUGMENTATION, 0, "drawing", ranks=ranks)
    line = next(line for line in done.stderr.splitlines() if "[data]" in line)
    assert done.returncode and "transform= of odyssey.data.DataLoader gets" in line
