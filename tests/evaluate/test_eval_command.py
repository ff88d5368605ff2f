"""pqweights eval on tiny random models: settings, reports, refusals, texts, and the command."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from calls import evaluate
from closeness import ALIKE, F32_MATRIX, F32_SUM, approx
from commands import invoke, raises
from evaluated import TEXT, evaluated, model_folder

from pqweights.common.threads import listening
from pqweights.errors import DeviceError, EvaluationError, MissingDependencyError, OptionError, SourceError
from pqweights.runtime.models import open_model
from pqweights.runtime.protocol import TextWindows, compare
from pqweights.runtime.texts import tokenize, wikitext


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return evaluated(tmp_path_factory, "eval")


@pytest.fixture
def copy(work: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A function that copies a folder, so that the test may damage it."""
    return lambda name: Path(shutil.copytree(work / name, tmp_path / name))


# --- reports ---


def test_report_holds_settings_and_scores(work):
    report = evaluate([work / "q3", work / "bf16"], TEXT, name="words", reference=work / "source", max_tokens=290)
    settings = report.settings
    # The context is 128 tokens, so there are (290 - 128) // 32 + 1 windows of 128, a quarter of a window apart.
    assert vars(settings) == {
        "text": "words",
        "tokens": 290,
        "windows": 6,
        "window": 128,
        "stride": 32,
        "score_first": False,
        "bos": False,
        "scored_tokens": 6 * 32,
        "dtype": "float32",
        "device": "cpu",
        "packed": False,
        "reference": str(work / "source"),
    }
    assert [row.model for row in report.rows] == [str(work / "q3"), str(work / "bf16")]
    ids = tokenize(work / "source", TEXT)[:290]
    windows = TextWindows(size=128, stride=32)
    expected = compare(open_model(work / "bf16"), open_model(work / "source"), ids=ids, windows=windows)
    assert report.rows[1].scores == expected
    # The export holds the decoded weights rounded to BF16, so its scores are close but not equal.
    master = report.rows[0].scores
    assert master.log_perplexity.value == approx(expected.log_perplexity.value, ALIKE)
    assert master.log_perplexity != expected.log_perplexity
    assert report.reference.scores.losses == compare(open_model(work / "source"), None, ids=ids, windows=windows).losses
    assert report.reference.scores.divergence is None
    assert report.rows[0].runtime == "transformers, weights decoded by pqweights"
    assert {row.dtype for row in (*report.rows, report.reference)} == {"float32"}


def test_sizes_count_bytes_and_parameters(work):
    report = evaluate([work / "source", work / "q3", work / "bf16"], TEXT)
    plain, master, exported = (row.size for row in report.rows)
    for size, name in ((plain, "source"), (master, "q3"), (exported, "bf16")):
        assert size.bytes == sum(path.stat().st_size for path in (work / name).glob("*.safetensors"))
        assert size.bits_per_parameter == 8 * size.bytes / plain.parameters
    import torch

    model = transformers.AutoModelForCausalLM.from_pretrained(work / "source", dtype=torch.bfloat16)
    assert plain.parameters == master.parameters == exported.parameters == model.num_parameters()
    assert (plain.bits_per_weight, exported.bits_per_weight) == (None, None)
    assert master.bits_per_weight == approx(3.125)
    assert report.reference is None
    assert report.settings.reference is None


def test_packed_master_gives_the_same_scores(work):
    (packed,) = evaluate([work / "q3"], TEXT, reference=work / "source", packed=True).rows
    (decoded,) = evaluate([work / "q3"], TEXT, reference=work / "source").rows
    assert packed.runtime == "transformers, pqweights' packed weights"
    assert packed.scores.log_perplexity.value == approx(decoded.scores.log_perplexity.value, F32_MATRIX)
    # A reference is always decoded, so the same master may be model and reference.
    (both,) = evaluate([work / "q3"], TEXT, reference=work / "q3", packed=True).rows
    assert both.scores.divergence.mean.value == approx(0, 0, F32_SUM)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, (128, 32, False)),
        ({"window": 64}, (64, 16, False)),
        ({"window": 64, "stride": 65}, None),
        ({"stride": 100}, (128, 100, False)),
        ({"window": 32, "stride": 8, "score_first": True}, (32, 8, True)),
    ],
)
def test_window_and_stride_have_defaults(asked, expected, work):
    if expected is None:
        with raises(EvaluationError, "`stride` 65", 64):
            evaluate([work / "source"], TEXT, **asked)
        return
    settings = evaluate([work / "source"], TEXT, **asked).settings
    assert (settings.window, settings.stride, settings.score_first) == expected
    first = settings.window - 1 if settings.score_first else settings.window - settings.masked
    assert settings.scored_tokens >= first + (settings.windows - 1) * (settings.window - settings.masked) - 4


