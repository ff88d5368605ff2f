"""From a command to a kernel a reader goes through ten functions in eight files at most: counted by a traceback."""

from __future__ import annotations

import traceback
from pathlib import Path

import pqweights_cli
import pytest
from language_models import babbler
from pqweights_cli.main import _made

import pqweights
from pqweights.kernels import native

MOST_FRAMES, MOST_FILES = 10, 8
FOLDERS = tuple(Path(package.__file__).parent for package in (pqweights, pqweights_cli))


class Reached(Exception):
    """A kernel is called."""


@pytest.mark.parametrize(
    ("command", "of_master"),
    [
        ("quantize", False),
        ("export --target vllm --group-size 32", False),
        ("export --target vllm --group-size 32", True),
        ("export --target mlx", False),
        ("export --target gguf --without-tokenizer", False),
        ("export --target bf16", True),
    ],
)
def test_a_kernel_is_ten_frames_below_its_command(
    command: str, of_master: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ours, from the function of the command to the one that calls the kernel; threads count as if they were one."""
    source = babbler(tmp_path / "model")
    for file in source.glob("tokenizer*"):  # llama.cpp has none of this kind
        file.unlink()
    if of_master:
        pqweights.quantize(source, tmp_path / "master")
        source = tmp_path / "master"

    def reach(*given: object) -> None:
        raise Reached

    monkeypatch.setattr(native, "call", reach)
    arguments = [*command.split(), str(source), str(tmp_path / "out")]
    with pytest.raises(Reached) as raised:
        _made(arguments[0])(arguments, standalone_mode=False)
    frames = [frame for frame in traceback.extract_tb(raised.value.__traceback__) if _is_ours(frame.filename)]
    names = [frame.name for frame in frames]
    frames = frames[names.index("command") :]
    listed = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    assert len(frames) <= MOST_FRAMES, listed
    assert len({frame.filename for frame in frames}) <= MOST_FILES, listed


def _is_ours(file: str) -> bool:
    return any(Path(file).is_relative_to(folder) for folder in FOLDERS)
