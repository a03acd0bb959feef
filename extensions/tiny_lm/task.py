"""The task of the tiny language model: write the distinct digits of the prompt in ascending order, then stop.

    prompt  5 3 5 1 =        answer  1 3 5 EOS

Why this task: a rule checks the answer, answers differ in length, a half-trained policy gets some right by chance, and
knowing when to stop is part of it. EOS and PAD share one id on purpose, as in many tokenizers.

Letters: N rows, P prompt positions, R response positions. Prompts are padded on the left, so that all answers start at the
same position; responses on the right, after EOS. Everything here is whole numbers or bool, without gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SEPARATOR = 10  # ids 0-9 are the digits themselves
EOS = 11
PAD = EOS
VOCABULARY = 12
SHORTEST, LONGEST = 3, 6  # digits in a prompt
PROMPT_LENGTH = LONGEST + 1  # with the separator
RESPONSE_LENGTH = LONGEST + 1  # with EOS


class Prompts(NamedTuple):
    """N left-padded prompts."""

    ids: Tensor  # [N, P]
    attention_mask: Tensor  # [N, P] bool: False on padding

    def take(self, rows: Tensor | slice) -> Prompts:
        return Prompts(self.ids[rows], self.attention_mask[rows])

    def repeat(self, times: int) -> Prompts:
        """Each prompt `times` times in a row: the answers of one group are neighbours."""
        return Prompts(self.ids.repeat_interleave(times, dim=0), self.attention_mask.repeat_interleave(times, dim=0))


# ------------------------------------------------------------------------------------------ prompts


def digits_present(ids: Tensor) -> Tensor:
    """Which digits occur in each row; separator, EOS and PAD are ignored. ids [N, L] -> [N, 10] bool."""
    return F.one_hot(ids, VOCABULARY).bool().any(dim=1)[:, :10]


def is_held_out(prompts: Prompts) -> Tensor:
    """Whether a prompt belongs to evaluation, decided by a hash of how often each digit occurs in it. -> [N] bool.

    About one prompt in eight. All orders of the same digits fall on the same side, so nothing that is evaluated was
    trained on in another order.
    """
    counts = (F.one_hot(prompts.ids, VOCABULARY)[:, :, :10] * prompts.attention_mask.unsqueeze(-1)).sum(dim=1)
    multiset = (counts * (LONGEST + 1) ** torch.arange(10)).sum(dim=1)  # one whole number for each multiset
    return (multiset * 2654435761) % 2**32 < 2**32 // 8  # multiplicative hashing: the upper bits are well mixed


def draw_prompts(count: int, generator: torch.Generator, held_out: bool) -> Prompts:
    """Prompts of one side of the split: length uniform in 3..6, digits uniform, with replacement. -> N = count."""
    found: list[Prompts] = []
    while sum(len(prompts.ids) for prompts in found) < count:
        draws = count * (9 if held_out else 2) + 16
        lengths = torch.randint(SHORTEST, LONGEST + 1, (draws, 1), generator=generator)
        digits = torch.randint(10, (draws, LONGEST), generator=generator)
        is_digit = torch.arange(LONGEST) >= LONGEST - lengths
        ids = F.pad(torch.where(is_digit, digits, PAD), (0, 1), value=SEPARATOR)
        prompts = Prompts(ids, F.pad(is_digit, (0, 1), value=True))
        found.append(prompts.take(is_held_out(prompts) == held_out))
    return Prompts(*(torch.cat(column)[:count] for column in zip(*found)))


def correct_responses(prompts: Prompts) -> Tensor:
    """The right answer to each prompt with its EOS, then PAD. -> [N, R]."""
    present = digits_present(prompts.ids)
    return torch.where(present, torch.arange(10), EOS).sort(dim=1).values[:, :RESPONSE_LENGTH]


def written(responses: Tensor) -> Tensor:
    """Which positions the policy wrote: up to the first EOS and including it. responses [N, R] -> [N, R] bool.

    By position, not by id: what follows the first EOS is padding although its id is the same.
    """
    is_eos = responses == EOS
    return is_eos.cumsum(dim=1) - is_eos.long() == 0


# ------------------------------------------------------------------------------------------ verifiers


def check(prompts: Prompts, responses: Tensor) -> dict[str, Tensor]:
    """Every single requirement of a right answer, checked on its own. prompts N, responses [N, R] -> name -> [N] bool.

    `ended`: EOS within R tokens. `not_empty`: at least one digit. `only_digits`: no separator. `ascending`: no digit is
    followed by a smaller one. `no_repeats`: no digit twice. `nothing_extra`: each digit is in the prompt. `nothing_missing`:
    each digit of the prompt is there. An answer is right when all hold.
    """
    wrote = written(responses)
    is_digit = wrote & (responses < 10)
    given, wanted = digits_present(torch.where(wrote, responses, PAD)), digits_present(prompts.ids)
    largest_so_far = responses.masked_fill(~is_digit, -1).cummax(dim=1).values
    return {
        "ended": (responses == EOS).any(dim=1),
        "not_empty": is_digit.any(dim=1),
        "only_digits": ~(wrote & (responses == SEPARATOR)).any(dim=1),
        "ascending": ((responses == largest_so_far) | ~is_digit).all(dim=1),
        "no_repeats": is_digit.sum(dim=1) == given.sum(dim=1),
        "nothing_extra": ~(given & ~wanted).any(dim=1),
        "nothing_missing": ~(wanted & ~given).any(dim=1),
    }


FAILURES = {
    "ended": "truncated",
    "not_empty": "empty",
    "only_digits": "separator in the answer",
    "ascending": "wrong order",
    "no_repeats": "repeated digit",
    "nothing_extra": "digit not in the prompt",
    "nothing_missing": "missing digit",
}
"""The requirements of `check`, and what an answer that fails one is called."""

REQUIREMENTS = tuple(FAILURES)

VERIFIERS = {
    "exact": REQUIREMENTS,
    "sorted-only": ("ended", "only_digits", "ascending", "no_repeats"),
    "subset": ("ended", "only_digits", "nothing_extra"),
    "non-empty": ("ended", "not_empty", "only_digits", "ascending", "no_repeats"),
    "public-tests": REQUIREMENTS,
}
"""What each verifier remembers to check. The weak ones are the exact one with something forgotten; `public-tests` checks
everything, but only on a few prompts that never change."""


def rewards(verifier: str, prompts: Prompts, responses: Tensor) -> Tensor:
    """1 where the answer passes everything the verifier checks, else 0. -> [N] float32."""
    passed = check(prompts, responses)
    return torch.stack([passed[name] for name in VERIFIERS[verifier]]).all(dim=0).float()


def as_text(ids: list[int]) -> str:
    """Token ids as a reader sees them: `1 3 5 <eos>`; trailing or leading padding belongs cut off before."""
    return " ".join("=" if i == SEPARATOR else "<eos>" if i == EOS else str(i) for i in ids)


def describe(verifier: str, prompts: Prompts, responses: Tensor) -> list[dict]:
    """One record per answer: what was asked, what was written, how it was read, and why it failed.

    The raw answer is kept beside its parse, so that a change of the parser cannot hide what the policy wrote.
    """
    passed = check(prompts, responses)
    reward, exact = rewards(verifier, prompts, responses), rewards("exact", prompts, responses)
    wrote, right = written(responses), correct_responses(prompts)
    records = []
    for row in range(len(responses)):
        raw = responses[row][wrote[row]].tolist()
        parts = {name: bool(passed[name][row]) for name in REQUIREMENTS}
        records.append(
            {
                "prompt": as_text(prompts.ids[row][prompts.attention_mask[row]].tolist()),
                "answer": as_text(raw),
                "parsed_digits": [i for i in raw if i < 10],
                "wanted_digits": [i for i in right[row].tolist() if i < 10],
                "verifier": verifier,
                "reward": reward[row].item(),
                "exact": bool(exact[row]),
                "parts": parts,
                "failures": [FAILURES[name] for name in REQUIREMENTS if not parts[name]],
            }
        )
    return records
