"""The sample of tokens from which a calibration learns: drawn from the model itself, or cut from a text."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from pqweights import __version__
from pqweights.calibrate.contents import Contents
from pqweights.calibrate.sample_file import SUFFIX, TOKENS, Windows, read_sample, write_sample
from pqweights.calibrate.sample_text import is_data_set, prose, sample_text
from pqweights.checkpoint.readers import PlainTensor, element_count
from pqweights.checkpoint.source import Checkpoint, described_folder
from pqweights.common.options import MIXTURE, SELF, Options, path_of
from pqweights.common.threads import slow_step
from pqweights.convert.convert import convert
from pqweights.convert.task import RunOptions
from pqweights.errors import EvaluationError, SourceError
from pqweights.planning.recipe import load_recipe
from pqweights.runtime.folders import read_folder
from pqweights.runtime.models import check_loaded
from pqweights.runtime.packages import Refused, quiet
from pqweights.runtime.texts import (
    EncodedText,
    check_vocabulary,
    encode,
    has_tokenizer,
    load_tokenizer,
    read_text,
    with_bos,
)
from pqweights.storage import open_store
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

    def _windows(self, words: str, windows: int, size: int, *, fewest: int = FEWEST_TOKENS) -> Windows:
        """Cut a text. Raises EvaluationError if it is too short, or there is no tokenizer."""
        described = self.described
        if not has_tokenizer(described):
            raise EvaluationError(
                f"{described}: expected a tokenizer to read the text with, found none; put its files there"
            )
        encoded = _encoded(described, words, windows * size)
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
                opened = Options(allow_pickle=self.allow_pickle, leave_out=self.leave_out, adapter=adapters)
                run = RunOptions(threads=threads, overwrite=True)  # what lies there is of this content
                recipe, out = load_recipe(DRAFT_RECIPE), open_store(folder)
                convert(plan_quantize(self.source, recipe, opened, out=out, run=run), out, run)
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
