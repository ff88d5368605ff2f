"""Train a tiny Llama to look values up over 2048 tokens of Python source.

    OMP_NUM_THREADS=1 python benchmarks/train_recall.py FOLDER --minutes 35

Two threads compute half of each batch. On cores shared with other programs, two OpenMP threads in each product wait for
each other far longer.

A document is source code of the standard library in which lines such as `kato=9154` are scattered; later lines like
`check(kato=9154)` can be completed only by recalling the first. Training starts with documents of 128 tokens, where
looking up is learned fast, and moves to longer ones, with a larger share of code, as soon as answers are right.

FOLDER gets, at every checkpoint and at the end:
- the model in BF16 (3.7 M parameters, 4 layers, heads of 128, grouped queries) and its tokenizer;
- eval.txt: held-back documents of 2048 tokens each, so that windows of 2048 without overlap hold one document each;
- recall.jsonl: prompts of 2040 tokens that end before an answer, and that answer (see recall.py).
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from train_tiny import SEED, sources
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY, KEYS, DIGITS, LONGEST_LINE = 1024, 64, 4, 64
CONTEXT, BATCH_TOKENS, PEAK_RATE, ANSWER_WEIGHT = 2048, 4096, 3e-3, 0.5
PROMPT, CASES, EVALUATED = CONTEXT - 2 * DIGITS, 200, 40
# Tokens of the line of a look-up from the first digit on: the digits, `)` and the end of the line.
AFTER = DIGITS + 2
THREADS, CHECKPOINT_SECONDS = 2, 240


@dataclass(frozen=True)
class Stage:
    """Documents of one length; the next stage begins when the share ENOUGH of the answers is right.

    context: tokens of a document.
    needles: assignments in a document, each looked up once.
    latest: share of the time after which the next stage begins in any case.
    """

    context: int
    needles: int
    latest: float


STAGES = [Stage(128, 7, 0.3), Stage(256, 11, 0.4), Stage(512, 16, 0.5), Stage(1024, 24, 0.6), Stage(CONTEXT, 32, 1.0)]
ENOUGH, RECENT = 0.9, 25


@dataclass(frozen=True)
class Language:
    """A tokenizer, and the tokens of the lines that are not code. Each line of a text is tokenized by itself."""

    tokenizer: Tokenizer
    keys: np.ndarray  # [KEYS] tokens
    digits: np.ndarray  # [10] tokens
    newline: int

    def assignment(self, key: int, value: np.ndarray) -> list[int]:
        return [key, *self.digits[value], self.newline]

    def lookup(self, key: int, value: np.ndarray) -> list[int]:
        return [*self._tokens("check("), key, *self.digits[value], *self._tokens(")\n")]

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids


def language(texts: list[str]) -> Language:
    """Train a byte-level BPE, and add names that the texts do not contain, each with its `=`, as one token.

    Keys of more tokens, as in `kato = 9154`, take far longer to learn: the name must be carried to the digits first.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("\n"), "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY - KEYS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    consonants, vowels = "bdgkmnrstz", "aeiou"
    taken = set(re.findall(f"(?=({f'[{consonants}][{vowels}]' * 2}))", "".join(texts)))
    names = [name for name in map("".join, product(consonants, vowels, repeat=2)) if name not in taken]
    names = sorted(np.random.default_rng(SEED).choice(names, KEYS, replace=False).tolist())
    tokenizer.add_tokens([AddedToken(name + "=", normalized=False) for name in names])

    def token(text: str) -> int:
        (number,) = tokenizer.encode(text).ids
        return number

    keys, digits = np.array([token(name + "=") for name in names]), np.array([token(str(digit)) for digit in range(10)])
    return Language(tokenizer, keys, digits, token("\n"))


def code_lines(language: Language, texts: list[str]) -> list[list[int]]:
    """Tokens of the lines of all texts, without empty and very long ones."""
    lines = [line + "\n" for text in texts for line in text.split("\n") if re.search(r"\S", line)]
    return [line.ids for line in language.tokenizer.encode_batch(lines) if len(line.ids) <= LONGEST_LINE]


@dataclass(frozen=True)
class Document:
    """Tokens, and where the answers stand."""

    ids: np.ndarray  # [tokens] i64
    answers: np.ndarray  # [look-ups, DIGITS] positions in ids


