"""Expressions in the configuration of a folder that a runtime would never finish matching with names of modules."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from commands import raises

from pqweights.errors import SourceError
from pqweights.runtime.folders import read_folder, slow_expression
from pqweights.targets.linear import patterns

NAME = "model.layers.11.mlp.experts.127.down_proj" * 2
# As llm-compressor, GPTQModel and exports have them.
QUICK = (
    "lm_head", "re:.*lm_head", "re:.*mlp.gate$", "re:vision_tower.*", r"re:.*\.(q|k|v)_proj$", "re:.*block.*norm.*",
    r"re:^(?!.*\.mlp\.experts).*", r"re:(.*\.)?model\.layers\.\d+\.mlp\.experts\.\d+(\..*)?$", "re:(model\\.)?layers.0",
    r"re:^(?!(?:(.*\.)?\d+(\..*)?$|(.*\.)?lm_head|(.*\.)?layers\.\d+\.mlp\.gate)).+$", "re:.*[.](gate|up)_proj",
    *patterns(["m.layers.0.mlp.experts.3.up.weight"], ["m.layers.0.mlp.experts.4.up.weight", "v.0.up.weight"]),
)  # fmt: skip
SLOW = (
    r"re:(.*)*x", r"re:(\w+\.?)+$", r"re:((a|b|ab)*c)*$", r"re:(?:l+|m)+#", "re:" + ".*" * 12 + "#", r"re:(l?l?)*#",
    r"re:(?=(.+)+#)", "re:(.{1,9}){1,99}#", "re:" + "(" * 5000, "re:*.gate",
)  # fmt: skip


def settings(expression: str) -> list[dict[str, Any]]:
    """Where a configuration may have it."""
    plain = expression.removeprefix("re:")
    return [
        {"quant_method": "compressed-tensors", "ignore": ["lm_head", expression]},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": [expression]}}},
        {"quant_method": "torchao", "quant_type": {"default": {"_data": {"module_fqn_to_config": {expression: {}}}}}},
        {"quant_method": "fp8", "modules_to_not_convert": [plain]},
    ]


@pytest.mark.parametrize("expression", SLOW, ids=lambda text: text[:20])
def test_a_folder_with_an_expression_that_takes_forever_is_refused(expression: str, tmp_path: Path) -> None:
    for stated in settings(expression):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": stated}))
        with raises(SourceError, "config.json", "quantization_config", "without nested repetitions") as raised:
            read_folder(tmp_path)
        assert len(str(raised.value)) < 500


@pytest.mark.parametrize("expression", QUICK)
def test_usual_expressions_are_taken_and_quick(expression: str) -> None:
    from compressed_tensors.utils.match import match_name

    assert not any(map(slow_expression, settings(expression)))
    start = time.process_time()
    match_name(NAME, expression)
    assert time.process_time() - start < 1
