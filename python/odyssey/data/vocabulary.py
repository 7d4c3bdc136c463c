"""The vocabulary: it converts text to token ids and back.

Checkpoints of language models hold it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from odyssey.base import install_extra
from odyssey.base.files import parse_json
from odyssey.base.paths import expand_path
from odyssey.errors import ConfigError, DataError


class Vocabulary(list[str]):
    """The text of each token id, in their order: characters, or the words of a tokenizer.

    Args:
        words: the characters, sorted, if there is no tokenizer.
        tokenizer: the content of a tokenizer.json of the package tokenizers, or "".
        name: the name of the tokenizer in messages.

    Raises:
        ConfigError: the package tokenizers is missing.
        DataError: the package cannot read the content.
    """

    def __init__(
        self, words: Iterable[str] = (), tokenizer: str = "", name: str = "the tokenizer"
    ) -> None:
        self.tokenizer = tokenizer
        self._tokenizer = None
        if tokenizer:
            self._tokenizer = _load_tokenizer(tokenizer, name)
            ids_by_word = self._tokenizer.get_vocab()
            words = [""] * (max(ids_by_word.values()) + 1)
            for word, number in ids_by_word.items():
                words[number] = word
        super().__init__(words)

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of a text, int32 (N,).

        Raises DataError for a character that is not in the vocabulary.
        """
        if self._tokenizer is not None:
            return np.array(self._tokenizer.encode(text).ids, np.int32)
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        alphabet = np.frombuffer("".join(self).encode("utf-32-le"), np.uint32)  # sorted
        # The id of a known character is its index. An unknown one gets the index, up to the length,
        # where it would be inserted, and another character is there.
        ids = np.searchsorted(alphabet, points)
        is_unknown = alphabet[np.minimum(ids, len(alphabet) - 1)] != points
        if is_unknown.any():
            index = np.flatnonzero(is_unknown)[0]
            raise DataError(
                f"[data] character {index} of the text is {text[index]!r}, which is not "
                f"among the {len(self)} of the vocabulary; leave it out"
            )
        return ids.astype(np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids."""
        numbers = [int(i) for i in ids]
        if self._tokenizer is not None:
            return self._tokenizer.decode(numbers)
        return "".join(self[i] for i in numbers)

    @property
    def saved(self) -> dict[str, str]:
        """The vocabulary as JSON values, for a checkpoint. `restored` is the inverse."""
        return {"tokenizer": self.tokenizer} if self.tokenizer else {"characters": "".join(self)}

    @classmethod
    def of_checkpoint(cls, path: str | Path) -> Vocabulary:
        """Returns the vocabulary of a checkpoint of a training run on text.

        path: the folder of the checkpoint. Raises DataError if it holds no vocabulary.
        """
        folder = expand_path(path)
        try:
            content = parse_json((folder / "manifest.json").read_bytes(), "manifest.json")
            saved = dict(content["values"]["configuration"]["vocabulary"])
        except (OSError, DataError, KeyError, TypeError, ValueError):
            raise DataError(
                f"{path} has no manifest.json with a vocabulary; give a checkpoint of a training "
                "on text"
            ) from None
        return cls.restored(saved, str(path))

    @classmethod
    def restored(cls, saved: dict[str, str], path: str) -> Vocabulary:
        """Returns the vocabulary that `saved` describes. path: its checkpoint, for messages."""
        return cls(
            saved.get("characters", ""), saved.get("tokenizer", ""), f"the tokenizer in {path}"
        )


def _load_tokenizer(content: str, name: str) -> Any:
    """Returns the tokenizer of a tokenizer.json.

    Raises ConfigError if the package tokenizers is missing, DataError if it cannot read the file.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError(
            f"[data] a tokenizer file needs the package tokenizers; {install_extra('text')}"
        ) from None
    try:
        return Tokenizer.from_str(content)
    except Exception as problem:  # tokenizers raises Exception itself
        raise DataError(
            f"{name} cannot be read as a tokenizer ({problem}); give a tokenizer.json"
        ) from None
