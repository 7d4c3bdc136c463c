"""Tables: CSV files as data sets of numbers, and the rules that convert their columns.

The rules (categories, means) are learnt from the training part. Checkpoints hold them, and they
apply to every later table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from odyssey.base.paths import expand_path
from odyssey.data.datasets import ArrayDataset, arrays
from odyssey.errors import ConfigError, DataError, printable

MISSING = ("", "na", "n/a", "nan", "null")  # fields, in lower case, that mean a missing number
MAX_CATEGORIES = 256  # of a column of texts
LARGE = 100.0  # columns with larger numbers cause a warning
MANY_CLASSES = 100  # more classes that are whole numbers cause a note: they may be numbers
_DATE = re.compile(r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}\b.*|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}\b.*")


@dataclasses.dataclass(frozen=True)
class _Fault:
    """What is wrong with a column.

    Attributes:
        name: the column.
        message: the error, if this column is the only one.
        brief: a few words for a list of several columns.
    """

    name: str
    message: str
    brief: str


def _raise_faults(table: Table, faults: Sequence[_Fault]) -> None:
    """Raises DataError, which names all columns that don't fit; returns if there are none."""
    if not faults:
        return
    if len(faults) == 1:
        raise DataError(faults[0].message)
    listed = "; ".join(f"{fault.name} ({fault.brief})" for fault in faults)
    names = shlex.quote(",".join(fault.name for fault in faults))
    raise DataError(
        f"{table.path}: {len(faults)} columns do not fit: {listed}. Fill missing numbers and texts "
        f"(--fill mean, fill='mean'), correct the others, or leave columns out (--drop-columns "
        f"{names}, drop_columns=)"
    )