class Writer:
    """Writes documents of exact lengths at random places of the code."""

    def __init__(self, language: Language, code: list[list[int]], seed: int) -> None:
        self.language, self.code, self.random = language, code, np.random.default_rng(seed)

    def document(self, tokens: int, needles: int) -> Document:
        """Needles at random places, and each looked up at a random later place; a third of them far apart."""
        places = np.sort(self.random.random((needles, 2)), axis=1)
        far = self.random.random(needles) < 1 / 3
        places[far] = self.random.random((needles, 2))[far] * 0.2 + [0.0, 0.8]
        inserted = []
        for key, (early, late) in zip(self.random.permutation(self.language.keys)[:needles], places, strict=True):
            value = self.random.integers(0, 10, DIGITS)
            inserted.append((early, self.language.assignment(key, value), False))
            inserted.append((late, self.language.lookup(key, value), True))
        return self._assemble(tokens, inserted)

    def question(self, prompt_tokens: int, needles: int, depth: float) -> tuple[list[int], list[int], int]:
        """A prompt that asks for the value which is assigned at the relative depth, its answer, and their distance."""
        *keys, asked = self.random.permutation(self.language.keys)[:needles]
        value = self.random.integers(0, 10, DIGITS)
        inserted = [(depth, self.language.assignment(asked, value), False)]
        for key, (early, late) in zip(keys, np.sort(self.random.random((needles - 1, 2)), axis=1), strict=True):
            other = self.random.integers(0, 10, DIGITS)
            inserted.append((early, self.language.assignment(key, other), False))
            inserted.append((late, self.language.lookup(key, other), False))
        ending = self.language.lookup(asked, value)[:-AFTER]
        ids = self._assemble(prompt_tokens - len(ending), inserted).ids.tolist() + ending
        return ids, self.language.digits[value].tolist(), prompt_tokens - ids.index(asked) - 1

    def _assemble(self, tokens: int, inserted: list[tuple[float, list[int], bool]]) -> Document:
        """Place lines among code at relative places from 0 to 1, and fill up with empty lines."""
        left = tokens - sum(len(line) for _, line, _ in inserted)
        assert left >= 0
        at, code = int(self.random.integers(len(self.code))), []
        while left >= len(line := self.code[at % len(self.code)]):
            code.append(line)
            left -= len(line)
            at += 1
        code += [[self.language.newline]] * left
        placed = [((n + 0.5) / len(code), line, False) for n, line in enumerate(code)]
        ids: list[int] = []
        answers = []
        for _, line, is_lookup in sorted(placed + inserted, key=lambda item: item[0]):
            ids += line
            if is_lookup:
                answers.append(len(ids) - AFTER + np.arange(DIGITS))
        return Document(np.array(ids), np.array(answers))


def model() -> LlamaForCausalLM:
    """An untrained Llama."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


@dataclass(frozen=True)
class Result:
    """Gradients of some documents of a batch, and mean figures: losses in nats, exact answers as a share."""

    gradients: tuple[torch.Tensor, ...]
    figures: tuple[float, float, float]  # loss of answers, loss of all else, exact answers


def differentiate(net: LlamaForCausalLM, documents: list[Document]) -> Result:
    """The gradients of the loss, of which the answers' tokens make up ANSWER_WEIGHT."""
    ids = torch.from_numpy(np.stack([document.ids for document in documents]))
    with torch.autocast("cpu", torch.bfloat16):
        logits = net(input_ids=ids, use_cache=False).logits[:, :-1].float()
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    right = (logits.detach().argmax(-1) == ids[:, 1:]).flatten()
    rows = [document.answers - 1 + row * (ids.shape[1] - 1) for row, document in enumerate(documents)]
    places = torch.from_numpy(np.concatenate(rows))
    others = torch.ones_like(right)
    others[places.flatten()] = False
    answers, rest = each[places].mean(), each[others].mean()
    gradients = torch.autograd.grad(ANSWER_WEIGHT * answers + (1 - ANSWER_WEIGHT) * rest, list(net.parameters()))
    return Result(gradients, (answers.item(), rest.item(), right[places].all(1).float().mean().item()))


class Curriculum:
    """Which stage a training is in, and the mean figures of its latest steps."""

    def __init__(self, first: int) -> None:
        self.number = first
        self.seen: list[np.ndarray] = []

    @property
    def stage(self) -> Stage:
        return STAGES[self.number]

    def means(self) -> np.ndarray:
        return np.mean(self.seen[-RECENT:], axis=0)

    def record(self, figures: np.ndarray, passed: float) -> None:
        """Take the figures of a step, and go to the next stage if answers are right or the time is up."""
        self.seen.append(figures)
        learned = len(self.seen) >= RECENT and self.means()[2] >= ENOUGH
        if self.number + 1 < len(STAGES) and (learned or passed > self.stage.latest):
            self.number, self.seen = self.number + 1, []


