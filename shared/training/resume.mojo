"""The state of a training between two steps, as a checkpoint holds it: out of a trainer, and back into one.

The same names and values as python/odyssey/resume.py and session.py write, so each front end goes on from the other's
checkpoints, with the same bits. What must be the same for that is compared by name (`configuration`). What it is not:
files (checkpoint.mojo), or when to save (trainer.mojo).
"""

from std.utils.numerics import nan

from .data import DataLoader
from .engine import Engine
from .history import EpochRecord, Evaluation, History
from .json import Json, JsonList, JsonObject, json, null
from .losses import Loss
from .module import Module
from .optimizers import Optimizer
from .schedules import Schedule
from .sha256 import Sha256
from .snapshot import Snapshot


@fieldwise_init
struct Cursor(ImplicitlyCopyable, Movable):
    """Where a training is in its data: the next step is number `step` of epoch `epoch`, both from 0.
    """

    var epoch: Int
    """Epochs done."""
    var step: Int
    """Steps of the next done."""
    var loader_epoch: Int
    """That epoch as the loader counts them."""
    var samples: Int
    """Samples that steps have consumed so far."""


@fieldwise_init
struct Tally(ImplicitlyCopyable, Movable):
    """What the steps of the epoch under way did so far."""

    var loss: Float64
    """Sum over samples."""
    var correct: Float64
    """Samples that the model named right."""
    var samples: Int
    """How many there were."""
    var steps: Int
    """How many there were."""


struct Progress(Movable):
    """How far a training has come."""

    var cursor: Cursor
    """Where it is in its data."""
    var tally: Tally
    """Of the epoch under way."""
    var history: History
    """Of the epochs done."""
    var seconds: Float64
    """Of the epoch under way."""

    def __init__(out self, loader_epoch: Int):
        """At its beginning.

        Args:
            loader_epoch: The first epoch, as the loader counts them.
        """
        self.cursor = Cursor(0, 0, loader_epoch, 0)
        self.tally = Tally(0, 0, 0, 0)
        self.history = History()
        self.seconds = 0

    def steps(self) -> Int:
        """Steps since it began.

        Returns:
            The number.
        """
        return self.history.steps + self.tally.steps


# --- what must be the same ----------------------------------------------------------------


def configuration[
    M: Module, L: Loss, O: Optimizer
](
    engine: Engine[M, L],
    optimizer: O,
    schedule: Schedule,
    clip_norm: Optional[Float64],
    accumulation_steps: Int,
    loader: DataLoader,
) -> JsonObject:
    """What decides the bits of a training, by the names that users know it by.

    Parameters:
        M: The model's type.
        L: The loss's type.
        O: The optimizer's type.

    Args:
        engine: With the model.
        optimizer: The optimizer.
        schedule: Of its learning rate.
        clip_norm: To which gradients are clipped, if they are.
        accumulation_steps: Loader's batches for one step.
        loader: Of the training data.

    Returns:
        Names and values.
    """
    var model = JsonList()
    ref p = engine.parameters
    for i in range(len(p)):
        var one = JsonList()
        one.append(json(p.names[i]))
        one.append(JsonList(p.shapes[i]).json())
        model.append(one.json())
    var layers = JsonList()
    M.describe(layers)
    var last = JsonList()
    last.append(json(L.name()))
    layers.append(last.json())
    var factors = JsonList()
    factors.append(json(schedule(0)))
    var power = 1
    for _ in range(6):
        for n in [1, 2, 5]:
            factors.append(json(schedule(n * power)))
        power *= 10
    var precision = JsonList()
    precision.append(json(String("fp32")))
    precision.append(json(0))
    var scaling = JsonList()
    scaling.append(json(String("none")))
    scaling.append(null())
    var order = JsonList()
    order.append(Json(String(loader.seed)))
    order.append(json(loader.shuffle))
    order.append(null())
    var out = JsonObject()
    out.set("model", model.json())
    out.set("optimizer", optimizer.description())
    out.set("shard size", engine.layout.shard_size)
    out.set("layers", layers.json())
    out.set("loss", L.name())
    out.set("seed", Json(String(engine.seed)))
    out.set("precision", precision.json())
    out.set("clip norm", json(clip_norm.value()) if clip_norm else null())
    out.set("reduction", String("tree"))
    out.set("learning-rate scaling", scaling.json())
    out.set("schedule", factors.json())
    out.set("batch size", loader.batch_size * accumulation_steps)
    out.set("data set", _samples(loader))
    out.set("data order", order.json())
    out.set("short last batch", not loader.drop_last)
    return out^