class Table:
    """The columns of a CSV file, as strings.

    Attributes:
        path: the path as messages print it. The path "-" reads standard input.
        header: the names of the columns.
        lines: (number in the file, fields) of each line below the header that is not empty.

    Raises DataError if the file cannot be read, has no lines of numbers, has two columns of the
    same name, or a line with another number of fields than the header.
    """

    def __init__(self, path: str | Path) -> None:
        import csv as tables

        self.path = "standard input" if str(path) == "-" else printable(str(path), limit=200)
        try:
            open_options = {"newline": "", "encoding": "utf-8-sig"}
            with (
                contextlib.nullcontext(sys.stdin)
                if str(path) == "-"
                else expand_path(path).open(**open_options) as file
            ):
                self.header, self.lines = _parse_csv(file)
        except (OSError, UnicodeDecodeError, tables.Error) as problem:
            reason = getattr(problem, "strerror", None) or problem
            raise DataError(
                f"{self.path} cannot be read as a table ({reason}); give a CSV file in UTF-8"
            ) from None
        header = self.header
        self._parsed: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        if not self.lines:
            raise DataError(
                f"{self.path} has no lines of numbers below a line with the names of columns"
            )
        # The names 0, 1, 2, ... are allowed: pandas writes them for columns without a name.
        if header != [str(i) for i in range(len(header))] and all(
            _parse_number(name) is not None for name in header
        ):
            first = ", ".join(header[:4])
            raise DataError(
                f"{self.path} begins with numbers ({first}); put a line with names of columns first"
            )
        if duplicate := next((name for name in header if header.count(name) > 1), None):
            raise DataError(f"{self.path} has two columns {duplicate!r}; rename one")
        for number, fields in self.lines:
            if len(fields) != len(header):
                raise DataError(
                    f"{self.path}, line {number}: {len(header)} fields expected, as in the header"
                )

    def column(self, name: str) -> list[str]:
        """Returns the fields of a column. Raises DataError if there is no such column."""
        if name not in self.header:
            raise DataError(
                f"{self.path} has no column {name!r}; its columns are {', '.join(self.header)}"
            )
        index = self.header.index(name)
        return [line[index].strip() for _, line in self.lines]

    def place(self, row: int, name: str) -> str:
        """Returns the place of a field in the file, for messages."""
        return f"{self.path}, line {self.lines[row][0]}, column {name}"

    def numbers(self, name: str, fill: float | None = None, target: bool = False) -> np.ndarray:
        """Returns a column as float64 (N,).

        Args:
            name: the name of the column.
            fill: replaces missing numbers. None allows no missing number.
            target: the column is a target. Messages then don't advise to fill or drop it.

        Raises:
            DataError: there is no such column, or a field is not a finite number.
        """
        if fault := self.fault_of_numbers(name, fill, target):
            raise DataError(fault.message)
        values, missing = self.parsed(name)
        return values.copy() if fill is None else np.where(missing, fill, values)

    def parsed(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the numbers of a column (N,), NaN for fields that are no number, and which of
        the fields are missing.
        """
        if name not in self._parsed:
            fields = self.column(name)
            # np.array converts None, a field that is not a number, to NaN.
            values = np.array([_parse_number(field) for field in fields], np.float64)
            missing = np.array([field.lower() in MISSING for field in fields])
            self._parsed[name] = values, missing
        return self._parsed[name]

    def fault_of_numbers(
        self, name: str, fill: float | None = None, target: bool = False
    ) -> _Fault | None:
        """Returns what keeps a column from being numbers; arguments as those of `numbers`."""
        values, missing = self.parsed(name)
        is_wrong = ~np.isfinite(values) if fill is None else ~(np.isfinite(values) | missing)
        wrong_rows = np.flatnonzero(is_wrong)
        if not wrong_rows.size:
            return None
        fields = self.column(name)
        # The message names an empty field, if there is one: users recognize it at once.
        row = int(next((i for i in wrong_rows if not fields[i]), wrong_rows[0]))
        fault = f"{fields[row]!r} is no finite number"
        brief = f"line {self.lines[row][0]}: {fault}"
        if target:
            advice = "write it as a number, or leave the line out"
        else:
            repair = (
                "fill it (--fill mean, fill='mean')" if missing[row] else "write it as a number"
            )
            advice = f"{repair}, or leave line or column out (--drop-columns {shlex.quote(name)})"
        return _Fault(name, f"{self.place(row, name)}: {fault}; {advice}", brief)


def _parse_csv(file: TextIO) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Returns the names of columns, and (number, fields) of each later line that is not empty.

    The delimiter is the one of comma, semicolon and tab that the header has most of. Raises
    csv.Error for a quote that stays open.
    """
    import csv as tables

    rows = file.readlines() or [""]
    header_without_quoted = re.sub('"[^"]*"', "", rows[0])
    delimiter = max(",;\t", key=header_without_quoted.count)
    reader = tables.reader(rows, strict=True, delimiter=delimiter)
    header = [name.strip() for name in next(reader)]
    lines = [(reader.line_num, fields) for fields in reader if fields]
    return header, lines


def _parse_number(field: str) -> float | None:
    """Returns the number in a field, or None if it holds no number."""
    try:
        return float(field)
    except ValueError:
        return None


def _is_text(fields: Sequence[str]) -> bool:
    """Tells whether a column holds words: it isn't empty, and none of its fields is a number.

    A field with commas, such as "1,5" or "1,000", counts as a number.
    """
    filled_fields = [field for field in fields if field]
    return bool(filled_fields) and all(
        _parse_number(field.replace(",", "")) is None for field in filled_fields
    )


def _are_dates(fields: Sequence[str]) -> bool:
    """Tells whether all fields look like dates, such as 2021-03-04 or 4.3.2021 12:30."""
    return all(_DATE.fullmatch(field) for field in fields if field)


@dataclasses.dataclass(frozen=True)
class Columns:
    """The rules that convert the columns of a table to the numbers of a sample.

    They are learnt from the training part.

    Attributes:
        names: the names of the columns, in order.
        categories: the texts that a column of text may have. The column becomes a number for each
            of them: 1 for the text of the row, 0 for the others (one-hot).
        fill: the number that replaces a missing one. If a column of text is in it, a missing text
            is allowed, and all its numbers are 0.
        mean: the mean of a column of numbers that is normalised to (number - mean) / std.
        std: see `mean`.
        classes: what the target is: names of classes, a number of classes that are whole numbers,
            0 for numbers, None if it isn't known.
    """

    names: tuple[str, ...]
    categories: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    fill: Mapping[str, float] = dataclasses.field(default_factory=dict)
    mean: Mapping[str, float] = dataclasses.field(default_factory=dict)
    std: Mapping[str, float] = dataclasses.field(default_factory=dict)
    classes: Sequence[str] | int | None = None

    @classmethod
    def learnt(
        cls,
        table: Table,
        names: Sequence[str],
        training: Any,
        fill: str | float | None,
        normalize: bool,
    ) -> Columns:
        """Learns the rules from the columns `names` of a table.

        Args:
            table: the table of the training part, or of both parts.
            names: the names of the columns that are used.
            training: the training rows, numbers (n,) or a slice. Means and deviations depend only
                on them. Categories are those of the whole table.
            fill: "mean", a number, or None. See `csv`.
            normalize: learn a mean and a deviation of each column of numbers.

        Raises:
            ConfigError: `fill` is neither "mean" nor a finite number.
            DataError: columns have too many categories, a field that is not a number, or no number.
                The message names all of them.
        """
        fill_number = None if fill in (None, "mean") else _parse_number(str(fill))
        if fill not in (None, "mean") and (fill_number is None or not math.isfinite(fill_number)):
            raise ConfigError(f"[data] fill is {fill!r}; give 'mean' or a finite number")
        columns = cls(tuple(names), categories={}, fill={}, mean={}, std={})
        faults = []
        for name in names:
            if _is_text(table.column(name)):
                fault = columns._learn_texts(table, name, is_filled=fill is not None)
            elif fill is not None and fill_number is None:
                fault = columns._learn_fill(table, name, training)
            else:
                fault = None
                if fill_number is not None:
                    columns.fill[name] = fill_number
            fault = fault or columns.fault(table, name)
            if fault is not None:
                faults.append(fault)
            elif normalize and name not in columns.categories:
                values = table.numbers(name, columns.fill.get(name))[training]
                columns.mean[name] = float(values.mean())
                # A constant column has the deviation 0. It becomes 0, instead of a division by 0.
                columns.std[name] = float(values.std()) or 1.0
        _raise_faults(table, faults)
        return columns

    def _learn_texts(self, table: Table, name: str, is_filled: bool) -> _Fault | None:
        """Learns the categories of a column of texts. Returns what is wrong with it, or None."""
        fields = table.column(name)
        categories = sorted({field for field in fields if field})
        self.categories[name] = categories  # type: ignore[index]
        if is_filled:
            self.fill[name] = 0.0  # type: ignore[index]
        if len(categories) <= MAX_CATEGORIES:
            return None
        count = f"{len(categories):,} different texts"
        advice = "leave the column out"
        if _are_dates(fields):
            count = f"{len(categories):,} dates, such as {categories[0]}"
            advice = "write columns of numbers instead, such as year and month, or leave it out"
        reason = f"{count}, and at most {MAX_CATEGORIES} texts become categories"
        message = (
            f"{table.path}, column {name}: {reason}; {advice} (--drop-columns "
            f"{shlex.quote(name)}, drop_columns=)"
        )
        return _Fault(name, message, count)

    def _learn_fill(self, table: Table, name: str, training: Any) -> _Fault | None:
        """Learns the mean of a column of numbers. Returns what is wrong with it, or None."""
        values, _ = table.parsed(name)
        training_values = values[training]
        finite_values = training_values[np.isfinite(training_values)]
        if not finite_values.size:
            reason = "no number to fill with"
            message = f"{table.path}, column {name} has {reason}; leave the column out"
            return _Fault(name, message, reason)
        self.fill[name] = float(finite_values.mean())  # type: ignore[index]
        return None

    def fault(self, table: Table, name: str) -> _Fault | None:
        """Returns what keeps a column of a table from being converted by these rules, or None."""
        if name not in self.categories:
            return table.fault_of_numbers(name, self.fill.get(name))
        categories = set(self.categories[name])
        missing_is_allowed = name in self.fill
        for row, field in enumerate(table.column(name)):
            if field in categories or (not field and missing_is_allowed):
                continue
            first = self.categories[name][:8]
            examples = ", ".join(first) + ", ..." * (len(categories) > 8)
            reason = f"{field!r} is unknown" if field else "a text is missing"
            message = (
                f"{table.place(row, name)}: {reason}; the training had {examples}; correct "
                "it, leave the line out, or train with it"
            )
            return _Fault(name, message, f"line {table.lines[row][0]}: {reason}")
        return None

    @property
    def saved(self) -> dict[str, Any]:
        """The rules as JSON values, for a checkpoint. of_saved() is the inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def of_saved(cls, saved: Mapping[str, Any] | None, columns: Sequence[str]) -> Columns:
        """Restores the rules of a checkpoint.

        saved: see `saved`. An older checkpoint has none: its columns are numbers without rules.
        columns: the names of the columns.
        """
        return cls(**{**(saved or {}), "names": tuple(columns)})

    @property
    def features(self) -> list[str]:
        """The name of each number of a sample: "area", "city=Paris"."""
        features: list[str] = []
        for name in self.names:
            if name in self.categories:
                features += [f"{name}={category}" for category in self.categories[name]]
            else:
                features.append(name)
        return features

    @property
    def scaling(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The mean and the deviation of each number of a sample, two arrays (F,) float32.

        They are 0 and 1 for numbers that are not normalised. None if no column is normalised.
        """
        if not self.mean:
            return None
        features = self.features
        mean = np.array([self.mean.get(name, 0.0) for name in features], np.float32)
        std = np.array([self.std.get(name, 1.0) for name in features], np.float32)
        return mean, std

    def samples(self, table: Table) -> np.ndarray:
        """Converts the rows of a table to samples (N, F) float32.

        Raises DataError if a column is missing, a field is not a number, or a text is not one of
        the categories. The message names all such columns.
        """
        faults = [fault for name in self.names if (fault := self.fault(table, name)) is not None]
        _raise_faults(table, faults)
        parts: list[np.ndarray] = []
        for name in self.names:
            if name not in self.categories:
                values = table.numbers(name, self.fill.get(name))
                parts.append((values - self.mean.get(name, 0.0)) / self.std.get(name, 1.0))
                continue
            fields = np.array(table.column(name))
            parts += [(fields == category).astype(np.float64) for category in self.categories[name]]
        with np.errstate(over="ignore"):  # becomes infinity, which a data set refuses
            return np.stack(parts, axis=1).astype(np.float32)


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
    """Reads a table with a header as samples (N, F) float32 of all columns but the targets.

    Fields are separated by commas, semicolons or tabs: the one that the header has most of. A
    column of texts becomes a number for each different text (one-hot).

    Args:
        path: the CSV file, or a Table that was read.
        target: the name of the target column, or names. None is the last column. One column of
            whole numbers from 0, or of words, becomes classes (words in sorted order). Anything
            else becomes float32, (N, T) for T names.
        classes: False if whole numbers are no classes, for example prices.
        words: False if words are no classes, because another file may have other words.
        normalize: convert the numbers of a column to (number - mean) / standard deviation.
        drop_columns: names of columns to leave out.
        fill: replaces missing numbers: a number, or "mean" for the mean of the column.
        like: the data set of the training part. Its columns, texts, means, deviations and classes
            apply.
        training: the rows that means and deviations depend on, numbers (n,) or a slice.

    Raises:
        DataError: a missing column, a line of another length, a field that is not a finite number,
            or a text that `like` doesn't have.
        ConfigError: a wrong `fill`, or a setting that `like` decides.
    """
    table = path if isinstance(path, Table) else Table(path)
    header = table.header
    if target is None:
        target_names = [header[-1]]
    else:
        target_names = [target] if isinstance(target, str) else list(target)
    for name in target_names:
        table.column(name)  # raises an error if it is missing
    for name in drop_columns:
        table.column(name)  # raises an error if it is missing
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
    samples = columns.samples(table)
    file_name = Path(table.path).name
    if len(target_names) > 1:
        numbers = np.stack([table.numbers(name, target=True) for name in target_names], axis=1)
        target = _Target(numbers)
    else:
        target = _read_target(table, target_names[0], columns.classes, classes, words)
    dataset = arrays(samples, target.values, classes=target.classes, name=file_name)
    columns = dataclasses.replace(columns, classes=target.class_names or dataset.classes)
    return dataclasses.replace(dataset, columns=columns, class_names=target.class_names)


@dataclasses.dataclass(frozen=True)
class _Target:
    """The target of a table.

    Attributes:
        values: classes (N,), or numbers (N, T).
        classes: how many classes there are. None: the largest one plus one, or no classes.
        class_names: the names of classes that are words.
    """

    values: np.ndarray
    classes: int | None = None
    class_names: tuple[str, ...] = ()


def _read_target(
    table: Table, name: str, learnt: Sequence[str] | int | None, classes: bool, words: bool
) -> _Target:
    """Reads the target column of a table.

    Args:
        table: the table.
        name: the name of the column.
        learnt: what the training part has decided, see `Columns.classes`. It goes before what this
            table looks like.
        classes: False if whole numbers are no classes.
        words: False if words are no classes.

    Raises:
        DataError: a class is missing or unknown, or a field is not a finite number.
    """
    fields = table.column(name)
    if learnt is not None:
        classes = bool(learnt)
        words = not isinstance(learnt, int)
    if classes and words and learnt:
        class_names = tuple(map(str, learnt))  # type: ignore[arg-type]
        return _Target(_class_numbers(table, name, class_names), len(class_names), class_names)
    if classes and all(field.isdecimal() for field in fields):
        count = learnt if isinstance(learnt, int) else None
        return _Target(np.array([int(field) for field in fields]), count)
    if classes and words and all(field and _parse_number(field) is None for field in fields):
        names, labels = np.unique(fields, return_inverse=True)
        return _Target(labels, len(names), tuple(map(str, names)))
    if classes and words:
        _check_target(table, name)
    return _Target(table.numbers(name, target=True)[:, None])


def _class_numbers(table: Table, name: str, class_names: Sequence[str]) -> np.ndarray:
    """Returns the classes of a target by their names, (N,). Raises DataError for another name."""
    numbers = {class_name: number for number, class_name in enumerate(class_names)}
    fields = table.column(name)
    for row, field in enumerate(fields):
        if field not in numbers:
            examples = ", ".join(class_names[:8]) + ", ..." * (len(class_names) > 8)
            raise DataError(
                f"{table.place(row, name)}: class {field!r} is unknown; the training had "
                f"{examples}; correct it, or leave the line out"
            )
    return np.array([numbers[field] for field in fields])


def _check_target(table: Table, name: str) -> None:
    """Raises DataError if a target has words, and a class is missing."""
    fields = table.column(name)
    missing_rows = [row for row, field in enumerate(fields) if field.lower() in MISSING]
    texts = [field for field in fields if field.lower() not in MISSING]
    if not texts or any(_parse_number(field) is not None for field in texts):
        return
    if missing_rows:
        row = missing_rows[0]
        raise DataError(
            f"{table.place(row, name)}: missing class; write one, such as {texts[0]}, or leave the "
            "line out"
        )


def notes(data: Any) -> list[str]:
    """Returns notes for the user on the columns of a table, a line each.

    They list the columns of text, and warn of columns with large numbers and of targets that may
    be numbers and no classes. Other data sets have no notes.
    """
    columns = getattr(data, "columns", None)
    if not isinstance(columns, Columns):
        return []
    lines = [
        f"column {name} is text, and becomes {len(categories)} numbers: "
        f"{', '.join(categories[:4])}{', ...' * (len(categories) > 4)}"
        for name, categories in columns.categories.items()
    ]
    classes = data.classes or 0
    if classes > MANY_CLASSES and not data.class_names:
        lines.append(
            f"the target has whole numbers, and becomes {classes:,} classes; if it is a number, "
            "give --loss mse"
        )
    # The root mean square of each number of a sample.
    sizes = np.sqrt(np.mean(np.square(data.images, dtype=np.float64), axis=0))
    largest = int(np.argmax(sizes))
    if sizes[largest] > LARGE:
        count = int((sizes > LARGE).sum())
        column_label = f"column {columns.features[largest]}"
        if count > 1:
            column_label += f" and {count - 1} more"
        warning = (
            f"{column_label}: numbers of about {sizes[largest]:,.0f}, and above {LARGE:g} training "
            "is slow or fails"
        )
        lines.append(f"{warning}; give --normalize")
    return lines
