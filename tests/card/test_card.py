"""The model card: its figures are the manifest's, its commands run, and neither strangers' names nor a refresh break it."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from calls import evaluate, make_card, write_card
from commands import invoke
from families import exported, model
from families import master as master_of
from helpers import run_command, small_checkpoint
from snippets import run_snippet

from pqweights.card import read_card, save_card
from pqweights.card.old_card import NOTES_BEGIN, NOTES_END
from pqweights.errors import MasterError, OutputError
from pqweights.hub.ids import is_repository_id
from pqweights.markdown import code, words
from pqweights.planning.plan import plan_shards
from pqweights.results.inspect import inspect
from pqweights.results.verify import verify
from pqweights.rewrite.manifest import mean_error, read_manifest
from pqweights.strict_json import json_bytes

TARGETS = ("bf16", "torchao-int4", "mlx-q4", "vllm-int4")
BASE = {
    "id": "org/base", "revision": "0123456789abcdef0123456789abcdef01234567", "license": "other", "license_name": "own",
    "license_link": "https://example.org/licence", "pipeline_tag": "text-generation", "language": ["en", "no"],
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A master with a rescued tensor and tensors of many kinds, made without transformers."""
    folder = tmp_path_factory.mktemp("card")
    run_command({"quantize": str(small_checkpoint(folder / "source")), "recipe": "q5"}, folder / "master")
    return folder / "master"


@pytest.fixture
def master(made: Path, tmp_path: Path) -> Path:
    """A copy, to be written into."""
    return Path(shutil.copytree(made, tmp_path / "master"))


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = json.loads((folder / "pqweights.json").read_bytes())
    change(data)
    (folder / "pqweights.json").write_bytes(json_bytes(data))


def set_model(folder: Path, about: dict[str, Any]) -> None:
    """As a run writes it that read a repository with such a card."""
    manifest = read_manifest(folder)
    changed = replace(manifest, identity=replace(manifest.identity, model=about))
    (folder / "pqweights.json").write_bytes(changed.to_bytes())


def facts(text: str) -> dict[str, Any]:
    """The front matter, as the Hub's own library reads it."""
    hub = pytest.importorskip("huggingface_hub")
    found: dict[str, Any] = hub.ModelCard(text, ignore_metadata_errors=False).data.to_dict()
    assert found == yaml.safe_load(text.split("---\n")[1])
    return found


def sections(text: str) -> list[str]:
    return re.findall(r"^## (.*)$", text, re.MULTILINE)


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)\n```$", text, re.MULTILINE | re.DOTALL)


# --- what it says ---


def test_the_front_matter(master: Path) -> None:
    change_manifest(master, lambda data: data.update(model=BASE))
    text = make_card(master, "someone/small-5bit").text
    assert facts(text) == {
        "license": "other", "license_name": "own", "license_link": "https://example.org/licence", "language": ["en", "no"],
        "pipeline_tag": "text-generation", "base_model": "org/base", "base_model_relation": "quantized",
        "library_name": "transformers", "tags": ["pqweights", "quantized", "5-bit"],
    }  # fmt: skip
    assert text.count("[org/base](https://huggingface.co/org/base)") == 1
    assert BASE["revision"] in text
    assert "\n# small-5bit\n" in text


def test_what_is_not_known_is_not_said(master: Path) -> None:
    text = make_card(master).text
    assert facts(text) == {"library_name": "transformers", "tags": ["pqweights", "quantized", "5-bit"]}
    assert "It was made from a local checkpoint (fingerprint `" in text
    assert "base model" not in text and "Evaluation" not in text and "DIR stands for this folder" in text
    named = make_card(master, base_model="org/base").text
    assert facts(named)["base_model"] == "org/base"
    assert (
        "The author of this card names [org/base](https://huggingface.co/org/base) as the base model; the manifest names"
        in named
    )


