"""The safetensors format: the header made from tensors, and parsed from bytes that nobody has vouched for.

A file is 8 bytes (length of the JSON, little-endian), the JSON, then the data of all tensors without gaps
(https://github.com/huggingface/safetensors). The limits and the order are those of
python/odyssey/checkpoints/header.py: the same tensors give the same bytes in both languages.
"""

from std.collections import Set
from std.memory import unsafe_memcpy

from kernels.lanes import BytePtr, Ptr

from .files import File, address
from .json import Json, JsonList, JsonObject, json, parse_json

comptime HEADER_LIMIT = 16 << 20
"""Bytes of JSON."""
comptime TENSORS_LIMIT = 100_000
"""Tensors of a file."""
comptime RANK_LIMIT = 8
"""Dimensions of a tensor."""
comptime NAME_LIMIT = 512
"""Characters of a tensor's name."""

comptime _LENGTH = 8  # bytes of the length


@fieldwise_init
struct Place(Copyable, Equatable, Movable):
    """One tensor of a file: bytes `begin` to `end` of the data behind the header.
    """

    var name: String
    """What it is called."""
    var dtype: String
    """What its elements are, such as F32."""
    var shape: List[Int]
    """Its sizes."""
    var begin: Int
    """Its first byte."""
    var end: Int
    """One past its last."""

    def __eq__(self, other: Self) -> Bool:
        """Whether all is the same.

        Args:
            other: The other.

        Returns:
            True if it is.
        """
        return (
            self.name == other.name
            and self.dtype == other.dtype
            and self.shape == other.shape
            and self.begin == other.begin
            and self.end == other.end
        )

    def json(self) -> JsonObject:
        """It as a header says it: dtype, shape and data_offsets.

        Returns:
            An object.
        """
        var made = JsonObject()
        made.set("dtype", self.dtype)
        made.set("shape", JsonList(self.shape).json())
        made.set("data_offsets", JsonList([self.begin, self.end]).json())
        return made^


@fieldwise_init
struct TensorData(Copyable, Movable):
    """A tensor in memory: a name, and bytes in C order, little-endian."""

    var name: String
    """What it is called."""
    var dtype: String
    """What its elements are, such as F32."""
    var shape: List[Int]
    """Its sizes."""
    var data: List[UInt8]
    """Its bytes."""


struct TensorFile(Copyable, Movable):
    """Tensors by their names: what one safetensors file holds."""

    var tensors: List[TensorData]
    """The tensors."""

    def __init__(out self):
        """No tensors."""
        self.tensors = List[TensorData]()

    def add(mut self, name: String, shape: List[Int], data: Ptr):
        """Adds a copy of a tensor of floats.

        Args:
            name: What it is called.
            shape: Its sizes.
            data: Its floats, in C order.
        """
        var bytes = 4 * count(shape)
        var copy = List[UInt8](length=bytes, fill=0)
        unsafe_memcpy(
            dest=address(copy), src=data.unsafe_bitcast[UInt8](), count=bytes
        )
        self.tensors.append(TensorData(name, "F32", shape.copy(), copy^))

    def names(self) -> List[String]:
        """What the tensors are called.

        Returns:
            Their names.
        """
        var found = List[String]()
        for one in self.tensors:
            found.append(one.name)
        return found^

    def floats(self, name: String, shape: List[Int], into: Ptr) raises:
        """Copies a tensor of floats out.

        Args:
            name: What it is called.
            shape: The sizes that it must have.
            into: Where its floats go.

        Raises:
            Error: it is missing, or of another dtype or shape.
        """
        for one in self.tensors:
            if one.name != name:
                continue
            if one.dtype != "F32" or one.shape != shape:
                raise Error(
                    name,
                    " is ",
                    one.dtype,
                    " ",
                    JsonList(one.shape).json(),
                    "; F32 ",
                    JsonList(shape).json(),
                    " is needed",
                )
            unsafe_memcpy(
                dest=into.unsafe_bitcast[UInt8](),
                src=address(one.data),
                count=len(one.data),
            )
            return
        raise Error(
            name, " is missing; F32 ", JsonList(shape).json(), " is needed"
        )


def count(shape: List[Int]) -> Int:
    """How many elements a tensor of these sizes has.

    Args:
        shape: The sizes.

    Returns:
        Their product.
    """
    var n = 1
    for one in shape:
        n *= one
    return n


def width(dtype: String) -> Int:
    """Bytes of an element.

    Args:
        dtype: Its name.

    Returns:
        The number, 0 for an unknown name.
    """
    if dtype == "F64" or dtype == "I64" or dtype == "U64":
        return 8
    if dtype == "F32" or dtype == "I32" or dtype == "U32":
        return 4
    if dtype == "F16" or dtype == "BF16" or dtype == "I16" or dtype == "U16":
        return 2
    return 1 if dtype == "I8" or dtype == "U8" or dtype == "BOOL" else 0


