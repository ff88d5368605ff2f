"""Generation as a library: the tokens of transformers' generate, conversations, stops, timings, masters and exports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import families
import language_models
import numpy as np
import pytest
import torch
import transformers
from calls import export, quantize
from language_models import SPEECH, TEMPLATE, babbler, continued, speaker

import pqweights
from pqweights.errors import GenerationError, OptionError, PqweightsError
from pqweights.inference.generator import Generator
from pqweights.inference.options import GenerationOptions
from pqweights.inference.report import CONTEXT, END, INTERRUPTED, LENGTH, Generation
from pqweights.inference.runtimes.models import open_model
from pqweights.inference.runtimes.steps import Continuation
from pqweights.planning.recipe import load_recipe

pytestmark = pytest.mark.usefixtures("narrow_layers_packed")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models: speaker, chat, babbler, its masters q4 and t4, and exports of q4."""
    folder = tmp_path_factory.mktemp("models")
    speaker(folder / "speaker")
    speaker(folder / "chat", template=TEMPLATE)
    babbler(folder / "babbler", template=TEMPLATE)
    for recipe in ("q4", "t4"):
        quantize(folder / "babbler", folder / recipe, load_recipe(recipe), threads=2)
    for target in ("bf16", "torchao", "mlx", "vllm"):
        export(folder / "q4", folder / target, target, threads=2)
    return folder


def generator(path: Path, told: list[str] | None = None, **options: Any) -> Generator:
    tell = (lambda line: None) if told is None else told.append
    return Generator(path, GenerationOptions(**options), tell=tell)


def reply(path: Path, prompt: str = "A", **options: Any) -> Generation:
    return generator(path, **options).reply(prompt, lambda piece: None)


