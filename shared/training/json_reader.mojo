"""The grammar of JSON: goes through a text once and raises at the first thing that is not allowed; see json.mojo."""

from std.collections import Set
from std.ffi import external_call
from std.math import isfinite

from .bytes import Bytes, untracked

comptime DEPTH = 32
"""Of nested lists and objects."""
comptime DIGITS = 20
"""Of an integer, its sign included."""

comptime _QUOTE = UInt8(34)
comptime _BACKSLASH = UInt8(92)
comptime _COMMA = UInt8(44)
comptime _COLON = UInt8(58)
comptime _MINUS = UInt8(45)
comptime _LIST = UInt8(91)
comptime _OBJECT = UInt8(123)


def _is_digit(c: UInt8) -> Bool:
    return c >= 48 and c <= 57


def _to_text(data: Span[UInt8, _]) -> String:
    return _copied(untracked(data))


def _copied(data: Bytes) -> String:
    return String(StringSpan(unsafe_from_utf8=data))


def _to_number(text: String) -> Float64:
    """The nearest float64 of a text that is a number."""
    var data = List[UInt8](text.as_bytes())
    data.append(0)
    return external_call["strtod", Float64](data.unsafe_ptr(), Int(0))


struct _Reader(Movable):
    """Goes through a text once; raises at the first thing that is not JSON."""

    var data: Bytes
    var name: String
    var at: Int

    def __init__(out self, data: Span[UInt8, _], name: String):
        self.data = untracked(data)
        self.name = name
        self.at = 0

    def wrong(self, what: String) -> Error:
        return Error(self.name, " is not JSON: at byte ", self.at, " ", what)

    def peek(self) -> UInt8:
        """The next byte; 0, which JSON has not, at the end."""
        return self.data[self.at] if self.at < len(self.data) else 0

    def skip(mut self):
        while True:
            var c = self.peek()
            if c != 32 and c != 9 and c != 10 and c != 13:
                return
            self.at += 1

    def piece(mut self) raises -> String:
        """A value of text that has been checked."""
        var start = self.at
        self.value(0)
        return _to_text(self.data[start : self.at])

    def value(mut self, depth: Int) raises:
        var c = self.peek()
        if c == _QUOTE:
            _ = self.string()
        elif c == _OBJECT or c == _LIST:
            if depth == DEPTH:
                raise Error(self.name, " is nested deeper than ", DEPTH)
            if c == _OBJECT:
                self.object(depth)
            else:
                self.list(depth)
        elif c == _MINUS or _is_digit(c):
            self.number()
        else:
            for word in ["true", "false", "null"]:
                if self.word(String(word)):
                    return
            raise self.wrong("no value begins")

    def word(mut self, word: String) -> Bool:
        var n = word.byte_length()
        if self.at + n > len(self.data):
            return False
        for i in range(n):
            if self.data[self.at + i] != word.as_bytes()[i]:
                return False
        self.at += n
        return True

    def object(mut self, depth: Int) raises:
        var seen = Set[String]()
        self.at += 1
        self.skip()
        if self.peek() == UInt8(125):
            self.at += 1
            return
        while True:
            if self.peek() != _QUOTE:
                raise self.wrong("no key begins")
            var key = self.string()
            if key in seen:
                raise Error(self.name, " names a key twice")
            seen.add(key)
            self.skip()
            if self.peek() != _COLON:
                raise self.wrong("there is no colon")
            self.at += 1
            self.skip()
            self.value(depth + 1)
            self.skip()
            var c = self.peek()
            self.at += 1
            if c == UInt8(125):
                return
            if c != _COMMA:
                raise self.wrong("an object does not go on")
            self.skip()

    def list(mut self, depth: Int) raises:
        self.at += 1
        self.skip()
        if self.peek() == UInt8(93):
            self.at += 1
            return
        while True:
            self.value(depth + 1)
            self.skip()
            var c = self.peek()
            self.at += 1
            if c == UInt8(93):
                return
            if c != _COMMA:
                raise self.wrong("a list does not go on")
            self.skip()

    def number(mut self) raises:
        var start = self.at
        if self.peek() == _MINUS:
            self.at += 1
        var leading = self.at
        var first = self.peek()
        self.digits()
        if first == 48 and self.at > leading + 1:
            raise self.wrong("a number begins with 0")
        var whole = True
        if self.peek() == UInt8(46):
            whole = False
            self.at += 1
            self.digits()
        if self.peek() == UInt8(101) or self.peek() == UInt8(69):
            whole = False
            self.at += 1
            if self.peek() == _MINUS or self.peek() == UInt8(43):
                self.at += 1
            self.digits()
        if whole and self.at - start > DIGITS:
            raise Error(
                self.name,
                " is not JSON that is read here: it has an integer of ",
                self.at - start,
                " digits",
            )
        if not whole and not isfinite(
            _to_number(_to_text(self.data[start : self.at]))
        ):
            raise Error(self.name, " has a number that is out of range")

    def digits(mut self) raises:
        if not _is_digit(self.peek()):
            raise self.wrong("a digit is missing")
        while _is_digit(self.peek()):
            self.at += 1

    def string(mut self) raises -> String:
        self.at += 1
        var out = List[UInt8]()
        while True:
            var c = self.peek()
            if c < 32:
                raise self.wrong("a text does not go on")
            self.at += 1
            if c == _QUOTE:
                return _to_text(Span(out))
            if c != _BACKSLASH:
                out.append(c)
                continue
            c = self.peek()
            self.at += 1
            if c == _QUOTE or c == _BACKSLASH or c == UInt8(47):
                out.append(c)
            elif c == UInt8(98):
                out.append(8)
            elif c == UInt8(102):
                out.append(12)
            elif c == UInt8(110):
                out.append(10)
            elif c == UInt8(114):
                out.append(13)
            elif c == UInt8(116):
                out.append(9)
            elif c == UInt8(117):
                out.extend(chr(self.escaped()).as_bytes())
            else:
                raise self.wrong("an escape is none")

    def escaped(mut self) raises -> Int:
        """The character after \\u; two of them beyond 16 bits."""
        var c = self.four()
        if 0xD800 <= c < 0xDC00:
            if self.peek() == _BACKSLASH:
                self.at += 1
                if self.peek() == UInt8(117):
                    self.at += 1
                    var low = self.four()
                    if 0xDC00 <= low < 0xE000:
                        return 0x10000 + ((c - 0xD800) << 10) + low - 0xDC00
            raise self.wrong("a text has half a character")
        if 0xDC00 <= c < 0xE000:
            raise self.wrong("a text has half a character")
        return c

    def four(mut self) raises -> Int:
        var n = 0
        for _ in range(4):
            var c = Int(self.peek())
            self.at += 1
            if 48 <= c <= 57:
                n = 16 * n + c - 48
            elif 97 <= c <= 102:
                n = 16 * n + c - 87
            elif 65 <= c <= 70:
                n = 16 * n + c - 55
            else:
                raise self.wrong("an escape is none")
        return n
