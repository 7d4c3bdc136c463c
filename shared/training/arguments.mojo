"""Options of a program's command line: `--name value`, and `--flag`."""

from std.sys import argv


def argument(name: String, default: String) -> String:
    """The word after `--name`.

    Args:
        name: Without the dashes.
        default: If it is not given.

    Returns:
        The word.
    """
    var words = argv()
    for i in range(1, len(words) - 1):
        if words[i] == String("--", name):
            return String(words[i + 1])
    return default


def number(name: String, default: Int) raises -> Int:
    """The whole number after `--name`.

    Args:
        name: Without the dashes.
        default: If it is not given.

    Returns:
        The number.

    Raises:
        Error: It is none.
    """
    var word = argument(name, String(default))
    try:
        return Int(word)
    except:
        raise Error("[usage] --", name, " is ", word, "; give a whole number")


def flag(name: String) -> Bool:
    """Whether `--name` is given.

    Args:
        name: Without the dashes.

    Returns:
        Whether it is.
    """
    for word in argv():
        if word == String("--", name):
            return True
    return False
