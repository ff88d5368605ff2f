"""The sample of tokens from which a calibration learns: drawn from the model itself, or cut from a text.

A text comes from files, a data set of the Hub, or the mixture of this package. A sample in a file is safetensors with
`ids`, int64 [windows, tokens], and a digest of the tokenizer as metadata.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor

from pqweights import __version__
from pqweights.calibrate.contents import Contents
from pqweights.calibrate.work_folder import folder_beside, worked_on_in
from pqweights.checkpoint.names import TOKENIZER_FILES
from pqweights.checkpoint.readers import PlainTensor, element_count
from pqweights.checkpoint.source import Checkpoint, described_folder
from pqweights.checkpoint.writer import write_whole
from pqweights.common.options import MIXTURE, SELF, Options, path_of
from pqweights.common.threads import slow_step
from pqweights.convert.convert import convert
from pqweights.errors import EvaluationError, SourceError
from pqweights.planning.recipe import load_recipe
from pqweights.runtime.folders import read_folder
from pqweights.runtime.models import check_loaded
from pqweights.runtime.packages import REFUSALS, Refused, package, quiet
from pqweights.runtime.texts import (
    CHARACTERS_PER_TOKEN,
    EncodedText,
    check_vocabulary,
    encode,
    file_text,
    has_tokenizer,
    load_tokenizer,
    read_text,
    with_bos,
)
from pqweights.storage import Store, open_store
from pqweights.targets.master import plan_quantize

# Tokens of a window of the sample, unless the model takes fewer.
WINDOW = 256
FEWEST_TOKENS = 2048
SEED = 0
# Windows on which a calibration is checked, and how many of these there are at least that it has not read.
CHECKED, FEWEST_CHECKED = 16, 4
UNSEEN = "unseen.safetensors"
# Of so many windows of what a model knows one is drawn at least.
DRAWN_EVERY = 4
MOST_UNKNOWN = 0.02  # of the tokens of the prose, or it is not for this model
# A model whose weights take more bytes in float32 is sampled from packed, from a draft master; so is one that is
# already quantized or pickled, which transformers may not compute as it is.
MOST_IN_MEMORY = 4_000_000_000
DRAFT_RECIPE = "t4"
# ORG/NAME of a data set, and which of its configurations, if it has several.
_DATA_SET = re.compile(r"[\w-][\w.-]*/[\w.-]+(:[\w.-]+)?")
# Prose, talk, mathematics and data in a dozen languages; the sources of this package follow, as code.
_PROSE = Path(__file__).with_name("mixture.txt")
_PACKAGE = Path(__file__).parents[1]
Windows = npt.NDArray[np.int64]  # token ids, [windows, tokens]
TOKENS = "tokens"  # what manifests call a sample that came in a file
SUFFIX = ".safetensors"
# A file of the tokenizer that says how texts are put together, and which tokens begin them, not what tokens are.
_SETTINGS = "tokenizer_config.json"


@dataclass(frozen=True, kw_only=True)
class SampleOf:
    """A sample that is wanted of a model.

    source: the folder of the model
    checkpoint: it, opened
    text: SELF for tokens that the model draws, and the prose of the mixture if it knows such; a file of a sample; or
        what sample_text takes
    tokens: how many at most
    save: the file that it is also written to; None for no such
    is_checked: whether `unseen` is asked for as well
    checked_on: the file of the text of `unseen`; None for tokens of the kind of the sample
    allow_pickle, leave_out: as in Options
    """

    source: Path
    checkpoint: Checkpoint
    text: str
    tokens: int
    allow_pickle: bool = False
    leave_out: Sequence[str] = ()
    save: Path | None = None
    is_checked: bool = False
    checked_on: Path | None = None

    @staticmethod
    def of(source: Path, checkpoint: Checkpoint, text: str, options: Options, *, is_checked: bool = False) -> SampleOf:
        """Return the sample that options ask for."""
        return SampleOf(
            source=source,
            checkpoint=checkpoint,
            text=text,
            tokens=options.calibration_tokens,
            allow_pickle=options.allow_pickle,
            leave_out=options.leave_out,
            save=path_of(options.save_sample),
            is_checked=is_checked,
            checked_on=path_of(options.eval) if is_checked else None,
        )

    @functools.cached_property
    def words(self) -> str:
        """The text. Raises EvaluationError if it cannot be read."""
        return sample_text(self.text, self.tokens)

    @property
    def kind(self) -> str:
        """SELF, MIXTURE, the name of a data set, TOKENS for a file of a sample, or "text" for other files."""
        if self.text.endswith(SUFFIX):
            return TOKENS
        return self.text if self.text in (SELF, MIXTURE) or is_data_set(self.text) else "text"

    @property
    def digest(self) -> str:
        """The hash of the text, of SELF that of the prose, or of the tokens in a file.

        Raises EvaluationError if these cannot be read.
        """
        if self._given is not None:
            return hashlib.sha256(f"{self._given.shape} ".encode() + self._given.tobytes()).hexdigest()
        read = prose() if self.text == SELF else self.words
        return (SELF if self.text == SELF else "") + hashlib.sha256(read.encode()).hexdigest()

    @functools.cached_property
    def contents(self) -> Contents:
        """What the model was when this was first asked. Raises SourceError if it cannot be read."""
        return Contents(self.checkpoint)

    def check_source(self) -> None:
        """Raise SourceChangedError if the model is no longer what it was: nothing learned since may be kept."""
        self.contents.check()

    @property
    def stated(self) -> list[Any]:
        """Everything on which it, and the model that reads it, depend. Raises EvaluationError for a wrong text."""
        digest = self.digest  # first, because a wrong text is found in no time
        stated = [__version__, sorted(self.contents.digests.items()), digest, self.tokens, WINDOW, SEED]
        return [*stated, UNSEEN, *self.checked.values()] if self.is_checked else stated

    @functools.cached_property
    def checked(self) -> dict[str, str]:
        """What manifests state of the text of `unseen`. Raises EvaluationError if it cannot be read."""
        if self._given_unseen is None:
            return {}
        return {"eval_sha256": hashlib.sha256(read_text(cast("Path", self.checked_on)).encode()).hexdigest()}

    @functools.cached_property
    def _given_unseen(self) -> Windows | None:
        """The tokens of the text that is given for `unseen`."""
        if self.checked_on is None:
            return None
        size = self.shape[1]
        return self._windows(read_text(self.checked_on), CHECKED, size, fewest=FEWEST_CHECKED * size)

    @functools.cached_property
    def _given(self) -> Windows | None:
        """The tokens in a file, as many as are wanted; None for another sample. Raises EvaluationError."""
        if self.kind != TOKENS:
            return None
        ids = read_sample(Path(self.text), self.described)
        if ids.size < FEWEST_TOKENS:
            raise EvaluationError(f"{self.text}: expected at least {FEWEST_TOKENS} tokens, found {ids.size}")
        return ids[: max(1, self.tokens // ids.shape[1])]

    @property
    def described(self) -> Path:
        """The folder with configuration and tokenizer."""
        return described_folder(self.checkpoint, self.source)

    @property
    def shape(self) -> tuple[int, int]:
        """The windows, and the tokens of each; a short text has fewer windows."""
        if self._given is not None:
            return self._given.shape
        size = min(WINDOW, read_folder(self.described).context or WINDOW)
        return max(1, self.tokens // size), size

    @functools.cached_property
    def token_count(self) -> int:
        """How many tokens it has, fewer than are wanted of a short text or a file. Raises EvaluationError."""
        if self.kind in (SELF, TOKENS):
            return math.prod(self.shape)
        return self._windows(self.words, *self.shape).size

    def save_again(self, out: Store, key: str, threads: int) -> None:
        """Write the file that is asked for beside a finished result, whose sample is gone. key: see worked_on_in"""
        if self.save is not None and not self.save.exists():
            with worked_on_in(folder_beside(out), out, key, threads, self.contents.is_same) as work:
                self.ids(work, threads)

    def ids(self, work: Path, threads: int) -> Tensor:
        """Return the token ids, [windows, tokens]; they are kept in a folder, so that no other is drawn."""
        file = work / "sample.safetensors"
        if not file.exists():
            windows, size = self.shape
            if self._given is not None:
                ids = self._given
            elif self.text == SELF:
                ids = self._own(work, (windows, size), threads).numpy()
            else:
                ids = self._windows(self.words, windows, size)
            self.check_source()
            write_sample(file, ids, self.described)
        ids = read_sample(file, self.described)
        if self.save is not None:
            write_sample(self.save, ids, self.described)
        return torch.from_numpy(ids)

    def unseen(self, work: Path, ids: Tensor) -> Tensor:
        """Return the token ids on which results are measured, [at most CHECKED windows, tokens].

        They are of the text that was given for them, or of the kind of the sample and not in it; if there are none,
        the last ones of the sample.

        work: the folder of `ids`
        ids: the sample
        """
        windows, size = ids.shape
        if self._given_unseen is not None:
            return torch.from_numpy(self._given_unseen)
        if self._given is not None:
            further = read_sample(Path(self.text), self.described)[windows:]
        elif self.text == SELF:
            further = read_sample(work / UNSEEN, self.described)
        else:
            further = self._windows(self.words, windows + CHECKED, size)[windows:]
        return torch.from_numpy(further[:CHECKED]) if len(further) >= FEWEST_CHECKED else ids[-CHECKED:]

    def _windows(self, words: str, windows: int, size: int, *, fewest: int | None = None) -> Windows:
        """Cut a text. Raises EvaluationError if it is too short, or there is no tokenizer."""
        described = self.described
        if not has_tokenizer(described):
            raise EvaluationError(
                f"{described}: expected a tokenizer to read the text with, found none; put its files there"
            )
        encoded, fewest = _encoded(described, words, windows * size), fewest or FEWEST_TOKENS
        if len(encoded.ids) // size * size < fewest:
            raise EvaluationError(
                f"the text: expected at least {fewest} tokens, found {len(encoded.ids)}; give a longer one"
            )
        return _cut(encoded, size)

    def texts(self, windows: int, size: int) -> Tensor:
        """Cut the prose of the mixture, for up to so many windows; none if no tokenizer of the model can read it."""
        described = self.described
        prose_windows = np.empty((0, size), dtype=np.int64)
        if windows and has_tokenizer(described):
            with contextlib.suppress(EvaluationError, SourceError):
                prose_windows = _cut(_encoded(described, prose(), windows * size), size)
                if (prose_windows == load_tokenizer(described).unk_token_id).mean() > MOST_UNKNOWN:
                    prose_windows = prose_windows[:0]
        return torch.from_numpy(prose_windows)

    def _own(self, work: Path, shape: tuple[int, int], threads: int) -> Tensor:
        """Make a sample by the model, or by a draft master of it that stays packed. shape: windows, and tokens"""
        from pqweights.calibrate.drawing import DRAWING, draw, first_token, own_sample
        from pqweights.runtime.loading.transformers import load

        is_large = 4 * sum(element_count(tensor) for tensor in self.checkpoint.tensors) > MOST_IN_MEMORY
        is_master = self.checkpoint.is_master
        is_quantized = not all(isinstance(tensor, PlainTensor) for tensor in self.checkpoint.tensors)
        with_draft = not is_master and (is_large or is_quantized or self.allow_pickle)
        packed = with_draft or (is_master and is_large)
        options: dict[str, Any] = {"packed": True, "dtype": "bfloat16"} if packed else {"dtype": "float32"}
        folder = work / "draft" if with_draft else self.source
        with slow_step(DRAWING):
            if with_draft:
                adapters = [adapter.given for adapter in self.checkpoint.adapters]
                made = Options(
                    allow_pickle=self.allow_pickle,
                    leave_out=self.leave_out,
                    adapter=adapters,
                    threads=threads,
                    overwrite=True,  # what lies there is of this content
                )
                recipe, out = load_recipe(DRAFT_RECIPE), open_store(folder)
                convert(plan_quantize(self.source, recipe, made, out=out), out, made)
            with Refused(f"{self.source}: transformers cannot run this model"), quiet():
                loaded = load(folder, **options)
            model = loaded.model.eval()
            unexpected = [name for name in loaded.unexpected if name not in self.checkpoint.left_out_tensors]
            check_loaded(folder, type(model).__name__, missing=loaded.missing, unexpected=unexpected)
            windows, tokens = shape
            used = windows - max(1, windows // DRAWN_EVERY)
            known = self.texts(used + (CHECKED if self.is_checked else 0), tokens)
            texts, further = known[:used], known[used:]
            ids = own_sample(model, texts, windows=windows, tokens=tokens, seed=SEED)
            if self.is_checked:
                if len(further) < FEWEST_CHECKED or not torch.equal(ids[-1], texts[-1]):
                    further = draw(model, windows=CHECKED, tokens=tokens, first=first_token(model), seed=SEED + 2)
                write_sample(work / UNSEEN, further.numpy(), self.described)
        shutil.rmtree(work / "draft", ignore_errors=True)
        return ids


def _encoded(source: Path, text: str, tokens: int) -> EncodedText:
    """Return the first tokens of a text. Raises EvaluationError for tokens that the model does not know."""
    encoded = encode(source, text, tokens, bos=True)
    check_vocabulary(read_folder(source), encoded.ids, encoded.bos)
    return encoded


def _cut(encoded: EncodedText, size: int) -> Windows:
    """Cut a text into windows; a rest that fills none is left out."""
    count = len(encoded.ids) // size
    pieces = [with_bos(piece, encoded.bos) for piece in encoded.ids[: count * size].reshape(count, size)]
    return np.stack(pieces) if pieces else np.empty((0, size), dtype=np.int64)


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


def write_sample(path: Path, ids: Windows, folder: Path) -> None:
    """Write a sample of a model. folder: where the files of the model lie that describe it. Raises OutputError"""
    write_whole(path.parent, path, [save({"ids": ids}, {"tokenizer": _tokenizer_digest(folder)})])


def read_sample(path: Path, folder: Path) -> Windows:
    """Return the sample in a file. folder: as above, of the model that is to read it

    Raises EvaluationError for a file that is no sample, and for one that another tokenizer made.
    """
    try:
        with safe_open(path, "numpy") as stored:
            ids: Windows = stored.get_tensor("ids")
            tokenizer = (stored.metadata() or {}).get("tokenizer")
    except (OSError, SafetensorError) as error:
        raise EvaluationError(f"{path}: expected a sample that `save_sample` has written: {error}") from None
    if ids.dtype != np.int64 or ids.ndim != 2 or not ids.size or ids.min() < 0:
        raise EvaluationError(f"{path}: expected `ids`, int64 [windows, tokens], found {ids.dtype} {list(ids.shape)}")
    if tokenizer != _tokenizer_digest(folder):
        raise EvaluationError(f"{path}: the sample was made with another tokenizer than that of {folder}")
    model = read_folder(folder)
    check_vocabulary(model, ids)
    if model.context is not None and ids.shape[1] > model.context:
        raise EvaluationError(f"{path}: has windows of {ids.shape[1]} tokens, but {folder} accepts {model.context}")
    return ids


def _tokenizer_digest(folder: Path) -> str:
    """Return a hash of the files of a tokenizer; that of nothing if there are none."""
    digest = hashlib.sha256()
    for file in sorted({file for pattern in TOKENIZER_FILES for file in folder.glob(pattern)}):
        if file.is_file() and file.name != _SETTINGS:
            digest.update(f"{file.name} {file.stat().st_size} ".encode() + file.read_bytes())
    return digest.hexdigest()
