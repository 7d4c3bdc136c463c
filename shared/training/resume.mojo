"""The whole state of a training between two steps, as checkpoints hold it: what decides its bits, where it is in its data,
parameters and optimizer. The same values as python/odyssey/resume.py and session.py write and read, so that a training
that one language began goes on in the other with the same bits.

What it is not: files (checkpoint.mojo), nor a trainer: it takes names, sizes and addresses.
"""

from std.math import isfinite

from kernels.lanes import Ptr

from .bytes import Bytes
from .checkpoint import Found
from .communicator import Communicator
from .files import address
from .json import Json, JsonList, JsonObject, json, null, parse_json
from .safetensors import TensorData, TensorFile, count
from .sha256 import Sha256
from .snapshot import Snapshot, step_name


def probes() -> List[Int]:
    """Steps whose learning-rate factor is compared: schedules are functions and cannot be.

    Returns:
        0, 1, 2, 5, 10, ... 500,000.
    """
    var steps: List[Int] = [0]
    for k in range(6):
        for n in [1, 2, 5]:
            steps.append(n * 10**k)
    return steps^


struct Configuration(Copyable, Movable):
    """What decides the bits of a training, by the names that users know it by; not ranks, workers and threads.

    Made in pieces: `of_model`, `of_optimizer`, `of_training`, `of_data`, each once, then `json`.
    """

    var _keys: List[String]
    var _values: List[Json]

    def __init__(out self):
        """Nothing yet."""
        self._keys = List[String]()
        self._values = List[Json]()

    def of_model(
        mut self,
        names: List[String],
        shapes: List[List[Int]],
        layers: List[String],
        loss: String,
    ):
        """The model.

        Args:
            names: Of its parameters, in order.
            shapes: Their sizes.
            layers: The types of the model and of all modules in it, in order, as Python's model has them.
            loss: The type of the loss, such as CrossEntropyLoss.
        """
        var model = JsonList()
        for i in range(len(names)):
            var one = JsonList()
            one.append(json(names[i]))
            one.append(JsonList(shapes[i]).json())
            model.append(one.json())
        var types = JsonList()
        for layer in layers:
            var one = JsonList()
            one.append(json(layer))
            types.append(one.json())
        self._set("model", model.json())
        self._set("layers", types.json())
        self._set("loss", json(loss))

    def of_optimizer(
        mut self,
        kind: String,
        lr: Float64,
        settings: List[Tuple[String, Float64]],
    ):
        """The optimizer.

        Args:
            kind: SGD, Adam or AdamW.
            lr: The rate that it started with.
            settings: The others by name; beta1 and beta2 are the betas of Python, nesterov is not 0 or 0.
        """
        var names: List[String] = ["lr"]
        var values: List[Json] = [json(lr)]
        var betas = JsonList()
        for one in settings:
            if one[0] == "beta1" or one[0] == "beta2":
                betas.append(json(one[1]))
                if one[0] == "beta2":
                    names.append("betas")
                    values.append(betas.json())
                continue
            names.append(one[0])
            values.append(
                json(one[1] != 0) if one[0] == "nesterov" else json(one[1])
            )
        var order = List[Int]()
        for i in range(len(names)):
            order.append(i)

        def before(a: Int, b: Int) {imm names} -> Bool:
            return names[a] < names[b]

        sort(order, before)
        var sorted = JsonList()
        for i in order:
            var pair = JsonList()
            pair.append(json(names[i]))
            pair.append(values[i].copy())
            sorted.append(pair.json())
        var made = JsonList()
        made.append(json(kind))
        made.append(sorted.json())
        self._set("optimizer", made.json())

    def of_training(
        mut self,
        shard_size: Int,
        seed: UInt64,
        clip_norm: Optional[Float64],
        factors: List[Float64],
    ):
        """The trainer's settings.

        Args:
            shard_size: Samples of a shard.
            seed: Of dropout.
            clip_norm: The global norm that gradients are scaled down to.
            factors: The schedule's at the steps of `probes`.
        """
        self._set("shard size", json(shard_size))
        self._set("seed", Json(String(seed)))
        var precision = JsonList()
        precision.append(json(String("fp32")))
        precision.append(json(0))
        self._set("precision", precision.json())
        self._set("clip norm", json(clip_norm.value()) if clip_norm else null())
        self._set("reduction", json(String("tree")))
        var scaling = JsonList()
        scaling.append(json(String("none")))
        scaling.append(null())
        self._set("learning-rate scaling", scaling.json())
        var schedule = JsonList()
        for factor in factors:
            schedule.append(json(factor))
        self._set("schedule", schedule.json())

    def of_data(
        mut self,
        batch_size: Int,
        samples: Int,
        digest: String,
        seed: UInt64,
        shuffle: Bool,
        drop_last: Bool,
    ):
        """The data and their order.

        Args:
            batch_size: Samples of an optimizer step: of the loader's batch, times the accumulation steps.
            samples: Of the data set.
            digest: What `data_digest` says of it.
            seed: Of the orders.
            shuffle: Whether each epoch has its own.
            drop_last: Whether a short last batch is left out.
        """
        self._set("batch size", json(batch_size))
        var data = JsonList()
        data.append(json(samples))
        data.append(json(digest))
        self._set("data set", data.json())
        var order = JsonList()
        order.append(Json(String(seed)))
        order.append(json(shuffle))
        order.append(null())
        self._set("data order", order.json())
        self._set("short last batch", json(not drop_last))

    def json(self) -> Json:
        """What was set.

        Returns:
            An object.
        """
        var made = JsonObject()
        for i in range(len(self._keys)):
            made.set(self._keys[i], self._values[i])
        return made.json()

    def check(self, values: Json, name: String) raises:
        """Refuses a checkpoint of another training, which would go on with other bits.

        Args:
            values: What the checkpoint holds beside tensors.
            name: Of the checkpoint.

        Raises:
            Error: what differs.
        """
        var saved = _entry(values, "configuration", name)
        for i in range(len(self._keys)):
            ref key = self._keys[i]
            if not saved.has(key):
                raise Error(
                    "[resume] ",
                    name,
                    " says nothing of the ",
                    key,
                    "; use another checkpoint, or start anew",
                )
            if saved.get(key) != self._values[i]:
                raise Error(
                    "[resume] ",
                    name,
                    " was made with ",
                    key,
                    " ",
                    _brief(saved.get(key)),
                    ", this training has ",
                    _brief(self._values[i]),
                    "; give the same, or start anew in another directory",
                )

    def _set(mut self, key: String, var value: Json):
        self._keys.append(key)
        self._values.append(value^)


