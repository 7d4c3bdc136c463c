"""JSON as manifests use it: a strict reader of text that nobody has vouched for, and a writer that Python's agrees with.

A `Json` is a checked piece of text; it is taken apart as far as somebody asks. So what was read is written again byte
for byte. `JsonObject` and `JsonList` make new text: compact, as `json.dumps(value, separators=(",", ":"))` writes it.
The limits are those of python/odyssey/files.py. What it is not: fast for large documents.
"""

from std.math import isfinite

from .bytes import Bytes, untracked
from .json_reader import (
    _COMMA,
    _LIST,
    _MINUS,
    _OBJECT,
    _QUOTE,
    _Reader,
    _is_digit,
    _to_number,
    _to_text,
)
from .json_text import quoted, shortest


def parse_json(data: Span[UInt8, _], name: String) raises -> Json:
    """The value that a text is.

    Args:
        data: The text.
        name: What it is, for messages.

    Returns:
        The value.

    Raises:
        Error: it is no UTF-8 or no JSON, is nested deeper than DEPTH, names a key twice, or has an integer of more
            than DIGITS digits, a number that is not finite, or half a character.
    """
    return _parsed(untracked(data), name)


def _parsed(data: Bytes, name: String) raises -> Json:
    var reader = _Reader(data, name)
    try:
        _ = StringSpan(from_utf8=data)
    except:
        raise Error(name, " is not JSON: it is no UTF-8")
    reader.skip()
    var start = reader.at
    reader.value(0)
    var end = reader.at
    reader.skip()
    if reader.at != len(data):
        raise reader.wrong("more follows")
    return Json(_to_text(data[start:end]))


struct Json(Copyable, Equatable, Movable, Writable):
    """A JSON value. Two are equal if their texts are."""

    var text: String
    """Checked JSON without space around it."""

    def __init__(out self, text: String):
        """A piece of JSON that has been checked.

        Args:
            text: The piece.
        """
        self.text = text

    def __eq__(self, other: Self) -> Bool:
        """Whether the texts are the same.

        Args:
            other: The other value.

        Returns:
            True if they are.
        """
        return self.text == other.text

    def write_to(self, mut writer: Some[Writer]):
        """Writes the text.

        Args:
            writer: Where it goes.
        """
        writer.write(self.text)

    def is_object(self) -> Bool:
        """Whether it has members.

        Returns:
            True for an object.
        """
        return self._first() == _OBJECT

    def is_list(self) -> Bool:
        """Whether it has items.

        Returns:
            True for a list.
        """
        return self._first() == _LIST

    def is_string(self) -> Bool:
        """Whether it is text.

        Returns:
            True for a string.
        """
        return self._first() == _QUOTE

    def is_null(self) -> Bool:
        """Whether it is nothing.

        Returns:
            True for null.
        """
        return self.text == "null"

    def is_integer(self) -> Bool:
        """Whether it is a number without a fraction or an exponent that 64 bits can hold.

        Returns:
            True for such a number.
        """
        var first = self._first()
        if first != _MINUS and not _is_digit(first):
            return False
        for c in self.text.as_bytes():
            if c != _MINUS and not _is_digit(c):
                return False
        try:
            return String(Int(self.text)) == self.text or self.text == "-0"
        except:
            return False

    def integer(self) raises -> Int:
        """The number.

        Returns:
            The number.

        Raises:
            Error: it is no integer of 64 bits.
        """
        if not self.is_integer():
            raise Error(_brief(self.text), " is no integer")
        return Int(self.text)

    def number(self) raises -> Float64:
        """The number, also where it is written as an integer.

        Returns:
            The number.

        Raises:
            Error: it is no number.
        """
        var first = self._first()
        if first != _MINUS and not _is_digit(first):
            raise Error(_brief(self.text), " is no number")
        return _to_number(self.text)

    def boolean(self) raises -> Bool:
        """The truth.

        Returns:
            True or False.

        Raises:
            Error: it is neither.
        """
        if self.text != "true" and self.text != "false":
            raise Error(_brief(self.text), " is neither true nor false")
        return self.text == "true"

    def string(self) raises -> String:
        """The text that it stands for.

        Returns:
            The text.

        Raises:
            Error: it is no string.
        """
        if not self.is_string():
            raise Error(_brief(self.text), " is no string")
        var reader = _Reader(self.text.as_bytes(), "a text")
        return reader.string()

    def items(self) raises -> List[Json]:
        """What a list has.

        Returns:
            Its values.

        Raises:
            Error: it is no list.
        """
        if not self.is_list():
            raise Error(_brief(self.text), " is no list")
        var found = List[Json]()
        var reader = _Reader(self.text.as_bytes(), "a list")
        reader.at = 1
        reader.skip()
        while reader.peek() != UInt8(93):
            found.append(Json(reader.piece()))
            reader.skip()
            if reader.peek() == _COMMA:
                reader.at += 1
                reader.skip()
        return found^

    def keys(self) raises -> List[String]:
        """What the members of an object are called, in order.

        Returns:
            Their names.

        Raises:
            Error: it is no object.
        """
        var names = List[String]()
        _ = self._members(names)
        return names^

    def members(self) raises -> List[Json]:
        """What the members of an object are, in the order of `keys`.

        Returns:
            Their values.

        Raises:
            Error: it is no object.
        """
        var names = List[String]()
        return self._members(names)

    def has(self, key: String) raises -> Bool:
        """Whether an object has a member of this name.

        Args:
            key: The name.

        Returns:
            True if it has.

        Raises:
            Error: it is no object.
        """
        return key in self.keys()

    def get(self, key: String) raises -> Json:
        """A member of an object.

        Args:
            key: Its name.

        Returns:
            Its value.

        Raises:
            Error: it is no object or has none of this name.
        """
        var names = List[String]()
        var values = self._members(names)
        for i in range(len(names)):
            if names[i] == key:
                return values[i].copy()
        raise Error("there is no ", _brief(key))

    def _members(self, mut names: List[String]) raises -> List[Json]:
        if not self.is_object():
            raise Error(_brief(self.text), " is no object")
        var found = List[Json]()
        var reader = _Reader(self.text.as_bytes(), "an object")
        reader.at = 1
        reader.skip()
        while reader.peek() != UInt8(125):
            names.append(reader.string())
            reader.skip()
            reader.at += 1  # :
            reader.skip()
            found.append(Json(reader.piece()))
            reader.skip()
            if reader.peek() == _COMMA:
                reader.at += 1
                reader.skip()
        return found^

    def _first(self) -> UInt8:
        return self.text.as_bytes()[0] if self.text != "" else 0