def test_every_figure_is_the_manifests(master: Path) -> None:
    found = inspect(master)
    manifest, totals = found.manifest, found.totals
    text = make_card(master, "a/b").text
    assert sections(text) == ["Load", "Recipe", "Weights", "Method", "Files and hashes"]
    assert f"**{totals['bits_per_weight']:.4f} bits per weight**" in text
    assert f"{8 * totals['output_bytes'] / totals['weights']:.4f} over all of them" in text
    assert f"{totals['coverage']:.4%} of {totals['weights']} weights" in text
    assert f"{totals['source_bytes'] / totals['output_bytes']:.2f} times smaller" in text
    lines = text.splitlines()
    for role in {tensor.role for tensor in manifest.tensors if tensor.bits is not None}:
        pairs = [p for p in zip(manifest.tensors, manifest.records, strict=True) if p[0].role == role and p[0].bits]
        worst, record = max(pairs, key=lambda pair: pair[1].relative_mse or 0)
        weights, stored = sum(t.weights for t, _ in pairs), sum(t.bytes for t, _ in pairs)
        cells = (
            f"`{role}`", len(pairs), weights, "`hadamard-lloyd-max`", 5, f"{8 * stored / weights:.4f}",
            f"{mean_error([r for _, r in pairs], 'relative_mse'):.4g}", f"`{worst.name}`", f"{record.relative_mse:.4g}",
        )  # fmt: skip
        assert f"| {' | '.join(map(str, cells))} |" in lines
    assert f"{mean_error(manifest.records, 'relative_mse'):.4g}" in next(li for li in lines if li.startswith("| all |"))
    rescued = "model.layers.0.mlp.up_proj.weight"
    assert any(line.startswith("Rescued: 1 tensor(s).") and line.endswith(f": `{rescued}`") for line in lines)
    assert "| `norm` | 2 | 256 | BF16 | kept | normalisation |" in lines
    assert hashlib.sha256((master / "pqweights.json").read_bytes()).hexdigest() in text
    assert manifest.source_fingerprint in text
    for shard in plan_shards(manifest.tensors, manifest.identity.max_shard_bytes, manifest.identity.metadata):
        assert f"| `{shard.file}` | {(master / shard.file).stat().st_size} |" in lines


def test_tensors_that_exceed_are_named(master: Path) -> None:
    def worsen(data: dict[str, Any]) -> None:
        next(t for t in data["tensors"] if t["name"] == "lm_head.weight")["relative_mse"] = 0.5

    change_manifest(master, worsen)
    assert (
        "**1 tensor(s) have an error above 1.25 times what the codec promises**, in every way that it can encode them: `lm_head.weight`"
        in make_card(master).text
    )


def test_recipes_and_calibration(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "name: mine\ndescription: Of mine.\nbits: 4\nrules:\n- name: ['*.down_proj.weight', 'lm_head.weight']\n  bits: 6\n"
        "- role: embedding\n  keep: true\n  reason: it is small\n"
    )
    run_command({"quantize": str(small_checkpoint(tmp_path / "s")), "recipe": str(recipe)}, tmp_path / "m")
    text = make_card(tmp_path / "m").text
    assert "`mine`: Of mine." in text
    assert "Default: `hadamard-lloyd-max`, 4 bits." in text
    assert "\n1. name <code>&#42;.down_proj.weight</code> or `lm_head.weight`: 6 bits\n" in text
    assert "\n2. role `embedding`: kept (it is small)\n" in text
    assert "| 4, 6 |" in text and "\n- 6-bit\n" in text and "4-bit" not in text  # most weights have 6
    assert "No calibration data was used." in text and "2306.00978" not in text

    def scale(data: dict[str, Any]) -> None:
        data["awq"] = {"sha256": "ab" * 32, "weights": 7, "any_codec": False}

    change_manifest(tmp_path / "m", scale)
    text = make_card(tmp_path / "m").text
    assert f"sha256 `{'ab' * 32}`" in text and "2306.00978" in text and "No calibration" not in text


