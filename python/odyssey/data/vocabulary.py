"""Vocabulary: text to token ids and back, also from a checkpoint that a training with them has
written.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from odyssey.base import install_extra
from odyssey.base.files import parse_json
from odyssey.errors import ConfigError, DataError


class Vocabulary(list[str]):
    """The text of each id, in their order: characters, or the words of a tokenizer.

    tokenizer: the content of a tokenizer.json of the package tokenizers; "": `words` are
    characters, sorted. name: what messages call that. Raises ConfigError if tokenizers is missing;
    DataError for content that it does not read.
    """

    def __init__(
        self, words: Iterable[str] = (), tokenizer: str = "", name: str = "the tokenizer"
    ) -> None:
        self.tokenizer = tokenizer
        self._tokenizer = None
        if tokenizer:
            self._tokenizer = _tokenizer(tokenizer, name)
            ids_by_word = self._tokenizer.get_vocab()
            words = [""] * (max(ids_by_word.values()) + 1)
            for word, number in ids_by_word.items():
                words[number] = word
        super().__init__(words)

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, int32 (N,).

        Raises DataError for a character that is not in the vocabulary.
        """
        if self._tokenizer is not None:
            return np.array(self._tokenizer.encode(text).ids, np.int32)
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        alphabet = np.frombuffer("".join(self).encode("utf-32-le"), np.uint32)  # sorted
        ids = np.searchsorted(alphabet, points)
        if (wrong := np.flatnonzero(alphabet[np.minimum(ids, len(alphabet) - 1)] != points)).size:
            raise DataError(
                f"[data] character {wrong[0]} of the text is {text[wrong[0]]!r}, which is not "
                f"among the {len(self)} of "
                "the vocabulary; leave it out"
            )
        return ids.astype(np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids."""
        numbers = [int(i) for i in ids]
        return (
            "".join(self[i] for i in numbers)
            if self._tokenizer is None
            else self._tokenizer.decode(numbers)
        )

    @property
    def saved(self) -> dict[str, str]:
        """It as JSON, for a checkpoint."""
        return {"tokenizer": self.tokenizer} if self.tokenizer else {"characters": "".join(self)}

    @classmethod
    def of_checkpoint(cls, path: str | Path) -> Vocabulary:
        """That of a training on text, from a checkpoint's folder; DataError if there is none."""
        try:
            content = parse_json((Path(path) / "manifest.json").read_bytes(), "manifest.json")
            saved = dict(content["values"]["configuration"]["vocabulary"])
        except (OSError, DataError, KeyError, TypeError, ValueError):
            raise DataError(
                f"{path} has no manifest.json with a vocabulary; give a checkpoint of a training "
                "on text"
            ) from None
        return cls.restored(saved, str(path))

    @classmethod
    def restored(cls, saved: dict[str, str], path: str) -> Vocabulary:
        """Returns what `saved` was, of a checkpoint at `path`."""
        return cls(
            saved.get("characters", ""), saved.get("tokenizer", ""), f"the tokenizer in {path}"
        )


def _tokenizer(content: str, name: str) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError(
            f"[data] a tokenizer file needs the package tokenizers; {install_extra('text')}"
        ) from None
    try:
        return Tokenizer.from_str(content)
    except Exception as problem:  # its own class
        raise DataError(
            f"{name} cannot be read as a tokenizer ({problem}); give a tokenizer.json"
        ) from None
