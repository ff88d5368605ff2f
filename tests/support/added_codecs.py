"""The codecs that live in tests alone, and how they are added: by an entry of the dict, and nothing else."""

from __future__ import annotations

from polar_codec import PolarCodec
from superblock_codec import SuperblockCodec

from pqweights.codecs import CODECS
from pqweights.codecs.protocol import Codec

ADDED: dict[str, Codec] = {"test-superblocks": SuperblockCodec(), "test-polar": PolarCodec()}


def add() -> None:
    """For the rest of the process, as the processes do that a test kills."""
    CODECS.update(ADDED)