struct JsonObject(Copyable, Movable):
    """An object that is being made; members come in the order in which they are set.
    """

    var _text: String

    def __init__(out self):
        """An object without members."""
        self._text = String()

    def set(mut self, key: String, value: Json):
        """Adds a member; its name has not been used before.

        Args:
            key: Its name.
            value: What it is.
        """
        self._text += ("" if self._text == "" else ",") + quoted(key)
        self._text += ":" + value.text

    def set(mut self, key: String, value: Int):
        """Adds an integer.

        Args:
            key: Its name.
            value: The number.
        """
        self.set(key, json(value))

    def set(mut self, key: String, value: Float64):
        """Adds a number; null where it is not finite, which JSON has not.

        Args:
            key: Its name.
            value: The number.
        """
        self.set(key, json(value))

    def set(mut self, key: String, value: Bool):
        """Adds true or false.

        Args:
            key: Its name.
            value: Which.
        """
        self.set(key, json(value))

    def set(mut self, key: String, value: String):
        """Adds a text.

        Args:
            key: Its name.
            value: The text.
        """
        self.set(key, json(value))

    def set(mut self, key: String, value: StringLiteral):
        """Adds a text.

        Args:
            key: Its name.
            value: The text.
        """
        self.set(key, json(String(value)))

    def json(self) -> Json:
        """The object as it is now.

        Returns:
            The value.
        """
        return Json("{" + self._text + "}")


struct JsonList(Copyable, Movable):
    """A list that is being made."""

    var _text: String

    def __init__(out self):
        """An empty list."""
        self._text = String()

    def __init__(out self, numbers: List[Int]):
        """A list of integers.

        Args:
            numbers: The integers.
        """
        self._text = String()
        for n in numbers:
            self.append(json(n))

    def append(mut self, value: Json):
        """Adds a value.

        Args:
            value: What is added.
        """
        self._text += ("" if self._text == "" else ",") + value.text

    def json(self) -> Json:
        """The list as it is now.

        Returns:
            The value.
        """
        return Json("[" + self._text + "]")


def json(value: Int) -> Json:
    """An integer.

    Args:
        value: The number.

    Returns:
        The value.
    """
    return Json(String(value))


def json(value: Float64) -> Json:
    """A number, as Python writes it; null where it is not finite, which JSON has not.

    Args:
        value: The number.

    Returns:
        The value.
    """
    if not isfinite(value):
        return null()
    if value == 0:
        return Json("-0.0" if value.to_bits() >> 63 else "0.0")
    return Json(shortest(value))


def json(value: Bool) -> Json:
    """True or false.

    Args:
        value: Which.

    Returns:
        The value.
    """
    return Json("true" if value else "false")


def json(value: String) -> Json:
    """A text.

    Args:
        value: The text.

    Returns:
        The value.
    """
    return Json(quoted(value))


def null() -> Json:
    """Nothing.

    Returns:
        The value.
    """
    return Json("null")


def _brief(text: String) -> String:
    """What a message may show of a text that nobody has vouched for."""
    var out = String()
    for one in text.codepoints():
        if out.byte_length() >= 60:
            return out + "..."
        out += chr(Int(one)) if 32 <= Int(one) < 127 else String("?")
    return out
