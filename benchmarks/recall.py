"""Measure how well a model of train_recall.py recalls far context through a given KV cache.

    python benchmarks/recall.py FOLDER

prints the share of right answers by distance with the default cache of transformers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Cache,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

# The last tokens of a prompt, fed one by one: a cache may quantize only what earlier calls stored, and these tokens
# are those that look the answer up.
STEPWISE, BATCH, BIN = 8, 10, 250

# Keys and values of each layer, [sequences, heads, tokens, size].
States = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """A prompt, the answer that must follow it, and the tokens between the answer's first place in it and the end."""

    prompt: str
    answer: str
    distance: int


@dataclass(frozen=True)
class Recall:
    """What came back, in the order of the cases.

    exact: [cases] bool, whether greedy decoding gives the whole answer.
    log_probabilities: [cases] f64, natural logarithm, mean over the tokens of the right answer.
    """

    exact: np.ndarray
    log_probabilities: np.ndarray

    @property
    def share(self) -> float:
        """The share of exact answers."""
        return float(self.exact.mean())

    @property
    def log_probability(self) -> float:
        """The mean over cases; every case counts the same."""
        return float(self.log_probabilities.mean())


def read_cases(path: Path) -> list[Case]:
    """The cases of a recall.jsonl."""
    return [Case(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def read_states(net: PreTrainedModel, ids: torch.Tensor) -> States:
    """The keys and values of all layers for some tokens, [sequences, tokens]."""
    cache = DynamicCache(config=net.config)
    net(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return [(layer.keys, layer.values) for layer in cache.layers]


def fill(cache: Cache, states: States) -> None:
    """Let a cache take keys and values as if the model had just computed them."""
    for number, (keys, values) in enumerate(states):
        cache.update(keys, values, number)


@torch.inference_mode()
def recalled(
    net: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cases: Sequence[Case],
    make_cache: Callable[[], Cache] | None = None,
    read: dict[int, States] | None = None,
) -> Recall:
    """Ask all cases, each batch with a fresh cache; None: the default cache of transformers.

    read: the keys and values of the prompts by batch, which are kept here, so that several caches take them from one
    pass over the prompts.

    Answers are forced token by token. Greedy decoding gives the whole answer if and only if each of its tokens is the
    likeliest after the right ones before it, so one pass yields both figures.
    """
    exact, log_probabilities = np.zeros(len(cases), dtype=bool), np.zeros(len(cases))
    states = {} if read is None else read
    for number, (numbers, prompts, answers) in enumerate(_batches(tokenizer, cases)):
        tokens = torch.cat([prompts, answers], dim=1).to(net.device)
        prefilled = max(1, prompts.shape[1] - STEPWISE)
        if number not in states:
            states[number] = read_states(net, tokens[:, :prefilled])
        cache = make_cache() if make_cache else DynamicCache(config=net.config)
        fill(cache, states[number])
        logits = []
        for part in tokens[:, prefilled:-1].split(1, dim=1):
            output = net(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1)
            logits.append(output.logits[:, -1].float())
        scores = torch.stack(logits[-answers.shape[1] :], dim=1).log_softmax(-1).cpu()  # [cases, answer, vocabulary]
        exact[numbers] = (scores.argmax(-1) == answers).all(1).numpy()
        log_probabilities[numbers] = scores.gather(2, answers[..., None]).double().mean((1, 2)).numpy()
    return Recall(exact, log_probabilities)


def _batches(
    tokenizer: PreTrainedTokenizerBase, cases: Sequence[Case]
) -> Iterator[tuple[list[int], torch.Tensor, torch.Tensor]]:
    """Numbers, prompts [cases, tokens] and answers [cases, tokens] of cases of equal lengths, BATCH at most."""
    prompts = [tokenizer.encode(case.prompt, add_special_tokens=False) for case in cases]
    answers = [tokenizer.encode(case.answer, add_special_tokens=False) for case in cases]

    def lengths(number: int) -> tuple[int, int]:
        return len(prompts[number]), len(answers[number])

    for _, group in groupby(sorted(range(len(cases)), key=lengths), key=lengths):
        numbers = list(group)
        for first in range(0, len(numbers), BATCH):
            batch = numbers[first : first + BATCH]
            yield batch, torch.tensor([prompts[n] for n in batch]), torch.tensor([answers[n] for n in batch])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    cases = read_cases(options.folder / "recall.jsonl")
    net = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.bfloat16).eval()
    found = recalled(net, AutoTokenizer.from_pretrained(options.folder), cases)
    bins = np.array([case.distance for case in cases]) // BIN
    for number in np.unique(bins):
        inside = bins == number
        share, mean = found.exact[inside].mean(), found.log_probabilities[inside].mean()
        print(
            f"{number * BIN:5d} to {(number + 1) * BIN - 1:5d} tokens: {share:6.1%} of {inside.sum()}, {mean:.4f} nats"
        )
    print(f"all distances: {found.share:.1%} of {len(cases)}, {found.log_probability:.4f} nats per token")


if __name__ == "__main__":
    main()
