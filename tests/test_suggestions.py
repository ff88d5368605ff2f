"""What messages suggest in place of an unknown name."""

from __future__ import annotations

import pytest

from pqweights.codecs import CODECS
from pqweights.common.suggestions import instead, nearest
from pqweights.planning.recipe import RecipeFile, recipe_names
from pqweights.planning.roles import ROLES

NEAR = {
    "codec": (
        {"hadamard": "hadamard-trellis", "loyd-max": "hadamard-lloyd-max", "POLAR": "polar", "nf4": None},
        CODECS,
    ),
    "role": ({"atention": "attention", "Norm": "norm", "wombat": None, "": None}, ROLES),
    "recipe": ({"q55": "q5", "nvfp4-w4a16": None}, recipe_names()),
    "key": ({"target_bwp": "target_bpw", "5": None}, RecipeFile.__struct_fields__),
}


@pytest.mark.parametrize(
    ("name", "known", "near"), [(name, known, near) for pairs, known in NEAR.values() for name, near in pairs.items()]
)
def test_only_a_name_that_is_near_is_suggested(name: str, known: list[str], near: str | None) -> None:
    assert nearest(name, known) == near
    listed = f"expected {', '.join(known)}"
    assert instead(name, known) == (listed if near is None else f"the nearest is {near!r}; {listed}")
