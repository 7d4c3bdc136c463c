"""Trainings with random callbacks: called.py FIRST COUNT FOLDER MODE, one line for each.

whole: from start to end. half: until a callback of one rank has it stopped. rest: what half left,
to the end. fail: a callback of one rank raises an exception, in a random event.
"""

import random
import sys
from pathlib import Path

import numpy as np

import odyssey
from odyssey import callbacks, data, nn, optim
from odyssey.errors import Stopped

EVENTS = [
    "on_fit_start",
    "on_epoch_start",
    "on_step_end",
    "on_checkpoint",
    "on_validation_end",
    "on_epoch_end",
]


class Wish(callbacks.Callback):
    """One rank wishes that the training ends; all ranks count what they hear, which checkpoints
    keep.
    """

    def __init__(self, event: str, count: int, rank: int, stop: bool = False) -> None:
        self.event, self.count, self.rank, self.stop = event, count, rank, stop
        self.heard = 0

    def hear(self, context: callbacks.Context) -> None:
        self.heard += 1
        if (
            self.heard == self.count
            and context.trainer.comm.rank == self.rank % context.trainer.comm.size
        ):
            if self.stop:
                context.stop = "a wish"
            else:
                context.finish("a wish")

    def state_dict(self) -> dict:
        return {"heard": self.heard}

    def load_state_dict(self, state: dict) -> None:
        self.heard = state["heard"]

    def on_fit_start(self, context: callbacks.Context) -> None:
        self.heard = 0


for _event in EVENTS[2:]:

    def _heard(self: Wish, context: callbacks.Context, event: str = _event) -> None:
        if self.event == event:
            self.hear(context)

    setattr(Wish, _event, _heard)


class Fail(callbacks.Callback):
    def __init__(self, event: str, count: int, rank: int) -> None:
        def fail(context: callbacks.Context) -> None:
            self.left -= 1
            if self.left == 0 and context.trainer.comm.rank == rank % context.trainer.comm.size:
                raise ZeroDivisionError(f"in {event}")

        self.left = count
        setattr(self, event, fail)


def case(number: int, folder: Path, mode: str) -> str:
    r = random.Random(number)
    rng = np.random.default_rng(number)
    samples, size = r.randint(20, 90), r.choice([8, 16, 24])
    x, y = rng.normal(size=(samples, 6)).astype(np.float32), rng.integers(0, 3, samples)
    nn.manual_seed(number)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
    optimizer = r.choice([lambda: optim.SGD(lr=0.3, momentum=0.9), lambda: optim.Adam(lr=0.05)])()
    monitor, mode_of = r.choice(
        [("test_loss", "min"), ("test_accuracy", "max"), ("train_loss", "min")]
    )
    steps, epochs = -(-samples // size), r.randint(2, 6)
    own = [callbacks.LearningRateMonitor()]
    best = callbacks.ModelCheckpoint(monitor, mode_of, save_top_k=r.randint(1, 3))
    own += [best] if r.random() < 0.5 else []
    own += (
        [callbacks.EarlyStopping(monitor, r.randint(1, 3), r.choice([0, 0.02]), mode_of)]
        if r.random() < 0.6
        else []
    )
    own += (
        [callbacks.ReduceLROnPlateau(monitor, 0.5, r.randint(1, 2), 0.05, mode_of)]
        if r.random() < 0.6
        else []
    )
    own += [
        Wish(
            r.choice(["on_step_end", "on_epoch_end"]), r.randint(1, steps * epochs), r.randrange(3)
        )
    ]
    r.shuffle(own)
    every = r.choice([None, 1, 3])
    stop = Wish("on_step_end", r.randint(1, steps * epochs), r.randrange(3), stop=True)
    fail = Fail(r.choice(EVENTS), r.randint(1, 2), r.randrange(3))
    trainer = odyssey.DistributedTrainer(net, optimizer, zero=r.choice([0, 1, 2, 3]), threads=1)
    given = own + {"half": [stop], "fail": [fail]}.get(mode, [])
    test = data.arrays(x[:20], y[:20], classes=3)
    loader = data.DataLoader(data.arrays(x, y, classes=3), size, shuffle=True)
    try:
        history = trainer.fit(
            loader,
            test,
            epochs=epochs,
            callbacks=given,
            checkpoint_dir=folder / str(number),
            checkpoint_every=every,
        )
    except Stopped as end:
        return f"{number} {end}"
    loss = [(r["train_loss"].hex(), r["test_loss"].hex(), r["lr"]) for r in history.records]
    heard = [callback.state_dict() for callback in own]
    return f"{number} {trainer.steps} {trainer.weights_sha256()[:12]} {loss} {heard}"


if __name__ == "__main__":
    first, count = int(sys.argv[1]), int(sys.argv[2])
    for number in range(first, first + count):
        line = case(number, Path(sys.argv[3]), sys.argv[4])
        if odyssey.comm.world().rank == 0:
            print(line, flush=True)
