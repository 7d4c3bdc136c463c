"""Options of a program's command line: `--name value`, and `--flag`; there are no other words."""

from std.sys import argv


def check_options(names: String, flags: String = "") raises:
    """Refuses words that a program does not have, and options without their value."""
    var words = argv()
    var i = 1
    while i < len(words):
        var word = String(words[i])
        i += 1
        if _among(word, flags):
            continue
        if not _among(word, names):
            var all = String()
            for name in String(names, " ", flags).split():
                all += String(" --", name)
            raise Error(
                "[usage] ", word, " is unknown" if word.startswith("--") else " is no option", "; there are", all
            )
        if i == len(words) or String(words[i]).startswith("--"):
            raise Error("[usage] ", word, " has no value; give one after it")
        i += 1


def _among(word: String, names: String) -> Bool:
    for name in names.split():
        if word == String("--", name):
            return True
    return False


def argument(name: String, default: String) -> String:
    """Returns the word after `--name`."""
    var words = argv()
    for i in range(1, len(words) - 1):
        if words[i] == String("--", name):
            return String(words[i + 1])
    return default


def number(name: String, default: Int, at_least: Int = Int.MIN) raises -> Int:
    """Returns the whole number after `--name`."""
    var word = argument(name, String(default))
    var digits = True  # and no _ between them, which Int() would take
    var i = 0
    for c in word.as_bytes():
        digits = digits and (48 <= Int(c) <= 57 or (i == 0 and Int(c) == 45))
        i += 1
    var n: Int
    try:
        if not digits:
            raise Error("no number")
        n = Int(word)
    except:
        raise Error("[usage] --", name, " is ", word, "; give a whole number")
    if n < at_least:
        raise Error("[usage] --", name, " is ", n, "; it must be at least ", at_least)
    return n


def flag(name: String) -> Bool:
    """Returns whether `--name` is given."""
    for word in argv():
        if word == String("--", name):
            return True
    return False