def _samples(loader: DataLoader) -> Json:
    """The number of samples, and a hash of the first, the middle and the last of them, normalised.
    """
    ref d = loader.dataset
    var n = len(d)
    var which: List[Int] = [0]
    for i in [n // 2, n - 1]:
        if i != which[len(which) - 1]:
            which.append(i)
    var plane = d.height * d.width
    var size = d.channels * plane
    var numbers = List[Float32](capacity=len(which) * size)
    var labels = List[Int32]()
    for i in which:
        labels.append(d.labels[i])
        for f in range(size):
            var c = f // plane if plane > 1 else 0
            var x = d.pixels[i * size + f].cast[
                DType.float32
            ]() if d.of_bytes() else d.floats[i * size + f]
            numbers.append(
                _product(x, d.scale[unsafe_offset=c]) + d.shift[unsafe_offset=c]
            )
    var digest = Sha256()
    digest.update(
        Span(
            unsafe_ptr=numbers.unsafe_ptr().unsafe_bitcast[UInt8](),
            length=4 * len(numbers),
        )
    )
    digest.update(
        Span(
            unsafe_ptr=labels.unsafe_ptr().unsafe_bitcast[UInt8](),
            length=4 * len(labels),
        )
    )
    _ = numbers^
    _ = labels^
    var out = JsonList()
    out.append(json(n))
    out.append(json(String(digest.hex()[byte=0:16])))
    return out.json()


@no_inline
def _product(a: Float32, b: Float32) -> Float32:
    """A product, rounded before it is added to something, as in NumPy."""
    return a * b


def check_same(saved: Json, now: Json, name: String) raises:
    """Raises if a checkpoint called `name` was made with other settings: going on would be another training.

    Args:
        saved: The configuration in a checkpoint.
        now: This training's.
        name: The checkpoint's.

    Raises:
        Error: They differ, or one is missing.
    """
    for key in now.keys():
        var mine = now.get(key)
        if not saved.has(key):
            raise Error(
                "[resume] ",
                name,
                " says nothing of the ",
                key,
                "; use another directory",
            )
        var theirs = saved.get(key)
        if theirs != mine:
            raise Error(
                "[resume] ",
                name,
                " was made with ",
                key,
                " ",
                _brief(theirs.text),
                ", this training has ",
                _brief(mine.text),
                "; give the same, or start anew in another directory",
            )


def _brief(text: String) -> String:
    if text.byte_length() <= 120:
        return text
    return String(text[byte=0:117], "...")


# --- out of a trainer ---------------------------------------------------------------------


def capture[
    M: Module, L: Loss, O: Optimizer
](
    engine: Engine[M, L],
    optimizer: O,
    configuration: Json,
    progress: Progress,
    step: Int,
    epochs: Int,
) -> Snapshot:
    """What a checkpoint of this moment holds.

    Parameters:
        M: The model's type.
        L: The loss's type.
        O: The optimizer's type.

    Args:
        engine: With the parameters.
        optimizer: With its state.
        configuration: What must be the same to go on.
        progress: How far the training has come.
        step: Number of optimizer steps.
        epochs: How many there are to be.

    Returns:
        The snapshot.
    """
    var at = JsonObject()
    at.set("epoch", progress.cursor.epoch)
    at.set("step", progress.cursor.step)
    at.set("loader_epoch", progress.cursor.loader_epoch)
    at.set("samples", progress.cursor.samples)
    var tally = JsonObject()
    tally.set("loss", progress.tally.loss)
    tally.set("correct", progress.tally.correct)
    tally.set("counted", Float64(progress.tally.samples))
    tally.set("samples", progress.tally.samples)
    tally.set("steps", progress.tally.steps)
    tally.set("extra", JsonObject().json())
    var rule = JsonObject()
    rule.set("steps", optimizer.steps())
    rule.set("lr", optimizer.rate())
    var scaler = JsonObject()
    scaler.set("scale", Float64(1))
    scaler.set("good_steps", 0)
    scaler.set("skipped", 0)
    var scaling = JsonList()
    scaling.append(json(Float64(1)))
    scaling.append(json(False))
    var numerics = JsonObject()
    numerics.set("row", 0)
    numerics.set("gone_back", JsonList().json())
    numerics.set("left_out", JsonList().json())
    var values = JsonObject()
    values.set("optimizer", rule.json())
    values.set("scaler", scaler.json())
    values.set("lr_scaling", scaling.json())
    values.set("configuration", configuration)
    values.set("bucket size", null())
    values.set("ranks", engine.layout.ranks)
    values.set(
        "layout",
        String(engine.layout.ranks, " ranks, a Mojo program"),
    )
    values.set("residuals", JsonObject().json())
    values.set("cursor", at.json())
    values.set("seconds", progress.seconds)
    values.set("tally", tally.json())
    values.set("history", _history(progress.history))
    values.set("numerics", numerics.json())
    values.set("epochs", epochs)
    values.set("origin", null())
    var snapshot = Snapshot(step, values.json())
    ref p = engine.parameters
    for i in range(len(p)):
        snapshot.add(
            "parameters",
            p.names[i],
            p.shapes[i],
            engine.arena.unsafe_offset(p.offsets[i]),
        )
    var names = optimizer.state_names()
    for s in range(len(names)):
        for i in range(len(p)):
            snapshot.add(
                "optimizer",
                String(names[s], "/", p.names[i]),
                p.shapes[i],
                optimizer.state_array(s).unsafe_offset(p.offsets[i]),
            )
    return snapshot^


def _history(history: History) -> Json:
    var records = JsonList()
    for r in history.records:
        var one = JsonObject()
        one.set("epoch", r.epoch)
        one.set("train_loss", r.train_loss)
        one.set("train_accuracy", r.train_accuracy)
        one.set("samples_per_second", r.samples_per_second)
        one.set("seconds", r.seconds)
        one.set("bytes_per_step", Float64(0))
        one.set("bytes_per_step_uncompressed", Float64(0))
        one.set("test_loss", json(r.test.value().loss) if r.test else null())
        one.set(
            "test_accuracy",
            json(r.test.value().accuracy) if r.test else null(),
        )
        records.append(one.json())
    var out = JsonObject()
    out.set("records", records.json())
    out.set("steps", history.steps)
    out.set("samples", history.samples)
    out.set("seconds", history.seconds)
    out.set("total_time", history.seconds)
    return out.json()


# --- into a trainer -----------------------------------------------------------------------


def restore[
    M: Module, L: Loss, O: Optimizer
](
    mut engine: Engine[M, L],
    mut optimizer: O,
    snapshot: Snapshot,
    configuration: Json,
    name: String,
) raises:
    """Takes parameters and optimizer state from a snapshot.

    Parameters:
        M: The model's type.
        L: The loss's type.
        O: The optimizer's type.

    Args:
        engine: It gets the parameters.
        optimizer: It gets its state.
        snapshot: A checkpoint.
        configuration: This training's.
        name: The checkpoint's.

    Raises:
        Error: It is of another training, or not complete.
    """
    check_same(
        _entry(snapshot.values, "configuration", name), configuration, name
    )
    ref p = engine.parameters
    var names = optimizer.state_names()
    try:
        for i in range(len(p)):
            snapshot.floats(
                "parameters",
                p.names[i],
                p.shapes[i],
                engine.arena.unsafe_offset(p.offsets[i]),
            )
            for s in range(len(names)):
                snapshot.floats(
                    "optimizer",
                    String(names[s], "/", p.names[i]),
                    p.shapes[i],
                    optimizer.state_array(s).unsafe_offset(p.offsets[i]),
                )
    except e:
        raise Error("[resume] ", name, " is not complete: ", e)


def progress_of[
    O: Optimizer
](mut optimizer: O, values: Json, name: String) raises -> Progress:
    """How far the training had come, and the optimizer's step count and rate.

    Parameters:
        O: The optimizer's type.

    Args:
        optimizer: It gets its step count and rate.
        values: Of the checkpoint.
        name: The checkpoint's.

    Returns:
        The progress.

    Raises:
        Error: Something is missing in the values.
    """
    try:
        var rule = values.get("optimizer")
        optimizer.set_steps(rule.get("steps").integer())
        optimizer.set_rate(rule.get("lr").number())
        if values.get("numerics").get("left_out").text != "[]":
            raise Error(
                "it has left out batches (rollback), which Mojo programs cannot"
            )
        var at = values.get("cursor")
        var progress = Progress(at.get("loader_epoch").integer())
        progress.cursor.epoch = at.get("epoch").integer()
        progress.cursor.step = at.get("step").integer()
        progress.cursor.samples = at.get("samples").integer()
        var tally = values.get("tally")
        progress.tally = Tally(
            tally.get("loss").number(),
            tally.get("correct").number(),
            tally.get("samples").integer(),
            tally.get("steps").integer(),
        )
        progress.seconds = values.get("seconds").number()
        var history = values.get("history")
        progress.history.steps = history.get("steps").integer()
        progress.history.samples = history.get("samples").integer()
        progress.history.seconds = history.get("seconds").number()
        for r in history.get("records").items():
            var test = Optional[Evaluation](None)
            if not r.get("test_accuracy").is_null():
                test = Evaluation(
                    _loss(r.get("test_loss")),
                    r.get("test_accuracy").number(),
                    0,
                )
            progress.history.records.append(
                EpochRecord(
                    r.get("epoch").integer(),
                    _loss(r.get("train_loss")),
                    r.get("train_accuracy").number(),
                    r.get("seconds").number(),
                    r.get("samples_per_second").number(),
                    test,
                )
            )
        return progress^
    except e:
        raise Error(
            "[resume] ", name, " does not say where its training was: ", e
        )


def _loss(value: Json) raises -> Float64:
    """A loss; null stands for one that is not finite, which JSON has no number for.
    """
    return nan[DType.float64]() if value.is_null() else value.number()


def _entry(values: Json, key: String, name: String) raises -> Json:
    if not values.has(key):
        raise Error(
            "[resume] ",
            name,
            " has no ",
            key,
            "; it was not written by a trainer",
        )
    return values.get(key)
