"""Tables: CSV files as data sets of numbers, and how their columns become them.

What is learnt of a training part (categories, means) is kept in checkpoints and holds for every
table after it.
"""

from __future__ import annotations

import contextlib
import csv as tables
import dataclasses
import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from odyssey.data.datasets import ArrayDataset, arrays
from odyssey.errors import ConfigError, DataError, printable

MISSING = ("", "na", "n/a", "nan", "null")  # fields that say that a number is missing, in any case
MAX_CATEGORIES = 256  # of a column of texts
LARGE = 100.0  # a column of larger numbers is warned of


class Table:
    """The columns of a CSV file, as texts. path: "-" is standard input. header: names. lines:
    those that are not empty, each with its number in the file. Raises DataError: it cannot be
    read, has no lines, two columns of a name, or a line of another length.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = "standard input" if str(path) == "-" else printable(str(path), limit=200)
        try:
            open_options = {"newline": "", "encoding": "utf-8-sig"}
            with (
                contextlib.nullcontext(sys.stdin)
                if str(path) == "-"
                else Path(path).open(**open_options) as file
            ):
                self.header, self.lines = _parsed(file)
        except (OSError, UnicodeDecodeError, tables.Error) as problem:
            reason = getattr(problem, "strerror", None) or problem
            raise DataError(
                f"{self.path} cannot be read as a table ({reason}); give a CSV file in UTF-8"
            ) from None
        header = self.header
        if not self.lines:
            raise DataError(
                f"{self.path} has no lines of numbers below a line with the names of columns"
            )
        if header != [str(i) for i in range(len(header))] and all(
            _number(name) is not None for name in header
        ):
            first = ", ".join(header[:4])
            raise DataError(
                f"{self.path} begins with numbers ({first}); put a line with names of columns first"
            )
        if twice := next((name for name in header if header.count(name) > 1), None):
            raise DataError(f"{self.path} has two columns {twice!r}; rename one")
        if wrong := next((number for number, line in self.lines if len(line) != len(header)), None):
            raise DataError(
                f"{self.path}, line {wrong}: {len(header)} fields expected, as in the header"
            )

    def column(self, name: str) -> list[str]:
        """The fields of a column. Raises DataError: there is none of this name."""
        if name not in self.header:
            raise DataError(
                f"{self.path} has no column {name!r}; its columns are {', '.join(self.header)}"
            )
        index = self.header.index(name)
        return [line[index].strip() for _, line in self.lines]

    def place(self, row: int, name: str) -> str:
        """Where a field stands, for messages."""
        return f"{self.path}, line {self.lines[row][0]}, column {name}"

    def numbers(self, name: str, fill: float | None = None, target: bool = False) -> np.ndarray:
        """A column as float64 (N,), `fill` for what is missing; a target has none.

        Raises DataError: a field is no finite number.
        """
        fields = self.column(name)
        values = np.array([_number(field) for field in fields], np.float64)  # None: NaN
        missing = np.array([field.lower() in MISSING for field in fields])
        if fill is not None:
            values[missing] = fill
        if (wrong := np.flatnonzero(~np.isfinite(values))).size:
            row = int(next((i for i in wrong if not fields[i]), wrong[0]))
            fault = f"{self.place(row, name)}: {fields[row]!r} is no finite number"
            if target:
                raise DataError(f"{fault}; write it as a number, or leave the line out")
            advice = (
                "fill it (--fill mean, fill='mean')" if missing[row] else "write it as a number"
            )
            raise DataError(
                f"{fault}; {advice}, or leave line or column out (--drop-columns "
                f"{shlex.quote(name)})"
            )
        return values


def _parsed(file: TextIO) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The names of columns, and the numbered lines that are not empty.

    Raises csv.Error for a quote that stays open.
    """
    rows = file.readlines() or [""]
    delimiter = max(",;\t", key=re.sub('"[^"]*"', "", rows[0]).count)
    reader = tables.reader(rows, strict=True, delimiter=delimiter)
    return [name.strip() for name in next(reader)], [
        (reader.line_num, line) for line in reader if line
    ]


def _number(field: str) -> float | None:
    try:
        return float(field)
    except ValueError:
        return None


def _is_text(fields: Sequence[str]) -> bool:
    """Returns whether a column is of words: no field that is there is a number, with a decimal
    comma or without.
    """
    filled_fields = [field for field in fields if field]
    return bool(filled_fields) and all(
        _number(field.replace(",", "")) is None for field in filled_fields
    )


