"""The content of the files from which a calibration learns, which must be that of the checkpoint that is rewritten.

A calibration takes hours, reads its source several times, and goes on after an interruption. So what it knows is tied
to a hash of every byte: neither the time of a file nor the samples of a fingerprint tell of a change in place whose
author restored the time. A file is hashed again only when the system says that something about it changed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from blake3 import blake3

from pqweights.checkpoint.names import EVALUATION_FILE
from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.storage import Storage
from pqweights.checkpoint.writer import COPY_BYTES
from pqweights.common.threads import slow_step
from pqweights.errors import SourceChangedError, SourceReadError

# Ends of the names of small files on which a model and its tokenizer depend.
READ_WITH_WEIGHTS = (".json", ".model", "merges.txt", "vocab.txt")


class Contents:
    """What the files of a checkpoint in a folder on this machine were when they were first looked at.

    digests: of weights, configuration and tokenizer, by name
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Hash the files. Raises SourceError if one cannot be read, or changes meanwhile."""
        self._checkpoint = checkpoint
        # Looked at before the files are read: what changes meanwhile is seen the next time.
        self._states = {name: self._state(name) for name in sorted(self._names())}
        with slow_step("hashing the source"):
            digests = {name: self._digest(name) for name in self._states}
        self._check_states()
        self._adapters: list[Contents] = []
        for number, adapter in enumerate(checkpoint.adapters):
            digests[f"adapter {number}"] = json.dumps(adapter.describe(), sort_keys=True)
            if adapter.files.storage.local_folder() is not None:  # a commit on the Hub never changes
                self._adapters.append(beside := Contents(adapter.files))
                digests |= {f"adapter {number} {name}": digest for name, digest in beside.digests.items()}
        self.digests: Mapping[str, str] = digests

    def check(self) -> None:
        """Raise SourceChangedError if a file is not what it was."""
        self._check_states()
        if (name := self._changed()) is not None:
            raise _changed(name)
        for adapter in self._adapters:
            adapter.check()

    def is_same(self) -> bool:
        """Whether nothing proves that the files hold something else: their times may differ, or they may be gone."""
        try:
            return self._changed() is None and all(adapter.is_same() for adapter in self._adapters)
        except (SourceReadError, OSError):
            return True

    def _changed(self) -> str | None:
        """Return the name of a file whose content differs; None if there is none."""
        for name, state in self._states.items():
            now = self._state(name)
            if now != state and self._digest(name) != self.digests[name]:
                return name
            self._states[name] = now
        return None

    def _names(self) -> set[str]:
        """Return the files on the disk: what is made of a GGUF file follows from it."""
        at_the_top = [name for name in self._checkpoint.storage.files() if "/" not in name and name != EVALUATION_FILE]
        small = {name for name in at_the_top if name.endswith(READ_WITH_WEIGHTS) and (self._folder / name).is_file()}
        return small | {*self._checkpoint.weight_files}

    @property
    def _folder(self) -> Path:
        assert isinstance(self._checkpoint.storage, Storage)
        return self._checkpoint.storage.root

    def _state(self, name: str) -> tuple[int, ...]:
        status = os.stat(self._folder / name)
        return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def _digest(self, name: str) -> str:
        digest = blake3()
        try:
            with open(self._folder / name, "rb", buffering=0) as stream:
                while data := stream.read(COPY_BYTES):
                    digest.update(data)
        except OSError as error:
            raise SourceReadError(
                f"{name}: cannot be read ({error.strerror}): its disk or file server is failing; run the same command "
                "again"
            ) from None
        return digest.hexdigest()

    def _check_states(self) -> None:
        self._checkpoint.check_unchanged()
        self._checkpoint.storage.check_unchanged(self._states)


def _changed(name: str) -> SourceChangedError:
    return SourceChangedError(
        f"{name}: the source changed while it was being read (its content differs): leave its files as they are, and "
        "run the same command again"
    )
