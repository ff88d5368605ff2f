"""Caches on the CPU compute the same whatever device torch allocates on by default."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from caches import decoded, gaussian, store
from snippets import run_snippet
from torch import Tensor

from pqweights.runtime.kv.schemes import SCHEMES

CPU = torch.device("cpu")


def products(spec: str, kind: str) -> Tensor:
    """Products of queries with packed keys, or sums of packed values."""
    held = store(spec, 64, kind)
    held.append(gaussian(1, 2, 96, 64))
    quantizer, (chunk,) = held.quantizer, held.chunks
    if kind == "keys":
        return quantizer.scores(gaussian(1, 2, 4, 64), chunk.rows, chunk.shared)
    return quantizer.weighted(gaussian(1, 2, 4, 96), chunk.rows, chunk.shared)


COMPUTED: dict[str, Callable[[], Any]] = {
    **{
        f"{spec} {kind}, products": lambda spec=spec, kind=kind: products(spec, kind)
        for spec in ("hadamard:5,residual=0", "polar-rope:residual=0")
        for kind in ("keys", "values")
    },
    **{
        f"{spec} {kind}": lambda spec=spec, kind=kind: decoded(f"{spec}:residual=0", gaussian(1, 2, 70, 32), kind)
        for spec in sorted(set(SCHEMES) - {"none"})
        for kind in ("keys", "values")
    },
}


def outcomes(device: str) -> str:
    """Return what each computation gives on a default device beside the usual one, a line each."""
    lines = []
    for name, compute in COMPUTED.items():
        torch.set_default_device(device)
        try:
            found = compute()
        except Exception as error:
            found = error
        torch.set_default_device(None)
        torch.manual_seed(0)
        expected = compute()
        is_same = isinstance(found, Tensor) and found.device == CPU and torch.equal(found, expected)
        assert expected.isfinite().all() and expected.any()
        lines.append(f"{name}: {'the same' if is_same else found}")
    return "\n".join(lines)


def test_results_on_the_cpu_do_not_depend_on_the_default_device(tmp_path):
    """In a process of its own, which a kernel that wrote to memory of the device would end."""
    folder, out = Path(__file__).parent, tmp_path / "outcomes"
    code = f"""
import sys; sys.path.append({str(folder)!r})
import pathlib, test_default_device as t
pathlib.Path({str(out)!r}).write_text(t.outcomes('meta'))
"""
    assert run_snippet(code, tmp_path, tmp_path / "log") == 0, (tmp_path / "log").read_text()
    assert out.read_text() == "\n".join(f"{name}: the same" for name in COMPUTED)