def optimizers_of(net: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, one for each thread, and AdamW for all else.

    Muon, at a rate matched to AdamW's, needs few steps: it learned to look up within 300 of 4096 tokens.
    """
    matrices = [parameter for name, parameter in net.named_parameters() if name.endswith("_proj.weight")]
    others = [parameter for name, parameter in net.named_parameters() if not name.endswith("_proj.weight")]
    muon = [
        torch.optim.Muon(matrices[part::THREADS], weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        for part in range(THREADS)
    ]
    return [*muon, torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0)]


def train(net: LlamaForCausalLM, writer: Writer, minutes: float, first: int, keep: Callable[[], None]) -> None:
    """A warm-up, then a cosine over the time that is given."""
    optimizers, curriculum = optimizers_of(net), Curriculum(first)
    start, step, kept = time.monotonic(), 0, 0.0
    with ThreadPoolExecutor(THREADS) as pool:
        while (seconds := time.monotonic() - start) < 60 * minutes:
            passed, stage = seconds / (60 * minutes), curriculum.stage
            rate = PEAK_RATE * min(1.0, (step + 1) / 50) * (0.02 + 0.98 * (1 + math.cos(math.pi * passed)) / 2)
            documents = [writer.document(stage.context, stage.needles) for _ in range(BATCH_TOKENS // stage.context)]
            parts = [documents[part::THREADS] for part in range(THREADS)]
            results = list(pool.map(differentiate, [net] * THREADS, parts))
            for parameter, *gradients in zip(net.parameters(), *(r.gradients for r in results), strict=True):
                parameter.grad = sum(gradients) / THREADS
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate
            list(pool.map(lambda optimizer: optimizer.step(), optimizers))
            step += 1
            curriculum.record(np.mean([result.figures for result in results], axis=0), passed)
            if step % RECENT == 0 and curriculum.seen:
                answers, rest, right = curriculum.means()
                said = f"answers {answers:.3f} ({right:.1%} right), rest {rest:.3f}"
                print(f"step {step}, {seconds:.0f} s, {curriculum.stage.context} tokens: {said}", flush=True)
            if seconds > kept + CHECKPOINT_SECONDS:
                kept = seconds
                keep()


def write_tests(spoken: Language, code: list[list[int]], folder: Path) -> None:
    """Write eval.txt and recall.jsonl, whose questions ask at depths that are spread evenly."""
    writer = Writer(spoken, code, SEED + 1)
    documents = [writer.document(CONTEXT, STAGES[-1].needles) for _ in range(EVALUATED)]
    text = "".join(spoken.tokenizer.decode(document.ids.tolist()) for document in documents)
    assert len(spoken.tokenizer.encode(text).ids) == EVALUATED * CONTEXT
    (folder / "eval.txt").write_text(text, encoding="utf-8")
    with (folder / "recall.jsonl").open("w", encoding="utf-8") as file:
        for case in range(CASES):
            prompt, answer, distance = writer.question(PROMPT, STAGES[-1].needles, (case + 0.5) / CASES)
            decoded = spoken.tokenizer.decode(prompt)
            assert spoken.tokenizer.encode(decoded).ids == prompt
            row = {"prompt": decoded, "answer": spoken.tokenizer.decode(answer), "distance": distance}
            file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=35)
    parser.add_argument("--start", type=Path, help="a checkpoint to continue from, with a warm-up of its own")
    parser.add_argument("--stage", type=int, choices=range(len(STAGES)), default=0, help="the first stage")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    texts, held_back = sources()
    spoken = language(texts + held_back)
    code, unseen = code_lines(spoken, texts), code_lines(spoken, held_back)
    print(f"{len(code)} lines, {sum(map(len, code))} tokens; held back {sum(map(len, unseen))}", flush=True)
    PreTrainedTokenizerFast(tokenizer_object=spoken.tokenizer).save_pretrained(options.folder)
    write_tests(spoken, unseen, options.folder)
    torch.manual_seed(SEED)
    net = LlamaForCausalLM.from_pretrained(options.start, dtype=torch.float32) if options.start else model()

    def keep() -> None:
        copy.deepcopy(net).to(torch.bfloat16).save_pretrained(options.folder)

    train(net, Writer(spoken, code, SEED), options.minutes, options.stage, keep)
    keep()


if __name__ == "__main__":
    main()
