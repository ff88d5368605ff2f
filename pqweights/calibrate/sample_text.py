"""The text that a model reads for a sample: files, a data set of the Hub, or the mixture of this package."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from pqweights.common.options import MIXTURE
from pqweights.errors import EvaluationError
from pqweights.runtime.packages import REFUSALS, package, quiet
from pqweights.runtime.texts import CHARACTERS_PER_TOKEN, file_text

# ORG/NAME of a data set, and which of its configurations, if it has several.
_DATA_SET = re.compile(r"[\w-][\w.-]*/[\w.-]+(:[\w.-]+)?")
# Prose, talk, mathematics and data in a dozen languages; the sources of this package follow, as code.
_PROSE = Path(__file__).with_name("mixture.txt")
_PACKAGE = Path(__file__).parents[1]


def is_data_set(text: str) -> bool:
    """Whether what is asked for is a data set of the Hub: nothing here has this name, and it is like ORG/NAME."""
    return _DATA_SET.fullmatch(text) is not None and not text.endswith(".txt") and not Path(text).exists()


def sample_text(text: str, tokens: int) -> str:
    """Return the text for a sample.

    text: MIXTURE, a file in UTF-8, a folder of *.txt, or ORG/NAME or ORG/NAME:CONFIGURATION of a data set
    tokens: of the sample; a data set is read as far as these are certain to need

    Raises EvaluationError if it cannot be read, MissingDependencyError.
    """
    if text == MIXTURE:
        return _joined([_PROSE, *sorted(_PACKAGE.rglob("*.py"))])
    if is_data_set(text):
        return _of_data_set(text, CHARACTERS_PER_TOKEN * tokens)
    path = Path(text)
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    if not files:
        raise EvaluationError(f"{path}: expected *.txt in the folder, found none")
    return _joined(files)


def prose() -> str:
    """Return the texts of the mixture, without the code of this package."""
    return file_text(_PROSE)


def _joined(files: list[Path]) -> str:
    try:
        return "\n".join(map(file_text, files))
    except OSError as error:
        raise EvaluationError(f"{error.filename}: expected a text, or a folder of *.txt: {error.strerror}") from None


def _of_data_set(name: str, characters: int) -> str:
    """Return the first rows of a data set, as many as have so many characters together."""
    datasets = package("datasets", "eval", f"{name}, no such file here, as a data set of the Hub,")
    repository, _, configuration = name.partition(":")
    texts: list[str] = []
    length = 0
    try:
        with quiet():
            splits = datasets.load_dataset(repository, configuration or None, streaming=True)
            rows = iter(splits["train"] if "train" in splits else next(iter(splits.values())))
            while length < characters and (row := next(rows, None)) is not None:
                texts.append("\n".join(_strings(row.get("text", row))))
                length += len(texts[-1])
    except (*REFUSALS, datasets.exceptions.DatasetsError) as error:
        # There is no network, no such data set, several configurations, or files that `datasets` cannot read.
        said = " ".join(str(error).split())[:200]
        raise EvaluationError(f"{name}: no such file here, and as a data set of the Hub: {said}") from None
    return "\n\n".join(texts)


def _strings(value: Any) -> Iterator[str]:
    """Yield the strings of a row, in order; of the messages of a chat, too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        yield from chain.from_iterable(map(_strings, value.values() if isinstance(value, dict) else value))
