"""What a card says: front matter, figures, recipe, exports and their masters, evaluations."""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import evaluate, make_card, write_card
from cards import BASE, change_manifest, facts, sections, set_model
from commands import done, invoke, raises
from families import exported, model
from families import master as master_of
from helpers import run_command, small_checkpoint

from pqweights.checkpoint.source import open_local
from pqweights.common.markdown import words
from pqweights.convert.manifest import read_manifest
from pqweights.convert.records import mean_error
from pqweights.errors import MasterError
from pqweights.planning.layout import Safetensors
from pqweights.results import evaluation_record
from pqweights.results.inspect import inspect
from pqweights.results.verify import verify

pytestmark = pytest.mark.usefixtures("narrow_layers_packed")

TARGETS = ("bf16", "torchao", "mlx", "vllm")


def test_front_matter_holds_the_facts_of_the_base_model(master: Path) -> None:
    change_manifest(master, lambda data: data.update(model=BASE))
    text = make_card(master, "someone/small-5bit").text
    assert facts(text) == {
        "license": "other",
        "license_name": "own",
        "license_link": "https://example.org/licence",
        "language": ["en", "no"],
        "pipeline_tag": "text-generation",
        "base_model": "org/base",
        "base_model_relation": "quantized",
        "library_name": "transformers",
        "tags": ["pqweights", "quantized", "5-bit"],
    }
    assert text.count("[org/base](https://huggingface.co/org/base)") == 1
    assert BASE["revision"] in text
    assert "\n# small-5bit\n" in text


def test_unknown_facts_are_left_out(master: Path) -> None:
    text = make_card(master).text
    assert facts(text) == {"library_name": "transformers", "tags": ["pqweights", "quantized", "5-bit"]}
    assert "It was made from a local checkpoint (fingerprint `" in text
    assert "base model" not in text and "Evaluation" not in text and "DIR stands for this folder" in text
    named = make_card(master, base_model="org/base").text
    assert facts(named)["base_model"] == "org/base"
    assert (
        "The author of this card names [org/base](https://huggingface.co/org/base) as the base model; the manifest "
        "names" in named
    )


def test_figures_match_the_manifest(master: Path) -> None:
    found = inspect(master)
    manifest, totals = found.manifest, found.totals
    text = make_card(master, "a/b").text
    assert sections(text) == ["Load", "Recipe", "Weights", "Method", "Files and hashes"]
    assert f"**{totals.bits_per_weight:.4f} bits per weight**" in text
    assert f"{8 * totals.output_bytes / totals.weights:.4f} over all of them" in text
    assert f"{totals.coverage:.4%} of {totals.weights} weights" in text
    assert f"{totals.source_bytes / totals.output_bytes:.2f} times smaller" in text
    lines = text.splitlines()
    for role in {tensor.role for tensor in manifest.tensors if tensor.bits is not None}:
        pairs = [p for p in zip(manifest.tensors, manifest.records, strict=True) if p[0].role == role and p[0].bits]
        worst, record = max(pairs, key=lambda pair: pair[1].relative_mse or 0)
        weights, stored = sum(t.weights for t, _ in pairs), sum(t.bytes for t, _ in pairs)
        cells = (
            f"`{role}`",
            len(pairs),
            weights,
            "`hadamard-lloyd-max`",
            5,
            f"{8 * stored / weights:.4f}",
            f"{mean_error([r for _, r in pairs], 'relative_mse'):.4g}",
            f"`{worst.name}`",
            f"{record.relative_mse:.4g}",
        )
        assert f"| {' | '.join(map(str, cells))} |" in lines
    assert f"{mean_error(manifest.records, 'relative_mse'):.4g}" in next(li for li in lines if li.startswith("| all |"))
    rescued = "model.layers.0.mlp.up_proj.weight"
    assert any(
        line.startswith("Rescued: 1 tensor with an error above ") and line.endswith(f": `{rescued}`") for line in lines
    )
    assert "| `norm` | 2 | 256 | BF16 | kept | normalisation |" in lines
    assert hashlib.sha256((master / "pqweights.json").read_bytes()).hexdigest() in text
    assert manifest.source_fingerprint in text
    for shard in Safetensors({"": manifest.metadata}).shards(manifest.tensors, manifest.max_shard_bytes):
        assert f"| `{shard.file}` | {(master / shard.file).stat().st_size} |" in lines


def test_tensors_above_the_promised_error_are_named(master: Path) -> None:
    def worsen(data: dict[str, Any]) -> None:
        next(t for t in data["tensors"] if t["name"] == "lm_head.weight")["relative_mse"] = 0.5

    change_manifest(master, worsen)
    assert (
        "**1 tensor with an error above 1.25 times what the codec promises**, in every way that it can encode them: "
        "`lm_head.weight`" in make_card(master).text
    )


