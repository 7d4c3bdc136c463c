"""Texts and numbers as JSON has them, and as Python's json writes them; values made of them are json.mojo's."""

from std.ffi import c_int, external_call

from .json_reader import _MINUS, _is_digit, _to_text


def quoted(text: String) -> String:
    """A text as JSON has it, of printable ASCII.

    Args:
        text: The text.

    Returns:
        The same in quotes, with escapes.
    """
    var out = String('"')
    for one in text.codepoints():
        var c = Int(one)
        if c == 34 or c == 92:
            out += "\\" + chr(c)
        elif 32 <= c < 127:
            out += chr(c)
        elif c == 10:
            out += "\\n"
        elif c == 13:
            out += "\\r"
        elif c == 9:
            out += "\\t"
        elif c == 8:
            out += "\\b"
        elif c == 12:
            out += "\\f"
        elif c < 0x10000:
            out += _escape(c)
        else:
            out += _escape(0xD800 + ((c - 0x10000) >> 10))
            out += _escape(0xDC00 + ((c - 0x10000) & 0x3FF))
    return out + '"'


def _escape(c: Int) -> String:
    var out = String("\\u")
    for i in range(4):
        var digit = (c >> (12 - 4 * i)) & 15
        out += chr(digit + 48 if digit < 10 else digit + 87)
    return out


def shortest(value: Float64) -> String:
    """The fewest digits that are read again as this number, the nearest of them, as Python's repr has them.

    String(value) is not it: it breaks ties another way, and its 2.105562894956319e+16 is read as the number above.

    Args:
        value: Not infinite and not NaN.

    Returns:
        The digits.
    """
    var room = List[UInt8](length=32, fill=0)
    var format = String("%.*e")
    for places in range(17):
        _ = external_call["snprintf", c_int, num_fixed_args=3](
            room.unsafe_ptr(),
            32,
            format.as_c_string_span().ptr(),
            c_int(places),
            abs(value),
        )
        if _read(room) == abs(value):
            break
        # below a power of two numbers are nearer to each other: the next decimal may be right where the nearest is not
        var at = 0
        while room[at] != 101:
            at += 1
        at -= 1
        while at > 0 and (room[at] == 57 or room[at] == 46):
            if room[at] == 57:
                room[at] = 48
            at -= 1
        room[at] += 1
        if room[at] <= 57 and _read(room) == abs(value):
            break
    var digits = List[UInt8]()
    var power = 0
    var at = 0
    while room[at] != 101:  # d.ddde-05
        if _is_digit(room[at]):
            digits.append(room[at])
        at += 1
    var minus = room[at + 1] == _MINUS
    at += 2
    while room[at] != 0:
        power = 10 * power + Int(room[at]) - 48
        at += 1
    if minus:
        power = -power
    var sign = "-" if value < 0 else ""
    var text = _to_text(Span(digits))
    var n = len(digits)
    if power < -4 or power >= 16:
        return String(
            sign,
            text[byte=0:1],
            "." if n > 1 else "",
            text[byte=1:n],
            "e-" if power < 0 else "e+",
            "0" if abs(power) < 10 else "",
            abs(power),
        )
    if power < 0:
        return String(sign, "0.", "0" * (-power - 1), text)
    if power + 1 >= n:
        return String(sign, text, "0" * (power + 1 - n), ".0")
    return String(
        sign, text[byte = 0 : power + 1], ".", text[byte = power + 1 : n]
    )


def _read(text: List[UInt8]) -> Float64:
    return external_call["strtod", Float64](text.unsafe_ptr(), Int(0))