def greedy(path: Path, prompt: str, count: int, **settings: Any) -> list[int]:
    """What generate of transformers continues a prompt with, up to an end of text."""
    model = pqweights.load_model(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    given = tokenizer(prompt, return_tensors="pt")
    found = model.generate(**given, max_new_tokens=count, do_sample=False, pad_token_id=0, **settings)
    return found[0, given["input_ids"].shape[1] :].tolist()


# --- tokens ---


def test_text_comes_in_pieces_and_ends_with_the_text(work):
    pieces: list[str] = []
    done = generator(work / "speaker").reply("A", pieces.append)
    assert pieces == list(SPEECH)
    assert (done.text, done.stop) == (SPEECH, END)
    assert done.token_ids == (*SPEECH.encode(), language_models.END)
    assert (done.prompt_tokens, done.read_tokens) == (1, 1)


@pytest.mark.parametrize("settings", [{"repetition_penalty": 1.8}, {"no_repeat_ngram_size": 1}, {"min_length": 30}])
def test_settings_of_the_model_are_applied(settings, work, tmp_path):
    folder = Path(shutil.copytree(work / "babbler", tmp_path / "model"))
    (folder / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": 257}))
    tokens = list(reply(folder, "Hello", no_chat=True, max_tokens=40).token_ids)
    assert tokens == greedy(folder, "Hello", 40)
    assert "min_length" in settings or tokens != greedy(work / "babbler", "Hello", 40)


PROMPT = np.array(families.IDS[0], dtype=np.int64)


@pytest.mark.parametrize("name", families.FAMILIES)
def test_families_give_the_tokens_of_transformers(name, tmp_path):
    """Also after a call that left its cache, which the next prompt begins with."""
    model = open_model(families.build(families.FAMILIES[name], tmp_path / "model"))
    asked = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
    expected = model.net.generate(torch.tensor(PROMPT)[None], **asked)[0, len(PROMPT) :].tolist()
    assert continued(model.stepper, PROMPT, 5) == expected[:5]
    longer = np.append(PROMPT, expected[:8])
    assert continued(model.stepper, longer, 4) == expected[8:]
    assert model.stepper.read_tokens in (len(longer), 4)


@pytest.mark.parametrize("cut", [{}, {"top_k": 40, "top_p": 0.8}])
def test_samples_are_as_frequent_as_the_processors_of_transformers_say(cut, work):
    model, count = open_model(work / "babbler"), 800
    with torch.no_grad():
        model.net.get_input_embeddings().weight.fill_(1)  # the logits are then the same after any tokens
        scores = model.net(torch.tensor(PROMPT)[None]).logits[:, -1] / 8
    if cut:
        scores = transformers.TopKLogitsWarper(cut["top_k"])(None, scores)
        scores = transformers.TopPLogitsWarper(cut["top_p"])(None, scores)
    expected = count * scores.softmax(-1)[0].numpy()
    tokens = continued(model.stepper, PROMPT, count, temperature=8.0, seed=1, **cut)
    found = np.bincount(tokens, minlength=len(expected))
    assert not found[expected == 0].any()
    assert (abs(found - expected) < 4 * np.sqrt(expected) + 1).all()


def test_what_prompts_have_in_common_is_not_read_again(work):
    stepper = open_model(work / "babbler").stepper
    continued(stepper, PROMPT, 1)
    # The last token is always read, and what comes after the first difference is taken off.
    prompts = {0: np.append(PROMPT, 3), 1: PROMPT, 2: np.append(PROMPT[:4], [3, 4]), 3: PROMPT[1:]}
    read = []
    for prompt in prompts.values():
        assert continued(stepper, prompt, 5) == continued(open_model(work / "babbler").stepper, prompt, 5)
        read.append(stepper.read_tokens)
    assert read == [1, 1, 2, len(PROMPT) - 1]

    def broken(token: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stepper.run(np.append(PROMPT[1:], 3), Continuation(most=5), broken)
    continued(stepper, PROMPT[1:], 1)
    assert stepper.read_tokens == len(PROMPT) - 1


# --- ends ---


def test_every_end_of_text_of_the_model_ends_a_reply(tmp_path):
    euro = "€".encode()[-1]
    folder = speaker(tmp_path / "model", generation={"eos_token_id": [language_models.END, euro]})
    assert (reply(folder).text, reply(folder).stop) == ("Zé\N{REPLACEMENT CHARACTER}", END)


def test_a_reply_ends_at_the_limits(work):
    done = reply(work / "speaker", max_tokens=3)
    assert (done.stop, len(done.token_ids), done.text) == (LENGTH, 3, "Zé")
    full = reply(work / "babbler", "A" * (language_models.CONTEXT - 5), no_chat=True, max_tokens=9)
    assert (full.stop, len(full.token_ids)) == (CONTEXT, 5)


def test_an_interrupt_ends_a_reply_and_keeps_the_text(work):
    asked = generator(work / "chat")

    def show(piece: str) -> None:
        if piece == "€":
            raise KeyboardInterrupt

    done = asked.reply("Hi", show)
    assert (done.text, done.stop) == ("Zé€", INTERRUPTED)
    assert asked.reply("Hi again", lambda piece: None).text == SPEECH


# --- conversations ---


def test_a_conversation_is_kept_and_not_read_again(work):
    asked = generator(work / "chat", system="S")
    first, second = (asked.reply(prompt, lambda piece: None) for prompt in ("Hi", "And?"))
    tokens = len("S") + len("Hi") + 4  # <s>, and the beginnings of three turns
    assert (first.prompt_tokens, first.read_tokens) == (tokens, tokens)
    assert second.prompt_tokens == tokens + len(SPEECH.encode()) + len("And?") + 2
    assert second.read_tokens == len("And?") + 2
    assert first.settings.chat and second.settings.chat


def test_replies_of_a_conversation_do_not_depend_on_what_was_kept(work):
    asked, anew = (generator(work / "babbler", max_tokens=12, temperature=1.0, seed=3) for _ in range(2))
    replies = [asked.reply(prompt, lambda piece: None) for prompt in ("Hi", "Hi")]
    expected = [anew.reply("Hi", lambda piece: None)]
    anew._model.stepper.forget()  # type: ignore[union-attr]
    expected.append(anew.reply("Hi", lambda piece: None))
    assert [done.token_ids for done in replies] == [done.token_ids for done in expected]
    assert replies[0].token_ids != replies[1].token_ids
    assert replies[1].read_tokens < expected[1].read_tokens


def test_the_oldest_turns_are_left_out_where_the_model_takes_no_more(work):
    told: list[str] = []
    asked = generator(work / "chat", told, system="S")
    for _ in range(4):
        asked.reply("w" * 25, lambda piece: None)
    # A quarter of the 128 tokens is left for the reply. A turn with its answer has 39 tokens: two turns fit, not three.
    assert told == ["the conversation is too long for the model: its first 2 turns are left out"] * 2
    with pytest.raises(GenerationError, match="takes 128"):
        asked.reply("w" * 128, lambda piece: None)
    assert asked.reply("Hi", lambda piece: None).text == SPEECH


def test_without_a_chat_template_the_text_is_continued(work):
    told: list[str] = []
    asked = generator(work / "speaker", told)
    asked.load()
    assert told == ["the model has no chat template: it continues the text as it is"]
    assert not asked.chats
    assert [asked.reply("A", lambda piece: None).prompt_tokens for _ in range(2)] == [1, 1]
    assert not generator(work / "chat", no_chat=True).chats


# --- settings ---


def test_models_that_sample_do_so_by_default(tmp_path):
    sampling = {"do_sample": True, "temperature": 3.0, "top_p": 0.9, "top_k": 20}
    folder = babbler(tmp_path / "model", generation=sampling)
    first = reply(folder, max_tokens=20)
    choice = first.settings.choice
    assert (choice.temperature, choice.top_p, choice.top_k) == (3.0, 0.9, 20)
    assert choice.seed is not None
    assert reply(folder, max_tokens=20, seed=choice.seed).token_ids == first.token_ids
    assert reply(folder, max_tokens=20, seed=choice.seed + 1).token_ids != first.token_ids
    changed = reply(folder, max_tokens=20, temperature=0.0).settings.choice
    assert (changed.temperature, changed.top_k, changed.seed) == (0.0, 0, None)
    assert reply(folder, max_tokens=2, top_p=0.5).settings.choice.top_p == 0.5


def test_other_models_take_the_likeliest_token(tmp_path):
    folder = babbler(tmp_path / "model", generation={"temperature": 0.6, "top_k": 20})
    assert reply(folder, max_tokens=2).settings.choice.temperature == 0
    asked = reply(folder, max_tokens=2, temperature=1.0, seed=1).settings.choice
    assert (asked.temperature, asked.top_p, asked.top_k) == (1.0, 1.0, 0)


def test_random_numbers_of_the_program_stay_as_they_were(work):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    reply(work / "babbler", max_tokens=3, temperature=1.0, seed=8)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "`max_tokens`: expected at least 1, found 0"),
        ({"temperature": -0.1}, "`temperature`: expected 0"),
        ({"temperature": float("nan")}, "`temperature`"),
        ({"temperature": float("inf")}, "`temperature`"),
        ({"top_p": 0.0}, "`top_p`: expected more than 0"),
        ({"top_p": 1.1}, "`top_p`"),
        ({"top_p": float("nan")}, "`top_p`"),
        ({"seed": -1}, "`seed`: expected at least 0"),
        ({"dtype": "int8"}, "`dtype`: expected auto or float32"),
        ({"system": "S", "no_chat": True}, "leave out"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_read(options, message, tmp_path):
    with pytest.raises(OptionError, match=message):
        generator(tmp_path / "nowhere", **options)


# --- masters and exports ---


def test_scalar_masters_run_packed_and_trellis_masters_decoded(work):
    scalar, trellis = (reply(work / name, "Hello", no_chat=True, max_tokens=20) for name in ("q4", "t4"))
    assert (scalar.settings.packed, trellis.settings.packed) == (True, False)
    assert list(trellis.token_ids) == greedy(work / "t4", "Hello", 20)
    assert "packed" in scalar.settings.runtime and "decoded" in trellis.settings.runtime


@pytest.mark.parametrize("name", ["bf16", "torchao", "mlx", "vllm"])
def test_exports_run_in_their_libraries(name, work):
    asked = generator(work / name, max_tokens=8)
    first = asked.reply("Hello", lambda piece: None)
    assert len(first.token_ids) == 8 and not first.settings.packed
    model = open_model(work / name, dtype="auto")
    tokenizer = transformers.AutoTokenizer.from_pretrained(work / name)
    turns = [{"role": "user", "content": "Hello"}]
    given = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert list(first.token_ids) == continued(model.stepper, np.array(given), 8)
    second = asked.reply("More", lambda piece: None)
    assert second.read_tokens < second.prompt_tokens
    settings = ({"temperature": 5.0, "seed": 3}, {"temperature": 5.0, "top_p": 1e-6})
    samples, likeliest = ([reply(work / name, max_tokens=8, **how).token_ids for _ in range(2)] for how in settings)
    assert samples[0] == samples[1] != likeliest[0] == likeliest[1]


def test_a_trellis_master_stays_packed_where_the_decoded_model_does_not_fit(work, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr("pqweights.inference.packing.free_bytes", lambda: 10**6)
    done = generator(work / "t4", told, max_tokens=4).reply("Hello", lambda piece: None)
    assert done.settings.packed
    assert len(told) == 1 and "the weights stay packed, which is slower" in told[0]
    with pytest.raises(GenerationError, match="let them stay packed: `packed`"):
        reply(work / "t4", packed=False)
    with pytest.raises(GenerationError, match="quantize it and run the master with `packed`"):
        reply(work / "babbler")


def test_a_master_that_is_damaged_is_refused_or_ends_the_reply(work, tmp_path):
    cut = Path(shutil.copytree(work / "q4", tmp_path / "cut"))
    (file,) = cut.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(PqweightsError, match=file.name):
        reply(cut)


# --- what cannot generate ---


def test_prompts_beyond_the_limit_are_refused_before_the_model_is_loaded(work):
    asked = generator(work / "speaker")
    with pytest.raises(GenerationError, match="has 128 tokens, and the model takes 128"):
        asked.reply("A" * 128, lambda piece: None)
    assert asked._model is None


def test_out_of_memory_is_one_line(work):
    asked = generator(work / "babbler")
    asked.load()

    def fail(*_: Any) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")

    asked._model.net.register_forward_pre_hook(fail)  # type: ignore[union-attr]
    with pytest.raises(GenerationError, match="not enough memory to generate"):
        asked.reply("Hello", lambda piece: None)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_p": 0.9}])
def test_logits_that_are_nan_are_an_error(options, work):
    asked = generator(work / "babbler", **options)
    asked.load()
    with torch.no_grad():
        asked._model.net.get_output_embeddings().weight[100] = torch.nan  # type: ignore[union-attr]
    with pytest.raises(GenerationError, match="logits are NaN: the model is damaged, or overflows"):
        asked.reply("Hello", lambda piece: None)


def test_figures_are_consistent(work):
    done = reply(work / "speaker")
    assert done.first_token_seconds is not None and done.first_token_seconds > 0 and done.load_seconds > 0
    assert done.prompt_rate == 1 / done.first_token_seconds
    assert done.rate == (len(done.token_ids) - 1) / done.generation_seconds
    assert done.to_json()["generated_tokens"] == len(done.token_ids) and done.peak_bytes > 10**7
    single = reply(work / "speaker", max_tokens=1)
    assert single.rate is None and single.prompt_rate is not None