def test_recipe_section_lists_rules_and_calibration(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "name: mine\ndescription: Of mine.\nbits: 4\nrules:\n"
        "- name: ['*.down_proj.weight', 'lm_head.weight']\n  bits: 6\n"
        "- role: embedding\n  keep: true\n  reason: it is small\n"
    )
    run_command({"quantize": str(small_checkpoint(tmp_path / "s")), "recipe": str(recipe)}, tmp_path / "m")
    text = make_card(tmp_path / "m").text
    assert "`mine`: Of mine." in text
    assert "Default: `hadamard-lloyd-max`, 4 bits. `pqweights.json` lists its 2 rules for other weights." in text
    assert "| 4, 6 |" in text and "\n- 6-bit\n" in text and "4-bit" not in text  # most weights have 6 bits
    assert "No calibration data was used." in text and "2306.00978" not in text

    def scale(data: dict[str, Any]) -> None:
        data["awq"] = {"sample": "text", "tokens": 4096, "weights": {}}

    change_manifest(tmp_path / "m", scale)
    text = make_card(tmp_path / "m").text
    assert "searched on a text of 4096 tokens" in text and "2306.00978" in text and "No calibration" not in text


@pytest.mark.parametrize("target", TARGETS)
def test_card_of_an_export_says_how_its_runtime_loads_it(target: str, base: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported(base, "llama", target), tmp_path / "export"))
    set_model(folder, BASE)
    card = write_card(folder, "someone/out")
    text = card.text
    found = facts(text)
    assert (found["base_model"], found["base_model_relation"]) == ("org/base", "quantized")
    assert found["library_name"] == ("mlx" if target == "mlx" else "transformers")
    of_target = {"bf16": "bf16", "torchao": "torchao", "mlx": "mlx", "vllm": "vllm"}[target]
    assert of_target in found["tags"] and ("4-bit" in found["tags"]) == (target != "bf16")
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


def test_export_states_what_is_known_of_its_master(base: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported(base, "llama", "vllm"), tmp_path / "export"))
    recipe = read_manifest(master_of(base, "llama")).made_by["recipe"]

    def card_of(**about: Any) -> str:
        change_manifest(folder, lambda data: data.update(master=about))
        return make_card(folder).text

    text = card_of(recipe=recipe)
    assert f"The recipe of the master is `q6`: {words(recipe['description'])}" in text
    assert "The master was made without calibration data." in text and "2306.00978" not in text
    text = card_of(recipe=recipe, awq={"sha256": "ab" * 32}, fit={"sensitivity": ["<b>"]})
    assert "In the master, input channels have activation-aware scales" in text and "2306.00978" in text
    assert text.count("arXiv:2411.17525](https://arxiv.org/abs/2411.17525)") == 1 and "<b>" not in text
    assert "Recipe" not in sections(card_of(recipe=3))
    at = {"id": "o/m", "revision": "fe" * 20}
    change_manifest(folder, lambda data: (data.pop("master"), data.update(model=BASE), data["source"].update(at)))
    text = make_card(folder).text
    link = f"[o/m](https://huggingface.co/o/m) at commit `{at['revision']}`"
    assert link not in text and "Recipe" not in sections(text)
    assert f"- source: `o/m` at commit `{at['revision']}`" in text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--keep", "lm_head*"), "lists its 1 rule for"),
        (("--target-bpw", "4.5"), "to meet the target of the recipe with"),
    ],
)
def test_card_says_if_options_changed_a_recipe(options: tuple[str, ...], says: str, tmp_path: Path) -> None:
    done("quantize", small_checkpoint(tmp_path / "model"), tmp_path / "master", *options)
    text = make_card(tmp_path / "master").text
    assert "\n`q5`, changed by options.\n" in text and says in text and "Five bits" not in text
    assert re.search(r"\n# pqweights [0-9]-bit master\n", text)


def test_left_out_tensors_are_listed_and_an_unknown_target_is_refused(base: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported(base, "llama", "bf16"), tmp_path / "export"))
    change_manifest(folder, lambda data: data.update(left_out={"mtp.a": "no head | there", "mtp.b": "no head | there"}))
    assert "Left out: 2 tensors of the master (no head &#124; there): `mtp.a`, `mtp.b`" in make_card(folder).text
    change_manifest(folder, lambda data: data.update(target="onnx"))
    with raises(MasterError, "target", "bf16", "'onnx'"):
        make_card(folder)


def evaluate_and_record(folder: Path, text: str, name: str = "the text", **options: Any) -> Any:
    from pqweights.runtime.report import make_record

    report = evaluate([folder], text, name=name, **options)
    place = evaluation_record.result_folder_of(folder)
    assert place is not None
    evaluation_record.write_record(place, make_record(report, report.rows[0], text))
    return report.rows[0].scores


