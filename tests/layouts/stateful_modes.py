"""Enums of the programs that keep state: they are loaded once, because a checkpoint names them."""

import enum


class Mode(enum.Enum):
    """How a loss is computed."""

    SOFT = "soft"
    HARD = "hard"


class Level(enum.IntEnum):
    """How strong it is."""

    LOW = 1
    MIDDLE = 2
    HIGH = 3


class Flags(enum.Flag):
    """What is switched on."""

    A = 1
    B = 2
