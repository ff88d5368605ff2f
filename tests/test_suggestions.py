"""What messages suggest in place of an unknown name."""

from __future__ import annotations

import pytest

from pqweights.codecs import CODECS
from pqweights.common.suggestions import instead, nearest
from pqweights.planning.recipe import RecipeFile, recipe_names
from pqweights.planning.roles import ROLES


@pytest.mark.parametrize(
    ("name", "known", "near"),
    [
        ("hadamard", CODECS, "hadamard-trellis"),
        ("loyd-max", CODECS, "hadamard-lloyd-max"),
        ("POLAR", CODECS, "polar"),
        ("gptq", CODECS, None),
        ("nf4", CODECS, None),
        ("atention", ROLES, "attention"),
        ("Norm", ROLES, "norm"),
        ("wombat", ROLES, None),
        ("", ROLES, None),
        ("q55", recipe_names(), "q5"),
        ("nvfp4-w4a16", recipe_names(), None),
        ("target_bwp", RecipeFile.__struct_fields__, "target_bpw"),
        ("5", RecipeFile.__struct_fields__, None),
    ],
)
def test_only_a_name_that_is_near_is_suggested(name: str, known: list[str], near: str | None) -> None:
    assert nearest(name, known) == near
    listed = f"expected {', '.join(known)}"
    assert instead(name, known) == (listed if near is None else f"the nearest is {near!r}; {listed}")