def name_problem(name: String) -> String:
    """What is wrong with the name of a tensor.

    Args:
        name: The name.

    Returns:
        The problem, or nothing.
    """
    var right = 1 <= name.byte_length() <= NAME_LIMIT
    for one in name.as_bytes():
        var c = Int(one)
        right = right and (
            45 <= c <= 57 or 65 <= c <= 90 or 97 <= c <= 122 or c == 95
        )
    if not right:
        return String(
            "a tensor's name is 1 to ",
            NAME_LIMIT,
            " characters of A-Z a-z 0-9 _ . / -",
        )
    var whole = String("/", name, "/")
    if name.startswith("/") or "/../" in whole:
        return "a tensor's name is neither absolute nor has .. in it"
    return ""


def check_place(name: String, entry: Json, space: Int) raises -> Place:
    """The tensor that a file describes, if it can be one.

    Args:
        name: What it is called.
        entry: An object with dtype, shape and data_offsets.
        space: Bytes of data that there are.

    Returns:
        Its place.

    Raises:
        Error: it cannot be one.
    """
    var problem = name_problem(name)
    if problem != "":
        raise Error(json(name), ": ", problem)
    var dtype = entry.get("dtype")
    var kind = dtype.string() if dtype.is_string() else String()
    if width(kind) == 0:
        raise Error(name, ": there is no dtype ", dtype)
    var shape = _whole_numbers(entry.get("shape"), name, "a shape")
    if len(shape) > RANK_LIMIT:
        raise Error(name, ": a shape has at most ", RANK_LIMIT, " numbers")
    var offsets = _whole_numbers(entry.get("data_offsets"), name, "an offset")
    if len(offsets) != 2 or not offsets[0] <= offsets[1] <= space:
        raise Error(
            name,
            ": bytes ",
            entry.get("data_offsets"),
            " are not within the ",
            space,
            " bytes of data",
        )
    var bytes = width(kind)
    for n in shape:
        if n > 0 and bytes > space // n:
            bytes = space + 1  # whatever follows, unless that is 0
        else:
            bytes *= n
    if bytes != offsets[1] - offsets[0]:
        raise Error(
            name,
            ": ",
            kind,
            " of shape ",
            entry.get("shape"),
            " is not ",
            offsets[1] - offsets[0],
            " bytes",
        )
    return Place(name, kind, shape^, offsets[0], offsets[1])


def check_tiling(places: List[Place], space: Int) raises:
    """Refuses tensors that leave gaps, overlap, or do not fill the data exactly.

    Args:
        places: The tensors.
        space: Bytes of data.

    Raises:
        Error: they do.
    """

    def before(a: Int, b: Int) {imm places} -> Bool:
        ref x = places[a]
        ref y = places[b]
        return x.begin < y.begin or (x.begin == y.begin and x.end < y.end)

    var order = List[Int]()
    for i in range(len(places)):
        order.append(i)
    sort(order, before)
    var at = 0
    for i in order:
        if places[i].begin != at:
            raise Error(
                places[i].name,
                ": its bytes begin at ",
                places[i].begin,
                ", not at ",
                at,
                ": a gap or an overlap",
            )
        at = places[i].end
    if at != space:
        raise Error(
            "the tensors fill ", at, " bytes, the file has ", space, " of data"
        )


def header_length(first: List[UInt8], size: Int) raises -> Int:
    """The bytes of JSON that a file says it has; checked before anything is allocated for them.

    Args:
        first: The first bytes of the file, up to 8.
        size: Bytes of the file.

    Returns:
        The length.

    Raises:
        Error: there cannot be so many.
    """
    if len(first) != _LENGTH:
        raise Error(size, " bytes are no safetensors file")
    var length = UInt64(0)
    for i in range(_LENGTH):
        length |= UInt64(first[i]) << UInt64(8 * i)
    if length < 2 or length > UInt64(min(HEADER_LIMIT, size - _LENGTH)):
        raise Error(
            "a header of ",
            length,
            " bytes is not within the file's ",
            size,
            ", at most ",
            HEADER_LIMIT,
        )
    return Int(length)


def parse_header(data: List[UInt8], size: Int) raises -> List[Place]:
    """The tensors of a file.

    Args:
        data: Its first bytes, length and JSON at least.
        size: How many it has.

    Returns:
        The tensors, in the order of the header.

    Raises:
        Error: the header is none, or does not describe exactly the file's bytes.
    """
    var first = List[UInt8](Span(data)[0 : min(_LENGTH, len(data))])
    var length = header_length(first, size)
    if len(data) < _LENGTH + length:
        raise Error("the header ends early")
    var text = Span(data)[_LENGTH : _LENGTH + length]
    if text[0] != 123:
        raise Error("the header is no JSON object")
    var found = parse_json(text, "the header")
    var keys = found.keys()
    var values = found.members()
    var space = size - _LENGTH - length
    var places = List[Place]()
    for i in range(len(keys)):
        if keys[i] == "__metadata__":
            for value in values[i].members():
                if not value.is_string():
                    raise Error(
                        "the header's __metadata__ is not an object of texts"
                    )
            continue
        if len(places) == TENSORS_LIMIT:
            raise Error("it has more than ", TENSORS_LIMIT, " tensors")
        if not values[i].is_object() or not _same_names(
            values[i].keys(), ["dtype", "shape", "data_offsets"]
        ):
            raise Error(
                json(keys[i]), ": a tensor has dtype, shape and data_offsets"
            )
        places.append(check_place(keys[i], values[i], space))
    check_tiling(places, space)
    return places^