def test_window_is_the_shortest_context_of_all_models(work, tmp_path):
    short = model_folder(tmp_path / "short", max_position_embeddings=40)
    settings = evaluate([work / "source"], TEXT, reference=short).settings
    assert (settings.window, settings.stride) == (40, 10)


def test_model_without_a_context_length_gets_windows_of_2048(copy):
    folder = copy("source")
    change_config(folder, max_position_embeddings=None)
    settings = evaluate([folder], TEXT * 10).settings
    assert (settings.window, settings.stride) == (2048, 512)


def test_tokenizer_may_be_read_from_another_folder(work, copy):
    bare = copy("bf16")
    for path in bare.glob("tokenizer*"):
        path.unlink()
    with raises(SourceError, bare, "--tokenizer"):
        evaluate([bare], TEXT)
    found, expected = evaluate([bare], TEXT, tokenizer=work / "source"), evaluate([work / "bf16"], TEXT)
    assert found.rows[0].scores == expected.rows[0].scores


def test_at_most_two_models_are_in_memory(work, monkeypatch):
    import weakref

    from pqweights.runtime import evaluation as package

    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most = 0

    def counting(*arguments: Any, **options: Any) -> Any:
        nonlocal most
        model = open_model(*arguments, **options)
        alive.add(model)
        most = max(most, len(alive))
        return model

    monkeypatch.setattr(package, "open_model", counting)
    evaluate([work / "bf16", work / "q3", work / "source"], TEXT, reference=work / "source")
    assert most == 2


# --- refusals ---


def change_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= values
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_text_that_max_tokens_makes_shorter_than_a_window_is_refused(work):
    with raises(EvaluationError, "`max_tokens` 100"):
        evaluate([work / "source"], TEXT, max_tokens=100)


def test_cuda_without_a_gpu_is_refused(work, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with raises(DeviceError, "`device` cuda"):
        evaluate([work / "source"], TEXT, device="cuda")
    assert evaluate([work / "source"], TEXT, device="auto").settings.device == "cpu"


def test_device_option_is_refused_for_mlx(copy, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    folder = copy("source")
    change_config(folder, quantization={"bits": 4, "group_size": 64})
    with raises(EvaluationError, "`device` cuda"):
        evaluate([folder], TEXT, device="cuda")
    report = evaluate([folder], TEXT, device="auto")
    assert (report.settings.device, report.rows[0].runtime) == ("cpu", "mlx-lm")


def test_no_models_or_an_unknown_dtype_is_refused(work):
    with raises(EvaluationError, "one model"):
        evaluate([], TEXT)
    with raises(OptionError, "`dtype`", "'int8'"):
        evaluate([work / "source"], TEXT, dtype="int8")


# --- texts ---


@pytest.mark.parametrize("is_there", [True, False])
def test_wikitext_is_joined_as_in_the_literature_or_is_one_line_without_network(is_there, monkeypatch, capfd):
    asked: list[Any] = []

    def load(*arguments: Any, **options: Any) -> Any:
        asked.append((arguments, options))
        print("a progress bar", file=sys.stderr)
        if not is_there:
            raise ConnectionError("Couldn't reach 'Salesforce/wikitext'\non the Hub")
        return {"text": ["", " = Title = \n", "Text .\n"]}

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))
    if is_there:
        assert wikitext() == "\n\n = Title = \n\n\nText .\n"
    else:
        with raises(EvaluationError, "Couldn't reach 'Salesforce/wikitext' on the Hub", "`text`"):
            wikitext()
    assert asked == [(("Salesforce/wikitext", "wikitext-2-raw-v1"), {"split": "test"})]
    assert capfd.readouterr() == ("", "")


def test_wikitext_without_datasets_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with raises(MissingDependencyError, "pip install", "'datasets>=4.0'"):
        wikitext()