def test_evaluation_table_has_the_recorded_figures(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation_record, "FEWEST_TOKENS_FOR_CARD", 100)
    folder = Path(shutil.copytree(master_of(base, "llama"), tmp_path / "m"))
    text = " ".join(f"w{number}" for number in np.random.default_rng(8).integers(0, 500, 300))
    evaluate_and_record(folder, text, "a|b.txt", window=64)
    original = model(base, "llama")
    scores = evaluate_and_record(folder, text, "a|b.txt", window=32, reference=original, score_first=True)
    card = make_card(folder, "a/b")
    assert card.evaluations == 2
    assert sections(card.text)[3] == "Evaluation"
    # Recorded without rounding: a figure that is rounded twice is not always the one that eval shows.
    recorded = evaluation_record.read_records(*evaluation_record.result_folder_of(folder)[:2])[1]  # type: ignore[misc]
    assert recorded.perplexity == evaluation_record.Figure(*scores.perplexity)
    assert recorded.top1_agreement == evaluation_record.Figure(*scores.divergence.top1)
    for value, error, form in (
        (*scores.perplexity, ".4f"),
        (*scores.perplexity_change, "+.4f"),
        (*scores.divergence.mean, ".5f"),
        (*scores.divergence.top1, ".2%"),
    ):
        assert f"| {value:{form}} ± {error:{form.lstrip('+')}} |" in card.text
    assert "| 1 | <code>a&#124;b.txt</code> |" in card.text
    assert (
        f"2. <code>a&#124;b.txt</code> (sha256 `{hashlib.sha256(text.encode()).hexdigest()}`), 300 tokens; "
        "34 windows of 32, stride 8, the first 24 tokens of each but the first masked, "
    ) in card.text
    assert (
        "float32 on cpu; computed by transformers, weights decoded by pqweights; reference `llama`, which has the "
        "fingerprint of the checkpoint that was quantized." in card.text
    )
    change_manifest(folder, lambda data: data.update(model=BASE))
    stale = make_card(folder, "a/b")
    assert stale.evaluations == 0 and "Evaluation" not in stale.text and "perplexity" not in stale.text
    assert "pqweights-eval.json" not in stale.text


def test_evaluation_of_an_export_without_a_reference_shows_perplexity_alone(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation_record, "FEWEST_TOKENS_FOR_CARD", 10)
    folder = Path(shutil.copytree(exported(base, "llama", "bf16"), tmp_path / "export"))
    text = " ".join(f"w{number}" for number in range(200))
    perplexity = evaluate_and_record(folder, text, window=64).perplexity
    card = make_card(folder).text
    assert f"| {perplexity.value:.4f} ± {perplexity.standard_error:.4f} |" in card
    assert "KL" not in card and "reference" not in card
    # The master is not the checkpoint that was quantized.
    evaluate_and_record(folder, text, window=64, reference=master_of(base, "llama"))
    fingerprint = open_local(master_of(base, "llama")).fingerprint()
    assert f"; reference `llama` (fingerprint `{fingerprint}`)." in make_card(folder).text


def test_quick_evaluations_are_recorded_but_not_in_the_card(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(master_of(base, "llama"), tmp_path / "m"))
    (tmp_path / "text.txt").write_text(" ".join(f"w{number}" for number in range(200)))
    before = make_card(folder, "a/b").text
    arguments = ("eval", folder, "--text", tmp_path / "text.txt", "--window", 64)
    evaluated = done(*arguments)
    assert evaluated.stderr.endswith(
        f"recorded in {folder / 'pqweights-eval.json'}; too few tokens for the model card, which shows evaluations "
        "that score at least 10000\n"
    )
    quick = make_card(folder, "a/b")
    assert (quick.evaluations, quick.quick_evaluations) == (0, 1)
    assert "Evaluation" not in quick.text and "perplexity" not in quick.text
    about = " `pqweights-eval.json` holds the figures of evaluations and names the manifest that they belong to."
    assert quick.text.replace(about, "") == before
    shown = invoke("card", folder)
    assert "1 evaluation with fewer than 10000 scored tokens left out of the card" in shown.stderr
    (record,) = evaluation_record.read_records(*evaluation_record.result_folder_of(folder)[:2])  # type: ignore[misc]
    monkeypatch.setattr(evaluation_record, "FEWEST_TOKENS_FOR_CARD", record.scored_tokens)
    enough = make_card(folder, "a/b")
    assert (enough.evaluations, enough.quick_evaluations) == (1, 0)
    assert f"{record.scored_tokens} tokens scored" in enough.text
    assert "too few" not in invoke(*arguments).stderr


def test_damaged_evaluation_record_is_refused(master: Path) -> None:
    (master / "pqweights-eval.json").write_text("{")
    with raises(MasterError, "pqweights-eval"):
        make_card(master)


def test_a_master_without_loss_has_neither_a_width_nor_errors(base: Path, tmp_path: Path) -> None:
    done("quantize", model(base, "llama"), tmp_path / "master", "--lossless")
    text = make_card(tmp_path / "master").text
    assert facts(text)["tags"] == ["pqweights", "lossless"]
    assert "\n# pqweights lossless master\n" in text
    assert "weights packed without loss and then exported" in text and "weights that are packed;" in text
    assert "| role | tensors | weights | codec | bits per weight |" in text
    assert "Reading a weight gives the numbers of the source, bit for bit." in text
    assert "MSE" not in text and "Not quantized" not in text
    assert "Kept as they are:" in text