struct Header(Movable):
    """The header of a file that is to be written."""

    var bytes: List[UInt8]
    """Length and JSON."""
    var places: List[Place]
    """The tensors, in the order of the data."""
    var order: List[Int]
    """Which of the given tensors each of them is."""

    def __init__(out self, file: TensorFile) raises:
        """Wide dtypes come first, so each tensor is aligned; then by name.

        Args:
            file: The tensors.

        Raises:
            Error: a name, a dtype or sizes that the format, or its limits, do not have.
        """
        ref tensors = file.tensors
        var seen = Set[String]()
        if len(tensors) > TENSORS_LIMIT:
            raise Error(len(tensors), " tensors are more than ", TENSORS_LIMIT)
        for one in tensors:
            var problem = name_problem(one.name)
            if problem == "" and one.name in seen:
                problem = "two tensors have this name"
            if problem == "" and width(one.dtype) == 0:
                problem = String("there is no dtype ", one.dtype)
            if problem == "" and len(one.shape) > RANK_LIMIT:
                problem = String(len(one.shape), " dimensions are too many")
            if problem == "" and len(one.data) != width(one.dtype) * count(
                one.shape
            ):
                problem = "its bytes are not those of its shape"
            if problem != "":
                raise Error(json(one.name), ": ", problem)
            seen.add(one.name)

        def before(a: Int, b: Int) {imm tensors} -> Bool:
            var x = width(tensors[a].dtype)
            var y = width(tensors[b].dtype)
            return x > y or (x == y and tensors[a].name < tensors[b].name)

        self.order = List[Int]()
        for i in range(len(tensors)):
            self.order.append(i)
        sort(self.order, before)
        self.places = List[Place]()
        var at = 0
        var entries = JsonObject()
        for i in self.order:
            ref one = tensors[i]
            var place = Place(
                one.name,
                one.dtype,
                one.shape.copy(),
                at,
                at + len(one.data),
            )
            entries.set(one.name, place.json().json())
            at = place.end
            self.places.append(place^)
        var text = List[UInt8](entries.json().text.as_bytes())
        while len(text) % _LENGTH:
            text.append(32)
        if len(text) > HEADER_LIMIT:
            raise Error(
                "a header of ", len(text), " bytes; use fewer tensors per file"
            )
        self.bytes = List[UInt8]()
        for i in range(_LENGTH):
            self.bytes.append(UInt8((len(text) >> (8 * i)) & 255))
        self.bytes.extend(text^)


def save_tensors(path: String, file: TensorFile) raises:
    """Writes a safetensors file and flushes it to the disk; none may have this name.

    Args:
        path: Its name.
        file: The tensors.

    Raises:
        Error: the system's words, or what the format does not have.
    """
    write_tensors(path, Header(file), file)


def write_tensors(path: String, header: Header, file: TensorFile) raises:
    """As `save_tensors`, with a header that has been made.

    Args:
        path: Its name.
        header: The header of the tensors.
        file: The tensors.

    Raises:
        Error: the system's words.
    """
    var out = File.new(path)
    out.write(Span(header.bytes))
    for i in header.order:
        out.write(Span(file.tensors[i].data))
    out.sync()


def load_tensors(path: String) raises -> TensorFile:
    """Reads a safetensors file; of the header's sizes only those are believed that the file can have.

    Args:
        path: Its name.

    Returns:
        The tensors, in the order of the header.

    Raises:
        Error: the system's words, or why it is no such file.
    """
    var file = File.reading(path, follow=True)
    var size = file.size()
    var start = _LENGTH + header_length(file.read(min(_LENGTH, size)), size)
    var found = TensorFile()
    for place in parse_header(file.read(start), size):
        found.tensors.append(
            TensorData(
                place.name,
                place.dtype,
                place.shape.copy(),
                file.read(place.end - place.begin, start + place.begin),
            )
        )
    return found^


def _whole_numbers(value: Json, name: String, what: String) raises -> List[Int]:
    var numbers = List[Int]()
    if not value.is_list():
        raise Error(name, ": ", what, " is a list of whole numbers")
    for one in value.items():
        if not one.is_integer() or one.integer() < 0:
            raise Error(name, ": ", what, " is a list of whole numbers")
        numbers.append(one.integer())
    return numbers^


def _same_names(found: List[String], wanted: List[String]) -> Bool:
    for name in wanted:
        if name not in found:
            return False
    return len(found) == len(wanted)