@dataclasses.dataclass(frozen=True)
class Columns:
    """How the columns of a table become the numbers of a sample, as was learnt of the training
    part.

    names: of the columns, in order. categories: texts that a column of text may have; it becomes a
    number for each, 1 for the one that it is and else 0. fill: what stands for a missing number;
    all are 0 for a missing text. mean, std: of a column of numbers that is normalised, which stands
    for (number - mean) / std.
    """

    names: tuple[str, ...]
    categories: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    fill: Mapping[str, float] = dataclasses.field(default_factory=dict)
    mean: Mapping[str, float] = dataclasses.field(default_factory=dict)
    std: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def learnt(
        cls,
        table: Table,
        names: Sequence[str],
        training: Any,
        fill: str | float | None,
        normalize: bool,
    ) -> Columns:
        """Makes them for those columns of a table; means and deviations are of its rows
        `training`, (n,) or a slice.
        """
        number = None if fill in (None, "mean") else _number(str(fill))
        if fill not in (None, "mean") and (number is None or not math.isfinite(number)):
            raise ConfigError(f"[data] fill is {fill!r}; give 'mean' or a finite number")
        learnt_columns = cls(tuple(names), {}, {}, {}, {})
        for name in names:
            fields = table.column(name)
            if _is_text(fields):
                learnt_columns.categories[name] = sorted({field for field in fields if field})
                if len(learnt_columns.categories[name]) > MAX_CATEGORIES:
                    count = f"{len(learnt_columns.categories[name]):,} different texts"
                    raise DataError(
                        f"{table.path}, column {name}: {count}, and at most {MAX_CATEGORIES} "
                        "become "
                        "categories; leave the column "
                        f"out (--drop-columns {shlex.quote(name)}, drop_columns=)"
                    )
                learnt_columns.fill.update({name: 0.0} if fill is not None else {})
                continue
            if fill is not None:
                values = np.array([_number(field) for field in fields], np.float64)[training]
                finite_values = values[np.isfinite(values)]
                if number is None and not finite_values.size:
                    raise DataError(
                        f"{table.path}, column {name} has no number to fill with; leave the "
                        "column out"
                    )
                learnt_columns.fill[name] = (
                    float(finite_values.mean()) if number is None else number
                )
            if normalize:
                values = table.numbers(name, learnt_columns.fill.get(name))[training]
                learnt_columns.mean[name] = float(values.mean())
                learnt_columns.std[name] = float(values.std()) or 1.0
        return learnt_columns

    @property
    def saved(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps, as JSON values; of_saved() is the inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def of_saved(cls, saved: Mapping[str, Any] | None, columns: Sequence[str]) -> Columns:
        """Returns what a checkpoint has kept; of an older one only the names of `columns`."""
        return cls(**{**(saved or {}), "names": tuple(columns)})

    @property
    def features(self) -> list[str]:
        """The name of each number of a sample: "area", "city=Paris"."""
        names_per_column = (
            [f"{n}={c}" for c in self.categories[n]] if n in self.categories else [n]
            for n in self.names
        )
        return [name for names in names_per_column for name in names]

    @property
    def scaling(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Mean and deviation of each number of a sample, (F,) float32; 0 and 1 where not
        normalised; None: none is.
        """
        if not self.mean:
            return None
        mean, std = (
            [of.get(n, usual) for n in self.features]
            for of, usual in ((self.mean, 0.0), (self.std, 1.0))
        )
        return np.array(mean, np.float32), np.array(std, np.float32)

    def samples(self, table: Table) -> np.ndarray:
        """The rows of a table as samples (N, F) float32.

        Raises DataError: a column is missing, a number is missing or none, or a text is none of the
        known ones.
        """
        parts: list[np.ndarray] = []
        for name in self.names:
            if name not in self.categories:
                values = table.numbers(name, self.fill.get(name))
                parts.append((values - self.mean.get(name, 0.0)) / self.std.get(name, 1.0))
                continue
            fields = table.column(name)
            categories = self.categories[name]
            wrong = next(
                (
                    i
                    for i, f in enumerate(fields)
                    if f not in categories and (f or name not in self.fill)
                ),
                None,
            )
            if wrong is not None:
                examples = ", ".join(categories[:8]) + ", ..." * (len(categories) > 8)
                fault = f"{fields[wrong]!r} is unknown" if fields[wrong] else "a text is missing"
                raise DataError(
                    f"{table.place(wrong, name)}: {fault}; the training had {examples}; correct "
                    "it, "
                    "leave the line out, or "
                    "train with it"
                )
            parts += [
                np.array([field == category for field in fields], np.float64)
                for category in categories
            ]
        with np.errstate(over="ignore"):  # infinity, which a data set refuses
            return np.stack(parts, 1).astype(np.float32)


def csv(
    path: str | Path | Table,
    target: str | Sequence[str] | None = None,
    *,
    classes: bool = True,
    words: bool = True,
    normalize: bool = False,
    drop_columns: Sequence[str] = (),
    fill: str | float | None = None,
    like: ArrayDataset | Columns | None = None,
    training: Any = slice(None),
) -> ArrayDataset:
    """A table of numbers with a header: samples (N, F) float32 of all columns but the targets.

    Fields are separated by what the header has most of: commas, semicolons or tabs. A column of
    texts becomes a number for each of them (one-hot). target: name of a column, or names; default
    the last one. One column of whole numbers from 0, or of words, is
        classes (words in sorted order); anything else becomes float32, (N, T) for T names.
    classes: False: whole numbers are no classes, such as prices. words: False: words are none, as
        another file may have other ones.
    normalize: numbers become (number - mean) / standard deviation, of their column. drop_columns:
    are left out. fill: what stands for a missing number: a number, or "mean", of its column. like:
    the data set of the training part, whose columns, texts, means and deviations hold here too.
    training: rows of which means and deviations are taken, numbers (n,) or a slice; default all.
    Raises DataError for a missing column, a line of another length, a field that is no finite
    number, a text that is none of `like`; ConfigError for a wrong `fill`, or where `like` decides
    what is given.
    """
    table = path if isinstance(path, Table) else Table(path)
    header = table.header
    target_names = (
        [header[-1]] if target is None else [target] if isinstance(target, str) else list(target)
    )
    fields = [table.column(name) for name in target_names][0]
    for name in drop_columns:
        table.column(name)  # which refuses one that is not there
        if name in target_names:
            raise ConfigError(
                f"[data] drop_columns names {name!r}, which is the target; leave it out"
            )
    columns = getattr(like, "columns", like)
    if columns is None:
        names = [name for name in header if name not in (*target_names, *drop_columns)]
        if not names:
            raise DataError(f"{table.path} has no column besides the target; samples need one")
        columns = Columns.learnt(table, names, training, fill, normalize)
    elif normalize or drop_columns or fill is not None:
        raise ConfigError(
            "[data] normalize, drop_columns and fill are those of like=; leave them out"
        )
    x = columns.samples(table)
    class_names = ()
    name = Path(table.path).name
    if len(target_names) > 1:
        dataset = arrays(
            x, np.stack([table.numbers(name, target=True) for name in target_names], 1), name=name
        )
    elif classes and all(field.isdecimal() for field in fields):
        dataset = arrays(x, np.array([int(field) for field in fields]), name=name)
    elif classes and words and all(field and _number(field) is None for field in fields):
        class_names, labels = np.unique(fields, return_inverse=True)
        dataset = arrays(x, labels, classes=len(class_names), name=name)
    else:
        dataset = arrays(x, table.numbers(target_names[0], target=True)[:, None], name=name)
    return dataclasses.replace(dataset, columns=columns, class_names=tuple(map(str, class_names)))


def notes(data: Any) -> list[str]:
    """Returns what a user wants to know of a table's columns, a line each: which are texts, and
    that some are large.
    """
    columns = getattr(data, "columns", None)
    if not isinstance(columns, Columns):
        return []
    lines = [
        f"column {name} is text, and becomes {len(categories)} numbers: "
        f"{', '.join(categories[:4])}{', ...' * (len(categories) > 4)}"
        for name, categories in columns.categories.items()
    ]
    sizes = np.sqrt(np.mean(np.square(data.images, dtype=np.float64), 0))
    large = int(np.argmax(sizes))
    if sizes[large] > LARGE:
        count = int((sizes > LARGE).sum())
        column_label = f"column {columns.features[large]}" + f" and {count - 1} more" * (count > 1)
        warning = (
            f"{column_label}: numbers of about {sizes[large]:,.0f}, and above {LARGE:g} training "
            "is "
            "slow or fails"
        )
        lines.append(f"{warning}; give --normalize")
    return lines
