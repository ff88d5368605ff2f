"""Caches on the CPU compute the same whatever device torch allocates on by default."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from caches import decoded, gaussian
from torch import Tensor

from pqweights.inference.kv.codes import coded, levels_of, width_tables
from pqweights.inference.kv.polar_rope import TokenWise
from pqweights.inference.kv.schemes import SCHEMES
from pqweights.kernels.attention import hadamard_scores, polar_rope_scores, weighted_values

CPU = torch.device("cpu")


def polar_scores() -> Tensor:
    codes = torch.arange(2 * 3 * 32 * 16, device=CPU).to(torch.uint8).view(2, 3, 32, 16)
    queries, scales = gaussian(2, 4, 64), gaussian(2, 32).abs()
    return polar_rope_scores(queries, codes, codes, scales, angle_bits=4, radius_bits=4)


def token_wise(bits: int) -> tuple[Tensor, Tensor]:
    codes = torch.arange(2 * 70 * 64 * bits // 8, device=CPU).to(torch.uint8).view(2, 70, -1)
    levels, factors = width_tables(bits, CPU)[0], gaussian(2, 70).abs().half()
    scores = hadamard_scores(gaussian(2, 4, 64), codes, factors, levels)
    return scores, weighted_values(gaussian(2, 4, 70), codes, levels, size=64, scales=factors)


def restored() -> Tensor:
    states, runs = gaussian(1, 2, 70, 64), [(32, 4), (32, 2)]
    codes, _ = coded(states, runs)
    return levels_of({"codes": codes, "factor": states[..., 0].abs().half()}, runs)


def weighted_by_integers() -> Tensor:
    quantizer = TokenWise(4)
    states = gaussian(1, 2, 70, 64)
    shared = quantizer.fit(states, None, 0)
    return quantizer.weighted(gaussian(1, 2, 4, 70), quantizer.encode(states, shared, 0), shared)


COMPUTED: dict[str, Callable[[], Any]] = {
    "polar scores": polar_scores,
    "2 bits": lambda: token_wise(2),
    "5 bits": lambda: token_wise(5),
    "levels": restored,
    "integers": weighted_by_integers,
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
        lines.append(f"{name}: {found if isinstance(found, Exception) else alike(found, compute())}")
    return "\n".join(lines)


def alike(found: Any, expected: Any) -> str:
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    return "the same" if all(a.device == CPU and torch.equal(a, b) for a, b in pairs) else "another result"


def test_results_on_the_cpu_do_not_depend_on_the_default_device() -> None:
    """In a process of its own, which a kernel that wrote to memory of the device would end."""
    support = Path(__file__).parents[1] / "support"
    script = (
        f"import sys; sys.path.append({str(support)!r}); import test_default_device as t; print(t.outcomes('meta'))"
    )
    run = [sys.executable, "-c", script]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parent, check=False)
    expected = "\n".join(f"{name}: the same" for name in COMPUTED)
    assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr


@pytest.mark.parametrize("name", COMPUTED)
def test_what_is_compared_is_computed(name: str) -> None:
    found = COMPUTED[name]()
    assert all(each.isfinite().all() and each.any() for each in (found if isinstance(found, tuple) else (found,)))