def data_digest(
    samples: Int,
    numbers: Int,
    channels: Int,
    pixels: Int,
    of_bytes: Bool,
    labels: Int,
    scale: Ptr,
    shift: Ptr,
) -> String:
    """What a checkpoint keeps of a data set: a digest of its first, middle and last sample, normalised, and their labels.

    Args:
        samples: How many there are.
        numbers: Of one sample.
        channels: Of one sample.
        pixels: Address of (samples, numbers), uint8 or float32.
        of_bytes: Whether they are uint8.
        labels: Address of (samples) int32.
        scale: What the numbers of each channel are multiplied with.
        shift: What is added then.

    Returns:
        16 hexadecimal digits.
    """
    var rows = List[Int]()
    for row in [0, samples // 2, samples - 1]:
        if row not in rows:
            rows.append(row)
    var images = List[Float32]()
    var names = List[Int32]()
    var bytes = Pointer[UInt8, ImmUntrackedOrigin](unsafe_from_address=pixels)
    var floats = Pointer[Float32, ImmUntrackedOrigin](
        unsafe_from_address=pixels
    )
    var label = Pointer[Int32, ImmUntrackedOrigin](unsafe_from_address=labels)
    for row in rows:
        for i in range(numbers):
            var at = row * numbers + i
            var x = Float32(bytes[unsafe_offset=at]) if of_bytes else floats[
                unsafe_offset=at
            ]
            var c = i // (numbers // channels)
            images.append(x * scale[unsafe_offset=c])
        names.append(label[unsafe_offset=row])
    # rounded twice, as numpy does: in one expression the compiler makes one fused operation of both
    for i in range(len(images)):
        var c = i % numbers // (numbers // channels)
        images[i] += shift[unsafe_offset=c]
    var made = Sha256()
    made.update(_bytes_of(Int(images.unsafe_ptr()), 4 * len(images)))
    made.update(_bytes_of(Int(names.unsafe_ptr()), 4 * len(names)))
    _ = images^
    _ = names^
    return String(made.hex()[byte=0:16])


@fieldwise_init
struct Cursor(Copyable, Movable):
    """Where a training is in its data: the next step is number `step` of epoch `epoch`, both from 0.
    """

    var epoch: Int
    """Epochs that are done."""
    var step: Int
    """Optimizer steps of this one that are done."""
    var loader_epoch: Int
    """The epoch as the loader counts them."""
    var samples: Int
    """That steps have consumed so far, in all epochs."""


struct Progress(Copyable, Movable):
    """How far a training is, and what it has done."""

    var cursor: Cursor
    """Where it is in its data."""
    var loss: Float64
    """Sum of the losses of the epoch that is under way."""
    var correct: Float64
    """Its correct predictions."""
    var samples: Int
    """Its samples."""
    var steps: Int
    """Its steps."""
    var seconds: Float64
    """What they have taken."""
    var epochs: Int
    """How many the training is to have."""
    var records: List[Json]
    """Of the epochs that are done, as `epoch_record` makes them."""
    var total_steps: Int
    """Of the epochs that are done."""
    var total_samples: Int
    """Of the epochs that are done."""
    var total_seconds: Float64
    """In their training steps."""
    var total_time: Float64
    """With evaluation."""

    def __init__(out self, epochs: Int):
        """At the beginning.

        Args:
            epochs: How many the training is to have.
        """
        self.cursor = Cursor(0, 0, 0, 0)
        self.loss = 0
        self.correct = 0
        self.samples = 0
        self.steps = 0
        self.seconds = 0
        self.epochs = epochs
        self.records = List[Json]()
        self.total_steps = 0
        self.total_samples = 0
        self.total_seconds = 0
        self.total_time = 0

    def __init__(out self, values: Json, name: String) raises:
        """As a checkpoint says it.

        Args:
            values: What it holds beside tensors.
            name: Of the checkpoint.

        Raises:
            Error: it does not say it.
        """
        try:
            var at = values.get("cursor")
            var tally = values.get("tally")
            var history = values.get("history")
            self.cursor = Cursor(
                _whole(at, "epoch"),
                _whole(at, "step"),
                _whole(at, "loader_epoch"),
                _whole(at, "samples"),
            )
            self.loss = tally.get("loss").number()
            self.correct = tally.get("correct").number()
            self.samples = _whole(tally, "samples")
            self.steps = _whole(tally, "steps")
            self.seconds = values.get("seconds").number()
            self.epochs = _whole(values, "epochs")
            self.records = history.get("records").items()
            self.total_steps = _whole(history, "steps")
            self.total_samples = _whole(history, "samples")
            self.total_seconds = history.get("seconds").number()
            self.total_time = history.get("total_time").number()
        except e:
            raise Error(
                "[resume] ", name, " does not say where the training is: ", e
            )


def epoch_record(
    epoch: Int,
    loss: Float64,
    accuracy: Float64,
    seconds: Float64,
    samples_per_second: Float64,
    test_loss: Optional[Float64],
    test_accuracy: Optional[Float64],
) -> Json:
    """The record of an epoch, by the names that Python gives its parts.

    Args:
        epoch: From 1.
        loss: Mean over its samples.
        accuracy: Share of them that was right.
        seconds: In training steps.
        samples_per_second: Of all ranks together.
        test_loss: On the validation set.
        test_accuracy: On the validation set.

    Returns:
        An object.
    """
    var made = JsonObject()
    made.set("epoch", epoch)
    made.set("train_loss", loss)
    made.set("train_accuracy", accuracy)
    made.set("samples_per_second", samples_per_second)
    made.set("seconds", seconds)
    made.set("bytes_per_step", null())
    made.set("bytes_per_step_uncompressed", null())
    made.set("test_loss", json(test_loss.value()) if test_loss else null())
    made.set(
        "test_accuracy",
        json(test_accuracy.value()) if test_accuracy else null(),
    )
    return made.json()


def checkpoint_values(
    configuration: Configuration,
    progress: Progress,
    *,
    optimizer_steps: Int,
    lr: Float64,
    ranks: Int,
    workers: Int = 1,
) -> Json:
    """What a checkpoint holds beside tensors.

    Args:
        configuration: What decides the bits.
        progress: How far the training is.
        optimizer_steps: Steps that the optimizer has taken.
        lr: Its rate, without the schedule's factor.
        ranks: How many there are.
        workers: Of each of them.

    Returns:
        An object.
    """
    var optimizer = JsonObject()
    optimizer.set("steps", optimizer_steps)
    optimizer.set("lr", lr)
    var scaler = JsonObject()
    scaler.set("scale", Float64(1))
    scaler.set("good_steps", 0)
    scaler.set("skipped", 0)
    var scaling = JsonList()
    scaling.append(json(Float64(1)))
    scaling.append(json(False))
    var cursor = JsonObject()
    cursor.set("epoch", progress.cursor.epoch)
    cursor.set("step", progress.cursor.step)
    cursor.set("loader_epoch", progress.cursor.loader_epoch)
    cursor.set("samples", progress.cursor.samples)
    var tally = JsonObject()
    tally.set("loss", progress.loss)
    tally.set("correct", progress.correct)
    tally.set("counted", Float64(progress.samples))
    tally.set("samples", progress.samples)
    tally.set("steps", progress.steps)
    tally.set("extra", JsonObject().json())
    var records = JsonList()
    for record in progress.records:
        records.append(record)
    var history = JsonObject()
    history.set("records", records.json())
    history.set("steps", progress.total_steps)
    history.set("samples", progress.total_samples)
    history.set("seconds", progress.total_seconds)
    history.set("total_time", progress.total_time)
    var numerics = JsonObject()
    numerics.set("row", 0)
    numerics.set("gone_back", JsonList().json())
    numerics.set("left_out", JsonList().json())
    var values = JsonObject()
    values.set("optimizer", optimizer.json())
    values.set("scaler", scaler.json())
    values.set("lr_scaling", scaling.json())
    values.set("configuration", configuration.json())
    values.set("bucket size", null())
    values.set("ranks", ranks)
    values.set(
        "layout",
        String(
            "dp(",
            ranks * workers,
            ") x pp(1) x tp(1), zero 0, ",
            workers,
            " workers",
        ),
    )
    values.set("residuals", JsonObject().json())
    values.set("cursor", cursor.json())
    values.set("seconds", progress.seconds)
    values.set("tally", tally.json())
    values.set("history", history.json())
    values.set("numerics", numerics.json())
    values.set("epochs", progress.epochs)
    values.set("origin", null())
    return values.json()


def optimizer_state(values: Json, name: String) raises -> Tuple[Int, Float64]:
    """What a checkpoint says of the optimizer.

    Args:
        values: What it holds beside tensors.
        name: Of the checkpoint.

    Returns:
        The steps that it has taken, and its rate.

    Raises:
        Error: it says nothing of it.
    """
    var found = _entry(values, "optimizer", name)
    try:
        return (_whole(found, "steps"), found.get("lr").number())
    except e:
        raise Error(
            "[resume] ", name, ": its state of the optimizer is not right: ", e
        )


def add_tensors(
    mut snapshot: Snapshot,
    stem: String,
    prefix: String,
    names: List[String],
    shapes: List[List[Int]],
    offsets: List[Int],
    arena: Ptr,
):
    """Puts the tensors of an arena into a snapshot: parameters, or a state array of the optimizer.

    Args:
        snapshot: Where to.
        stem: The file: parameters or optimizer.
        prefix: Before the names: nothing, or that of the state array and a stroke, such as momentum/.
        names: Of the parameters.
        shapes: Their sizes.
        offsets: Where they begin in the arena, in floats.
        arena: The floats.
    """
    for i in range(len(names)):
        snapshot.add(
            stem, prefix + names[i], shapes[i], arena.unsafe_offset(offsets[i])
        )


def take_tensors(
    snapshot: Snapshot,
    stem: String,
    prefix: String,
    names: List[String],
    shapes: List[List[Int]],
    offsets: List[Int],
    arena: Ptr,
    name: String,
) raises:
    """Puts the tensors of a snapshot back into an arena; what is between them stays.

    Args:
        snapshot: Where from.
        stem: The file: parameters or optimizer.
        prefix: Before the names.
        names: Of the parameters.
        shapes: Their sizes.
        offsets: Where they begin in the arena, in floats.
        arena: Where to.
        name: Of the checkpoint.

    Raises:
        Error: one is missing, or of another kind. The arena is not to be used then.
    """
    for i in range(len(names)):
        try:
            snapshot.floats(
                stem,
                prefix + names[i],
                shapes[i],
                arena.unsafe_offset(offsets[i]),
            )
        except e:
            raise Error("[resume] ", name, ": ", e)


def share[C: Communicator](comm: C, mut found: Found, error: String) raises:
    """Gives what rank 0 has read to all ranks; a collective call.

    Parameters:
        C: What connects them.

    Args:
        comm: The ranks.
        found: On rank 0 what it has read; on the others it is replaced.
        error: On rank 0 what it could not read, else nothing: it is raised on all ranks.

    Raises:
        Error: what rank 0 gave, or MPI failed.
    """
    var head = JsonObject()
    if comm.rank() == 0:
        head.set("error", error)
        var lines = JsonList()
        for line in found.refused:
            lines.append(json(line))
        head.set("refused", lines.json())
        var table = JsonList()
        if found.snapshot:
            ref one = found.snapshot.value()
            head.set("step", one.step)
            head.set("values", one.values)
            for i in range(len(one.stems)):
                for tensor in one.files[i].tensors:
                    var row = JsonList()
                    row.append(json(one.stems[i]))
                    row.append(json(tensor.name))
                    row.append(json(tensor.dtype))
                    row.append(JsonList(tensor.shape).json())
                    row.append(json(len(tensor.data)))
                    table.append(row.json())
        head.set("table", table.json())
    var text = comm.broadcast_text(head.json().text)
    var told = parse_json(text.as_bytes(), "what rank 0 says")
    var problem = told.get("error").string()
    if problem != "":
        raise Error(problem)
    if comm.rank() != 0:
        found.refused.clear()
        for line in told.get("refused").items():
            found.refused.append(line.string())
        found.snapshot = None
        if told.has("step"):
            var made = Snapshot(told.get("step").integer(), told.get("values"))
            for row in told.get("table").items():
                var cells = row.items()
                var shape = List[Int]()
                for n in cells[3].items():
                    shape.append(n.integer())
                made.put(
                    cells[0].string(),
                    TensorData(
                        cells[1].string(),
                        cells[2].string(),
                        shape^,
                        List[UInt8](length=cells[4].integer(), fill=0),
                    ),
                )
            found.snapshot = made^
    if found.snapshot:
        ref one = found.snapshot.value()
        for i in range(len(one.stems)):
            for ref tensor in one.files[i].tensors:
                comm.broadcast(address(tensor.data), len(tensor.data))


def _bytes_of(at: Int, n: Int) -> Bytes:
    return Bytes(
        unsafe_ptr=Pointer[UInt8, ImmUntrackedOrigin](unsafe_from_address=at),
        length=n,
    )


def _entry(values: Json, key: String, name: String) raises -> Json:
    if not values.has(key) or not values.get(key).is_object():
        raise Error(
            "[resume] ",
            name,
            " has no ",
            key,
            "; it was not written by a trainer",
        )
    return values.get(key)


def _whole(values: Json, key: String) raises -> Int:
    var n = values.get(key).integer()
    if n < 0:
        raise Error(key, " is ", n)
    return n


def _brief(value: Json) -> String:
    if value.text.byte_length() <= 120:
        return value.text
    return String(value.text[byte=0:117], "...")