@pytest.mark.parametrize("target", TARGETS)
def test_exports(target: str, base: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    if target == "mlx-q4":
        pytest.importorskip("mlx_lm")
    folder = Path(shutil.copytree(exported(base, "llama", target), tmp_path / "export"))
    set_model(folder, BASE)
    card = write_card(folder, "someone/out")
    text = card.text
    found = facts(text)
    assert (found["base_model"], found["base_model_relation"]) == ("org/base", "quantized")
    assert found["library_name"] == ("mlx" if target == "mlx-q4" else "transformers")
    of_target = {"bf16": "bf16", "torchao-int4": "torchao", "mlx-q4": "mlx", "vllm-int4": "vllm"}[target]
    assert of_target in found["tags"] and ("4-bit" in found["tags"]) == (target != "bf16")
    loads = {
        "bf16": 'AutoModelForCausalLM.from_pretrained("someone/out", dtype="auto")',
        "torchao-int4": 'AutoModelForCausalLM.from_pretrained("someone/out", dtype="auto", device_map="cuda")',
        "mlx-q4": "mlx_lm.generate --model someone/out --prompt",
        "vllm-int4": "vllm serve someone/out",
    }[target]
    assert loads in text and "import pqweights" not in text
    manifest = inspect(folder).manifest
    if target != "bf16":
        assert (
            f"{mean_error(manifest.records, 'relative_mse'):.4g} | {mean_error(manifest.records, 'total_mse'):.4g} |"
            in text
        )
        assert "computed from it and from the master's own error" in text
    assert "fingerprint of the master that it was made from: `" in text
    assert verify(folder, threads=2).ok
    assert not write_card(folder).changed


def test_an_export_of_another_basis(base: Path) -> None:
    pytest.importorskip("transformers")
    text = make_card(exported(base, "llama", "vllm-int4", basis="rotated"), "someone/out").text
    assert "vllm serve someone/out" in text and "on a single GPU" in text and "QuaRot*" in text
    assert not blocks(text, "python")


def test_what_the_master_of_an_export_was(base: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = Path(shutil.copytree(exported(base, "llama", "bf16"), tmp_path / "export"))
    manifest = read_manifest(master_of(base, "llama"))
    recipe = manifest.made_by["recipe"]
    about = {"recipe": recipe, "bits_per_weight": 6.125, "relative_mse": 0.000642}
    change_manifest(folder, lambda data: data.update(master=about))
    text = make_card(folder).text
    assert f"The master's recipe is `q6`: {words(recipe['description'])}" in text
    assert "The master itself has 6.1250 bits per weight and a relative MSE of 0.000642 against the original." in text
    change_manifest(
        folder, lambda data: data.update(master={"recipe": 3, "bits_per_weight": 10**400, "relative_mse": "x"})
    )
    text = make_card(folder).text
    assert "The master itself" not in text and "Recipe" not in sections(text)
    change_manifest(folder, lambda data: data.pop("master"))
    assert "Recipe" not in sections(make_card(folder).text)


def test_a_master_on_the_hub_is_named(base: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = Path(shutil.copytree(exported(base, "llama", "bf16"), tmp_path / "export"))
    revision = "fe" * 20
    change_manifest(folder, lambda data: (data.update(model=BASE), data["source"].update(id="o/m", revision=revision)))
    text = make_card(folder).text
    assert f"The master that it was made from is [o/m](https://huggingface.co/o/m) at commit `{revision}`." in text
    assert f"- master that it was made from: `o/m` at commit `{revision}`" in text


def test_a_master_on_the_hub_of_an_unknown_model_is_named(base: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = Path(shutil.copytree(exported(base, "llama", "bf16"), tmp_path / "export"))
    revision = "fe" * 20
    change_manifest(folder, lambda data: (data.pop("model", None), data["source"].update(id="o/m", revision=revision)))
    text = make_card(folder).text
    assert (
        f"It was made from the master [o/m](https://huggingface.co/o/m) at commit `{revision}` (fingerprint `" in text
        and "local" not in text
    )


@pytest.mark.parametrize("by_source", [False, True])
def test_an_export_of_a_scaled_master(by_source: bool, base: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = Path(shutil.copytree(exported(base, "llama", "vllm-int4"), tmp_path / "export"))
    recipe = read_manifest(master_of(base, "llama")).made_by["recipe"]
    about = {
        "recipe": recipe,
        "bits_per_weight": 6.125,
        "relative_mse": 0.000642,
        "awq": {"sha256": "ab" * 32, "weights": 7},
    }
    change_manifest(folder, lambda data: data.update(master=about))
    if by_source:
        change_manifest(folder, lambda data: data.update(original_fingerprint="cd" * 32))
    text = make_card(folder).text
    assert "The master itself has 6.1250 bits per weight." in text and "0.000642" not in text
    if by_source:
        assert "were scaled" not in text and "2306.00978" not in text
        assert (
            f"The master has activation-aware scales (file with sha256 `{'ab' * 32}`), which this export does not use."
            in text
        )
    else:
        assert (
            "In the master, the input channels of 7 weights were scaled before quantization, by activation-aware scales"
            in text
        )
    about.pop("awq")
    change_manifest(folder, lambda data: data.update(master=about))
    text = make_card(folder).text
    assert "The master was made without calibration data." in text and "relative MSE of 0.000642 against" in text


@pytest.mark.parametrize(
    ("target", "by", "says"),
    [
        (
            {"target_size": 9_000_000_000}, {"kind": "heuristic"},
            "by a rule of thumb for sensitivities, to meet the target of 9000000000 bytes with",
        ),
        (
            {"target_bpw": 4.25}, {"kind": "text", "sha256": "ab" * 32},
            f"by sensitivities measured on a text (file with sha256 `{'ab' * 32}`), to meet the target of 4.25 bits per weight with",
        ),
        ({"target_bpw": 4}, {"kind": "random tokens", "sha256": "cd" * 32}, "by sensitivities measured on random tokens (file with"),
        ({"target_size": "x"}, {"kind": ["<b>"]}, "to meet the target of the recipe with"),
    ],
)  # fmt: skip
def test_widths_that_were_chosen(
    target: dict[str, Any], by: dict[str, Any], says: str, master: Path, base: Path, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    fit = {"sensitivity": by, "predicted_rise": 0.0123456}
    change_manifest(master, lambda data: (data["recipe"].update(target), data.update(fit=fit)))
    text = make_card(master).text
    assert "Default: `hadamard-lloyd-max`, a width chosen for each group." in text
    assert "\nThe widths that no rule sets were chosen for each group of weights by " in text
    assert says in text and "<b>" not in text
    # That of the rule of thumb says nothing by itself.
    assert (", predicted as 0.01235 nats per token" in text) == (by["kind"] != "heuristic")
    assert text.count("arXiv:2411.17525](https://arxiv.org/abs/2411.17525)") == 2
    about = {"recipe": read_manifest(master).made_by["recipe"], "fit": fit | {"predicted_rise": None}}
    folder = Path(shutil.copytree(exported(base, "llama", "bf16"), tmp_path / "export"))
    change_manifest(folder, lambda data: data.update(master=about))
    text = make_card(folder).text
    assert "\nThe master's widths that no rule sets were chosen" in text and says in text and "predicted as" not in text


def test_left_out_tensors_and_a_target_of_later(base: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = Path(shutil.copytree(exported(base, "llama", "bf16"), tmp_path / "export"))
    change_manifest(folder, lambda data: data.update(left_out={"mtp.a": "no head | there", "mtp.b": "no head | there"}))
    assert "Left out: 2 tensor(s) of the master (no head &#124; there): `mtp.a`, `mtp.b`" in make_card(folder).text
    change_manifest(folder, lambda data: data.update(target="gguf"))
    with pytest.raises(MasterError, match=r"target: expected bf16, .*, found 'gguf'"):
        make_card(folder)


# --- its commands ---


def run(python: str, cwd: Path) -> None:
    log = cwd / "log"
    assert run_snippet(python, cwd, log) == 0, log.read_text()


@pytest.mark.parametrize("kind", ["master", "bf16", "vllm-int4", "mlx-q4"])
def test_the_commands_run(kind: str, base: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip({"vllm-int4": "compressed_tensors", "mlx-q4": "mlx_lm"}.get(kind, "torch"))
    folder = master_of(base, "llama") if kind == "master" else exported(base, "llama", kind)
    found = blocks(make_card(folder, str(folder)).text, "python")
    assert len(found) == (2 if kind == "master" else 1)
    for block in found:
        run(
            block
            + "\nprint(type(model).__name__)\nassert 'Llama' in type(model).__name__ or 'Model' == type(model).__name__",
            tmp_path,
        )


def test_the_command_of_another_architecture_runs(base: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = master_of(base, "gpt2")
    for block in blocks(make_card(folder, str(folder)).text, "python"):
        run(block + "\nassert type(model).__name__ == 'GPT2Model'", tmp_path)


@pytest.mark.parametrize(
    ("kind", "commands"),
    [
        ("master", ['load_model("a/b", revision="x/y")', "pqweights export a/b OUT --target bf16 --revision x/y"]),
        ("bf16", ['LM.from_pretrained("a/b", revision="x/y", dtype="auto")', 'Tokenizer.from_pretrained("a/b", revision="x/y")']),
        ("vllm-int4", ["vllm serve a/b --revision x/y", 'from_pretrained("a/b", revision="x/y", dtype="auto")']),
        (
            "mlx-q4",
            ['load("a/b", revision="x/y")', "hf download a/b --revision x/y --local-dir b-x-y\nmlx_lm.generate --model b-x-y "],
        ),
    ],
)  # fmt: skip
def test_the_commands_of_a_branch(kind: str, commands: list[str], base: Path) -> None:
    pytest.importorskip("transformers")
    folder = master_of(base, "llama") if kind == "master" else exported(base, "llama", kind)
    text = make_card(folder, "a/b", revision="x/y").text
    assert "It is on the branch `x/y`, which the commands name." in text
    assert all(each in text for each in commands)
    for block in blocks(text, "python"):
        compile(block, kind, "exec")
    main = make_card(folder, "a/b").text
    assert "revision" not in main and "branch" not in main
    # Kept by a refresh, for the same repository alone.
    assert make_card(folder, old=text).text == make_card(folder, "a/b", old=text).text == text
    assert make_card(folder, "a/b", old=text, revision="main").text == main
    assert "revision" not in make_card(folder, "c/d", old=text).text
    # A folder has none.
    assert "revision" not in make_card(folder, str(folder), revision="x/y").text


def test_mlx_takes_a_branch_in_python_alone() -> None:
    pytest.importorskip("mlx_lm")
    import inspect as python

    from mlx_lm import generate, load

    assert "revision" in python.signature(load).parameters
    parser = sys.modules[generate.__module__].setup_arg_parser()
    assert not any("revision" in option for action in parser._actions for option in action.option_strings)


@pytest.mark.parametrize("name", ["", "a b", "-x", "a..b", "a-->b", "a\nb", "\u00e4", "x" * 300])
def test_branches_that_a_card_cannot_carry(name: str, master: Path) -> None:
    with pytest.raises(OutputError, match=r"^branch '.*': expected a name of letters") as caught:
        make_card(master, "a/b", revision=name)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize("name", ["", "a b", "a/b/c", "x\ny", "\u202e", "a/" + "b" * 5000])
def test_base_models_that_are_none(name: str, master: Path) -> None:
    with pytest.raises(OutputError, match=r"^base model '.*': expected ORG/NAME") as caught:
        make_card(master, base_model=name)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_the_marks_of_a_card(master: Path) -> None:
    """Of what it was written with, whatever is done to it since."""
    text = make_card(master, "a/b").text
    assert "; notes: " + hashlib.sha256(b"\n").hexdigest()[:12] + " -->\n" in text
    edited = text.replace(NOTES_END, f"Mine.\n{NOTES_END}").replace("tags:\n", "z: 1\ndatasets: [x]\ntags:\n- mine\n")
    again = make_card(master, old=edited).text
    found = re.search(r"; notes: ([0-9a-f]{12}); keys: ([0-9a-f]{12}) -->\n", again)
    assert found is not None and found[1] == hashlib.sha256(b"\nMine.\n").hexdigest()[:12]
    assert make_card(master, old=again).text == again
    # Of two cards the one that was edited since stands, and the one here, if neither was.
    assert make_card(master, old=text, pushed=edited).text == again
    assert make_card(master, old=edited, pushed=text).text == again
    assert make_card(master, old=text, pushed=again).text == text
    assert make_card(master, old=None, pushed=again).text == again
    with pytest.raises(OutputError, match="its notes on the Hub and here differ"):
        make_card(master, old=edited, pushed=text.replace(NOTES_END, f"Theirs.\n{NOTES_END}"))
    with pytest.raises(OutputError, match="its front matter on the Hub and here differ"):
        make_card(master, old=edited, pushed=edited.replace("z: 1", "z: 2"))
    # A card of before there were marks: empty notes are no edit.
    unmarked = re.sub(r"; notes: .* -->", " -->", again)
    assert make_card(master, old=text, pushed=unmarked).text == again
    assert make_card(master, old=again, pushed=re.sub(r"; notes: .* -->", " -->", text)).text == again


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "AutoModelForCausalLM"),
        ({"architectures": ["GPT2LMHeadModel"]}, "AutoModelForCausalLM"),
        ({"architectures": ["BertModel"], "model_type": "bert"}, "AutoModel"),
        ({"architectures": ["T5EncoderModel"], "model_type": "t5"}, None),
        ({"architectures": ["T5ForConditionalGeneration"]}, None),
        ({"architectures": ["Qwen3VLForConditionalGeneration"], "vision_config": {}}, "AutoModelForImageTextToText"),
        ({"architectures": []}, None), ({"architectures": [3]}, None), ({"architectures": "x"}, None), ({}, None),
    ],
)  # fmt: skip
def test_classes(config: dict[str, Any], expected: str | None, master: Path) -> None:
    (master / "config.json").write_text(json.dumps({"model_type": "x"} | config))
    text = make_card(master, "a/b").text
    assert 'model = pqweights.load_model("a/b")' in text
    assert (f"from transformers import {expected}, AutoTokenizer" in text) == (expected is not None)
    assert ("from transformers" in text) == (expected is not None)


def test_commands_without_tokenizer_or_model_and_with_code(master: Path) -> None:
    change_manifest(master, lambda data: data["files"].pop("tokenizer.json"))
    (master / "config.json").write_text(
        '{"model_type": "x", "architectures": ["XForCausalLM"], "auto_map": {"a": "b"}}'
    )
    text = make_card(master, "a/b").text
    assert "AutoTokenizer" not in text and 'load_model("a/b", trust_remote_code=True)' in text
    (master / "config.json").write_text("{}")
    text = make_card(master, "a/b").text
    assert facts(text)["library_name"] == "pqweights"
    assert not blocks(text, "python") and "pqweights export a/b OUT --target bf16" in text


# --- evaluation ---


def test_evaluations(base: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from pqweights.evaluate.recording import make_record
    from pqweights.results.evaluation_record import find_place, write_record

    folder = Path(shutil.copytree(master_of(base, "llama"), tmp_path / "m"))
    text = " ".join(f"w{number}" for number in np.random.default_rng(8).integers(0, 500, 300))
    place = find_place(folder)
    assert place is not None
    original = model(base, "llama")
    for options in ({"window": 64}, {"window": 32, "reference": original, "score_first": True}):
        report = evaluate([folder], text, name="a|b.txt", **options)  # type: ignore[arg-type]
        write_record(place, make_record(report, report.rows[0], text))
    card = make_card(folder, "a/b")
    assert card.evaluations == 2
    assert sections(card.text)[3] == "Evaluation"
    scores = report.rows[0].scores
    assert scores.perplexity_change is not None and scores.divergence is not None
    for value, error, form in (
        (*scores.perplexity, ".4f"), (*scores.perplexity_change, "+.4f"), (*scores.divergence.mean, ".5f"),
        (*scores.divergence.top1, ".2%"),
    ):  # fmt: skip
        assert f"| {value:{form}} ± {error:{form.lstrip('+')}} |" in card.text
    assert "| 1 | <code>a&#124;b.txt</code> |" in card.text
    assert (
        f"2. <code>a&#124;b.txt</code> (sha256 `{hashlib.sha256(text.encode()).hexdigest()}`), 300 tokens; 34 window(s) of 32, "
        "stride 8, the first 24 tokens of each but the first masked, "
    ) in card.text
    assert (
        "float32 on cpu; computed by transformers, weights decoded by pqweights; reference `llama`, which has the fingerprint of the checkpoint that was quantized."
        in card.text
    )
    change_manifest(folder, lambda data: data.update(model=BASE))
    stale = make_card(folder, "a/b")
    assert stale.evaluations == 0 and "Evaluation" not in stale.text and "perplexity" not in stale.text
    assert "pqweights-eval.json" not in stale.text


def test_damaged_evaluations_are_refused(master: Path) -> None:
    (master / "pqweights-eval.json").write_text("{")
    with pytest.raises(MasterError, match="pqweights-eval"):
        make_card(master)


# --- what is kept of the card that is there ---


def edited(folder: Path, change: Callable[[str], str]) -> None:
    (folder / "README.md").write_bytes(change((folder / "README.md").read_bytes().decode()).encode())


@pytest.mark.parametrize(
    "notes",
    ["", "\n", "\n## Mine\n\n```python\nx\n```\n", "\r\nDOS \r\n\r\n", " é\u2028\x0b| <b>--- \n---\n", "no newline"],
)
def test_notes_survive_byte_for_byte(notes: str, master: Path) -> None:
    write_card(master, "a/b")
    edited(master, lambda text: text.replace(f"{NOTES_BEGIN}\n{NOTES_END}", f"{NOTES_BEGIN}{notes}{NOTES_END}"))
    assert write_card(master).changed == (notes != "\n")  # their mark
    before = (master / "README.md").read_bytes()
    assert not write_card(master).changed
    edited(master, lambda text: text.replace("# b\n", "# another title\n"))
    change_manifest(master, lambda data: data.update(model=BASE))
    card = write_card(master, "c/d")
    assert card.changed and f"{NOTES_BEGIN}{notes}{NOTES_END}".encode() in (master / "README.md").read_bytes()
    change_manifest(master, lambda data: data.pop("model"))
    write_card(master, "a/b")
    # The base model stays known.
    edited(master, lambda text: re.sub(r"(?m)^base_model.*\n", "", text))
    write_card(master)
    assert (master / "README.md").read_bytes() == before


def test_foreign_front_matter_survives_and_ours_does_not(master: Path) -> None:
    change_manifest(master, lambda data: data.update(model={k: v for k, v in BASE.items() if k != "language"}))
    write_card(master, "a/b")
    theirs = (
        "datasets:\n- x/y\nlanguage: de\nwidget: {text: 'a: b'}\nlicense: forged\nthumbnail: \"a\\u2028---\\u2028b\"\n"
    )
    edited(master, lambda text: text.replace("license: other\n", theirs).replace("- quantized", "- quantized\n- mine"))
    card = write_card(master)
    found = facts(card.text)
    assert found["license"] == "other"
    assert found["tags"] == ["pqweights", "quantized", "5-bit", "mine"]
    expected = {"datasets": ["x/y"], "language": "de", "widget": {"text": "a: b"}, "thumbnail": "a\u2028---\u2028b"}
    assert {key: found[key] for key in expected} == expected
    assert not write_card(master).changed
    # What the manifest said once and no longer says was ours.
    change_manifest(master, lambda data: data.update(model={"language": ["fr"]}))
    found = facts(write_card(master).text)
    assert "license" not in found and "pipeline_tag" not in found
    assert (found["language"], found["datasets"], found["base_model"]) == (["fr"], ["x/y"], "org/base")


def test_a_licence_of_the_user_stands_where_the_manifest_has_none(master: Path) -> None:
    write_card(master)
    edited(master, lambda text: text.replace("---\n", "---\nlicense: mit\nlicense_link: x\n", 1))
    found = facts(write_card(master).text)
    assert (found["license"], found["license_link"]) == ("mit", "x")
    assert not write_card(master).changed
    change_manifest(master, lambda data: data.update(model={"license": "apache-2.0"}))
    found = facts(write_card(master).text)
    assert found["license"] == "apache-2.0" and "license_link" not in found


def test_the_repository_is_remembered(master: Path) -> None:
    write_card(master, "a/b")
    assert make_card(master, None, None, read_card(master)).repository == "a/b"
    assert 'load_model("a/b")' in write_card(master).text
    assert 'load_model("c/d")' in write_card(master, "c/d").text


def test_a_card_of_another_origin(master: Path) -> None:
    foreign = "---\nlicense: mit\nbase_model: org/base\ndatasets: [x]\n---\n\n# Mine\r\n\nText"
    (master / "README.md").write_bytes(foreign.encode())
    with pytest.raises(
        OutputError, match=r"README\.md: the file exists, and pqweights card did not write it; pass --adopt to keep"
    ):
        write_card(master)
    assert (master / "README.md").read_bytes() == foreign.encode()
    card = write_card(master, adopt=True)
    assert f"{NOTES_BEGIN}\n\n# Mine\r\n\nText\n{NOTES_END}\n" in card.text
    found = facts(card.text)
    assert (found["license"], found["base_model"], found["datasets"]) == ("mit", "org/base", ["x"])
    assert not write_card(master).changed
    assert not write_card(master, adopt=True).changed


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace(NOTES_BEGIN, ""), lambda text: text.replace(NOTES_END, ""),
        lambda text: text.replace(NOTES_BEGIN, "").replace(NOTES_END, ""), lambda text: text + NOTES_END,
        lambda text: text.replace(NOTES_BEGIN, NOTES_BEGIN * 2),
        lambda text: text.replace(NOTES_BEGIN, "@").replace(NOTES_END, NOTES_BEGIN).replace("@", NOTES_END),
        lambda text: text.replace("tags:", "tags: [", 1), lambda text: text.replace("\n---\n", "\n", 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("adopt", [False, True])
def test_damaged_cards_are_refused(damage: Callable[[str], str], adopt: bool, master: Path) -> None:
    write_card(master)
    edited(master, damage)
    before = (master / "README.md").read_bytes()
    with pytest.raises(OutputError, match=r"^README\.md: ") as caught:
        write_card(master, adopt=adopt)
    assert "\n" not in str(caught.value)
    assert (master / "README.md").read_bytes() == before


def test_a_card_that_is_no_text(master: Path) -> None:
    (master / "README.md").write_bytes(b"\xff\xfe")
    with pytest.raises(OutputError, match="UTF-8"):
        write_card(master)


def test_saving_compares_with_what_is_there(master: Path) -> None:
    card = make_card(master, "a/b")
    assert save_card(master, card) and not save_card(master, card)
    again = make_card(master, old=card.text)
    assert not again.changed and again.text == card.text


# --- hostile manifests ---

HOSTILE = [
    "a | b", "`a`", "a\nb", "<script>", "<!-- /notes -->", NOTES_BEGIN, NOTES_END, "-->", "---", "\n---\n", "# a", "```", "\\|",
    "[a](javascript:b)", "é\u202e", "x" * 5000, "", "_a_ *b*", "&lt;", "$x$", "a\u2028b", "\x00",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_strangers_names_break_nothing(name: str, master: Path) -> None:
    plain = make_card(master, "a/b").text

    def spoil(data: dict[str, Any]) -> None:
        data["recipe"] |= {"name": name, "description": name, "codec": [name], "bits": {name: name}}
        data["recipe"]["rules"] = [{"name": [name], "role": name, "reason": name, "bits": name}, 3]
        data["awq"] = {"sha256": name, "weights": name}
        data["source"] |= {"fingerprint": name, "id": name, "revision": name}
        data["model"] = {"id": name, "revision": name}
        for tensor in data["tensors"]:
            tensor["name"] = name + tensor["name"]
            tensor["role"], tensor["reason"] = name, name
            for stored in tensor["stored"]:
                stored["name"] = name + stored["name"]

    change_manifest(master, spoil)
    text = make_card(master, "a/b").text
    assert text.count(NOTES_BEGIN) == text.count(NOTES_END) == 1
    assert len(re.findall(r"<!--", text)) == len(re.findall(r"-->", text)) == 3
    assert facts(text)["tags"] == ["pqweights", "quantized", "5-bit"]
    assert sections(text) == sections(plain)
    assert text.count("```") == plain.count("```")
    for line in text.splitlines():
        if line.startswith("|"):
            assert line.endswith("|") and len(re.findall(r"(?<!\\)\|", line)) in (3, 7, 10)
    assert "<script" not in text and "](java" not in text
    assert make_card(master, None, None, text).text == text


@pytest.mark.parametrize("text", HOSTILE)
def test_words_and_code(text: str) -> None:
    for shown in (words(text), code(text)):
        assert shown.isprintable() and "|" not in shown and "<!" not in shown and "-->" not in shown
    assert code("model.layers.0.mlp-x_y.weight") == "`model.layers.0.mlp-x_y.weight`"
    assert words("lm_head: _a_") == "lm_head: &#95;a&#95;"


def test_a_licence_may_be_any_line(master: Path) -> None:
    hostile = "---: {x}, [y] | `<!-- /notes -->` #"
    change_manifest(master, lambda data: data.update(model={"license": hostile, "language": [hostile, "no", "null"]}))
    text = write_card(master).text
    assert yaml.safe_load(text.split("---\n")[1])["license"] == hostile
    assert not write_card(master).changed


# --- the command ---


def test_the_command(master: Path) -> None:
    result = invoke("card", master, "--repo", "a/b", "--base-model", "org/base")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{master / 'README.md'}: written; 0 evaluation(s)\n"
    assert result.stderr == ""
    text = (master / "README.md").read_text()
    assert text == make_card(master, "a/b", "org/base").text
    result = invoke("card", master, "--json")
    assert json.loads(result.stdout) == {
        "card": str(master / "README.md"), "changed": False, "repository": "a/b", "base_model": "org/base", "evaluations": 0,
    }  # fmt: skip
    assert verify(master, threads=1).ok


def test_printing_writes_nothing(master: Path) -> None:
    before = sorted(path.name for path in master.iterdir())
    result = invoke("card", master, "--print", "--repo", "a/b")
    assert result.stdout == make_card(master, "a/b").text
    assert sorted(path.name for path in master.iterdir()) == before
    assert invoke("card", master, "--print", "--json").exit_code == 2


def test_refusals(master: Path, tmp_path: Path) -> None:
    for arguments in (("--repo", "name"), ("--repo", "a/b/c"), ("--repo", "a/../b"), ("--base-model", "a b")):
        result = invoke("card", master, *arguments)
        assert result.exit_code == 2 and "ORG/NAME" in result.stderr
    assert not (master / "README.md").exists()
    change_manifest(master, lambda data: data.update(model=BASE))
    result = invoke("card", master, "--base-model", "org/other")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: base model org/other: pqweights.json says that it was made from org/base\n"
    (tmp_path / "empty").mkdir()
    assert invoke("card", tmp_path / "empty").exit_code == 1
    (master / "README.md").write_text("mine")
    assert invoke("card", master).stderr.startswith(
        "error: README.md: the file exists, and pqweights card did not write it"
    )
    assert invoke("card", master, "--adopt").exit_code == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a/b", True), ("Qwen/Qwen3-0.6B", True), ("a_b/c.d-e", True), ("gpt2", False), ("a/b/c", False), ("a//b", False),
        ("/a", False), ("a/", False), ("a/b c", False), ("a/-b", False), ("a/b.", False), ("a/b--c", False), ("a/b..c", False),
        ("a/b.git", False), ("a/" + "b" * 95, False), ("a/b\n", False), ("", False), ("ä/b", False),
    ],
)  # fmt: skip
def test_ids(text: str, expected: bool) -> None:
    assert is_repository_id(text) == expected
    hub = pytest.importorskip("huggingface_hub")
    if "/" in text and expected:
        hub.utils.validate_repo_id(text)
    assert is_repository_id("gpt2", namespace=False)