# --- the command ---


def test_table_shows_scores_and_settings(work, monkeypatch):
    monkeypatch.chdir(work)
    result = invoke("eval", "q3", "bf16", "--text", "text.txt", "--reference", "source")
    assert result.exit_code == 0, result.stderr
    settings, blank, *table = result.stdout.splitlines()
    assert settings == (
        "text.txt: 300 tokens, 6 windows of 128, stride 32, the first 96 tokens of each masked: 192 tokens scored; "
        "float32 on cpu"
    )
    assert blank == ""
    titles = "model GB bits/param bits/weight perplexity change KL mean KL 99% top-1"
    assert table[0].split() == titles.split()
    assert [line.split()[0] for line in table[1:4]] == ["source", "q3", "bf16"]
    assert "(reference)" in table[1]
    assert table[5:7] == [
        "source, bf16: computed by transformers",
        "q3: computed by transformers, weights decoded by pqweights",
    ]
    report = evaluate([Path("q3")], TEXT, reference=Path("source"))
    perplexity, change = report.rows[0].scores.perplexity, report.rows[0].scores.perplexity_change
    assert f"{perplexity.value:.4f} +- {perplexity.standard_error:.4f}" in table[2]
    assert f"{change.value:+.4f} +- {change.standard_error:.4f}" in table[2]
    assert "standard error over windows" in result.stdout and "KL(reference || model)" in result.stdout
    alone = invoke("eval", "q3", "--text", "text.txt", "--score-first").stdout
    assert "KL" not in alone and "change" not in alone
    assert "of each but the first masked: 287 tokens scored" in alone
    single = invoke("eval", "q3", "--text", "text.txt", "--max-tokens", 128).stdout.splitlines()[3]
    assert "+-" not in single


def test_steps_without_progress_are_announced(work):
    told: list[str] = []
    with listening(told.append):
        evaluate([work / "q3"], TEXT, reference=work / "source")
    loading = [f"loading {work / name}" for name in ("source", "q3")]
    assert [step for step in told if step] == ["reading the text with transformers", *loading]
    assert told[-1] == ""


def test_json_holds_the_whole_report(work):
    options = ("--text", work / "text.txt", "--reference", work / "source", "--dtype", "bfloat16")
    result = invoke("eval", work / "q3", *options, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found.keys() == {"settings", "reference", "models"}
    assert (found["settings"]["masked"], found["settings"]["dtype"]) == (96, "bfloat16")
    (row,) = found["models"]
    assert found["reference"].keys() == row.keys()
    assert found["reference"]["kl"] is found["reference"]["perplexity_change"] is None
    assert row["kl"].keys() == {"mean", "median", "percentile_99", "percentile_99_9", "maximum"}
    assert 0 < row["kl"]["median"] <= row["kl"]["percentile_99"] <= row["kl"]["percentile_99_9"] <= row["kl"]["maximum"]
    assert 0 <= row["top1_agreement"]["value"] <= 1
    assert math.exp(row["log_perplexity"]["value"]) == approx(row["perplexity"]["value"])
    assert row["bits_per_weight"] == approx(3.125)
    assert row["dtype"] == "bfloat16"


def test_wrong_usage_exits_with_2(work):
    text = ("--text", work / "text.txt")
    assert invoke("eval", *text).exit_code == 2
    for arguments in (
        (),
        (*text, "--dataset", "wikitext"),
        ("--dataset", "pile"),
        (*text, "--window", 1),
        (*text, "--stride", 0),
        (*text, "--max-tokens", 1),
        (*text, "--device", "tpu"),
    ):
        assert invoke("eval", work / "source", *arguments).exit_code == 2


def test_fresh_process_prints_only_progress_to_stderr(work):
    """Packages print while they are imported and while they load; the command suppresses that."""
    main = "from pqweights_cli.main import main; main()"
    options = ["--text", str(work / "text.txt"), "--max-tokens", "290", "--no-record", "--json"]
    command = [sys.executable, "-c", main, "eval", str(work / "q3"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert all(line.startswith(("evaluating ", "evaluating: ")) for line in done.stderr.splitlines())
    report = json.loads(done.stdout)
    assert report["models"][0]["runtime"].startswith("transformers")
