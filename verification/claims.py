"""The guides' claims: how each is kept, and every number they print beside the number the lab gives.

    python -m verification.claims                recompute every printed number; exit 1 when one disagrees
    python -m verification.claims --ledger       all claims, each with the test, README section or limit that keeps it
    python -m verification.claims --claim C083   one claim in full

The lab follows two guides: an experiment guide (claims C001-C239, C300-C307) and an overview of the methods. claims.csv
holds one row for each claim: `id, statement, kept, tests, section, words, note`. `kept` is one of

    test           `tests` names tests that fail when the claim stops being true
    README         a sentence of README.txt says it: `section` is the number and heading, `words` are found there
    stated limit   something that is not done or not shown, and README.txt says so

Numbers come from the lab's public functions and command lines only. A number that was sampled cannot return to the digit,
since another generator draws other samples: it is compared with the band in which such runs end, and the table says so.
Where several seeds are run, the lab's value is their median.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import math
import re
import statistics
import sys
import tempfile
import unittest
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Callable, Iterator, NamedTuple, Sequence

import torch
from torch import Tensor

import ppo_chain
import rl_lab
import token_objectives
from extensions import objectives
from rl_lab import format_table

LAB = Path(rl_lab.__file__).resolve().parent
LEDGER = Path(__file__).with_name("claims.csv")
COUNT = 308
KEPT = ("test", "README", "stated limit")
NUMBERS_TEST = "verification.test_claims.Numbers.test_every_printed_number_is_recomputed"

# ------------------------------------------------------------------------------------------ the ledger


class Claim(NamedTuple):
    """One row of claims.csv."""

    id: str
    statement: str
    kept: str
    tests: str
    section: str
    words: str
    note: str


def read_ledger(path: Path = LEDGER) -> list[Claim]:
    with open(path, newline="", encoding="utf-8") as file:
        return [Claim(**row) for row in csv.DictReader(file)]


def readme_sections(text: str) -> dict[str, str]:
    """README.txt as "number heading" -> text in one line of lower case; what stands before section 1 is "0 START"."""
    sections, current = {"0 START": []}, "0 START"
    for line in text.splitlines():
        heading = re.fullmatch(r"(\d+)  ([A-Z][A-Z ,:'-]+)", line.strip()) if not line.startswith(" ") else None
        if heading:
            current = f"{heading[1]} {heading[2]}"
            sections[current] = []
        else:
            sections[current].append(line)
    return {heading: re.sub(r"\s+", " ", " ".join(lines)).lower() for heading, lines in sections.items()}


@lru_cache
def _tests_of_module(module: str) -> frozenset[str]:
    """ "Class.test_name" of every test method that a module defines; empty when there is no such file."""
    path = LAB.joinpath(*module.split(".")).with_suffix(".py")
    if not path.is_file():
        return frozenset()
    found, case = set(), ""
    for line in path.read_text(encoding="utf-8").splitlines():  # far quicker than parsing the file
        if heading := re.match(r"class (\w+)", line):
            case = heading[1]
        elif method := re.match(r"    def (test_\w+)\(", line):
            found.add(f"{case}.{method[1]}")
    return frozenset(found)


class Formula(NamedTuple):
    """One entry of README.txt, section 6."""

    section: str
    formula: str
    functions: list[str]
    test: str


def formulas(readme: str) -> list[Formula]:
    """The entries of README.txt's section 6: guide section and formula on one line, functions and test indented below."""
    lines = readme[readme.index("\n6  FROM FORMULA") : readme.index("\n7  TROUBLESHOOTING")].splitlines()
    found = []
    for at, line in enumerate(lines):
        if entry := re.match(r"(\d+(?:\.\d)?) +(\S.*)", line):
            below = [item for item in itertools.takewhile(lambda x: x.startswith(" " * 9), lines[at + 1 :])]
            names, _, test = " ".join(map(str.strip, below)).rpartition(":")
            if test:
                found.append(Formula(entry[1], entry[2], names.split(", "), test.strip()))
    return found


def test_exists(test: str) -> bool:
    """Whether "module.Class.test_name" is a test method of a file."""
    module, _, name = test.rpartition(".")
    module, _, case = module.rpartition(".")
    return f"{case}.{name}" in _tests_of_module(module)


def problems(claims: Sequence[Claim], readme: str, numbered: set[str]) -> list[str]:
    """What is wrong with a ledger, one line each: a test, section or word that does not exist, a claim missing or twice.

    `numbered` holds the ids of the claims whose numbers are recomputed: exactly they may lean on that test.
    """
    sections, found = readme_sections(readme), []
    wanted = [f"C{number:03}" for number in range(1, COUNT + 1)]
    if [claim.id for claim in claims] != wanted:
        ids = [claim.id for claim in claims]
        missing, twice = sorted(set(wanted) - set(ids)), sorted({i for i in ids if ids.count(i) > 1})
        found.append(f"ledger: missing {missing}, twice {twice}, unknown {sorted(set(ids) - set(wanted))}, or not in order")
    for claim in claims:
        tests = claim.tests.split()
        if not claim.statement.strip():
            found.append(f"{claim.id}: says nothing")
        if claim.kept not in KEPT:
            found.append(f"{claim.id}: kept as {claim.kept!r}, wanted one of {', '.join(KEPT)}")
        if claim.kept == "test" and not tests:
            found.append(f"{claim.id}: kept by a test, but none is named")
        if claim.kept != "test" and not (claim.section and claim.words):
            found.append(f"{claim.id}: kept by README.txt, but no section and words are named")
        for test in tests:
            if not test_exists(test):
                found.append(f"{claim.id}: there is no test {test}")
        if claim.section and claim.section not in sections:
            found.append(f"{claim.id}: README.txt has no section {claim.section!r}")
        elif claim.section:
            for words in claim.words.split("; "):
                if words.lower() not in sections[claim.section]:
                    found.append(f"{claim.id}: README.txt, section {claim.section}, does not say {words!r}")
        if (NUMBERS_TEST in tests) != (claim.id in numbered):
            found.append(f"{claim.id}: names the test of the numbers and has none, or has numbers and does not name it")
    return found


# ------------------------------------------------------------------------------------------ running the lab


class Lab:
    """The command lines, each run once into a folder of its own, and their files read back."""

    def __init__(self, on_run: Callable[[str], None] = lambda command: None):
        self._folder = tempfile.TemporaryDirectory(prefix="rl-lab-claims-")
        self._done: dict[tuple, Path] = {}
        self._on_run = on_run

    def close(self) -> None:
        self._folder.cleanup()

    def run(self, program: ModuleType, *arguments: object) -> Path:
        """`python -B PROGRAM ARGUMENTS --output ...` -> what was written. Raises whatever the command raises."""
        key = (program.__name__, *map(str, arguments))
        if key not in self._done:
            self._on_run(" ".join(key))
            output = Path(
                self._folder.name, f"{len(self._done)}.json" if program is token_objectives else str(len(self._done))
            )
            with contextlib.redirect_stdout(io.StringIO()):
                program.main([*key[1:], "--output", str(output)])
            self._done[key] = output
        return self._done[key]

    def bandit(self, name: str, *arguments: object) -> tuple[list[dict[str, float]], dict]:
        """Rows and document of one method of the default run, or of a run of it alone with these arguments."""
        folder = self.run(rl_lab, "--algorithm", name, *arguments) if arguments else self.run(rl_lab, "--algorithm", "all")
        return _rows(folder / f"{name}.csv"), json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))

    def chain(self, *arguments: object) -> tuple[list[dict[str, float]], dict]:
        folder = self.run(ppo_chain, *arguments)
        return _rows(folder / "ppo_chain.csv"), json.loads((folder / "ppo_chain.json").read_text(encoding="utf-8"))

    def tokens(self) -> dict:
        return json.loads(self.run(token_objectives).read_text(encoding="utf-8"))


def _rows(path: Path) -> list[dict[str, float]]:
    with open(path, newline="", encoding="utf-8") as file:
        return [{name: float(text) for name, text in row.items()} for row in csv.DictReader(file)]


# ------------------------------------------------------------------------------------------ every printed number


class Number(NamedTuple):
    """A number that a guide prints, and what the lab gives."""

    claim: str
    what: str
    guide: str
    lab: str
    agree: bool


def same(claim: str, what: str, guide: Sequence[float] | float, lab: object, digits: int = 6) -> Number:
    """Equal to as many digits as the guide prints."""

    def written(x: float) -> str:
        text = f"{x:.{digits}f}"
        text = text.rstrip("0").rstrip(".") if "." in text else text
        return "0" if text == "-0" else text  # what rounds to zero from below has no sign worth printing

    guides, labs = (", ".join(map(written, _flat(values))) for values in (guide, lab))
    return Number(claim, what, guides, labs, guides == labs)


def within(claim: str, what: str, guide: float | None, lab: float, low: float, high: float) -> Number:
    """Inside the band in which such runs end, as is the number that the guide prints."""
    agree = low <= lab <= high and (guide is None or low <= guide <= high)
    printed = "" if guide is None else f"{guide:g}, "
    return Number(claim, what, f"{printed}{low:g} .. {high:g}", f"{lab:.6g}", agree)


def holds(claim: str, what: str, guide: str, lab: object, agree: bool) -> Number:
    """An inequality or a bound that the guide states with a number."""
    return Number(claim, what, guide, f"{lab:.6g}" if isinstance(lab, float) else str(lab), bool(agree))


def _flat(values: object) -> list[float]:
    if isinstance(values, (list, tuple)):
        return [x for value in values for x in _flat(value)]
    return values.detach().flatten().tolist() if isinstance(values, Tensor) else [float(values)]


def f64(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def leaf(*numbers: float) -> Tensor:
    return f64(*numbers).requires_grad_()


SEEDS = (0, 7, 19)  # the seeds of the guide's own tests


def numbers_of_the_atoms() -> Iterator[Number]:
    """Sections 3 to 7 of the experiment guide: building blocks on inputs that can be worked by hand."""
    examples = rl_lab.worked_examples()
    agreeing = sum(example.agrees() for example in examples)
    yield holds("C011", "worked examples of --algorithm atoms", "all agree", f"{agreeing} of {len(examples)}",
                agreeing == len(examples))

    logp = rl_lab.action_logps(f64(1000, 0), torch.tensor(1))
    yield same("C069", "log-probability at logits 1000 apart", -1000, logp, 1)

    # The snippet of section 3.3, call for call.
    rewards = f64(0, 0, 1)
    values = torch.zeros_like(rewards)
    terminated = torch.tensor([False, False, True])
    advantages, returns = rl_lab.gae(rewards, values, values, terminated, terminated, gamma=1.0, lam=1.0)
    yield same("C083", "GAE carries a final reward to all three steps", [1, 1, 1], advantages, 1)
    end = torch.tensor([False, True])
    advantages, returns = rl_lab.gae(f64(0, 1), f64(0, 0), f64(0, 0), end, end, gamma=1.0, lam=0.95)
    yield same("C084", "lambda-returns of a two-step episode at lambda 0.95", [0.95, 1], returns)
    never = torch.tensor([False, False])
    advantages, _ = rl_lab.gae(f64(0, 0), f64(0.5, 0.4), f64(0.4, 0.7), never, end, gamma=1.0, lam=1.0)
    yield same("C085", "GAE at a time limit", [0.2, 0.3], advantages)
    over = torch.tensor([True, True])
    advantages, _ = rl_lab.gae(f64(6, 3), f64(8, 1), f64(0, 0), over, over)
    yield same("C073", "advantage of 6 where 8 is usual, of 3 where 1 is", [-2, 2], advantages, 4)

    logp = leaf(-1.0, -2.0)
    yield same("C088", "ratio when the denominator is recomputed", [1, 1], rl_lab.importance_ratio(logp, logp), 1)

    # The snippet of section 4.2.
    logp = f64(1.5, 0.5, 1.5, 0.5).log()
    logp.requires_grad_()
    advantages = f64(1.0, -1.0, -1.0, 1.0)
    loss = rl_lab.clipped_policy_loss(logp, torch.zeros_like(logp), advantages)
    loss.sum().backward()
    yield same("C095", "losses, one for each sample", 4, loss.numel(), 0)
    yield same("C096", "clipped objective in four cases", [1.2, -0.8, -1.5, 0.5], -loss, 1)
    yield same("C097", "gradient of the loss to logp in the four cases", [0, 0, 1.5, -0.5], logp.grad, 1)
    yield same("C059", "clip fraction of the four, two of which keep a gradient", 1,
               rl_lab.clip_fraction(logp, torch.zeros_like(logp)), 1)

    # The snippet of section 5.3.
    chosen, rejected, reference = leaf(-2.0), leaf(-2.0), f64(-2.0)
    loss = rl_lab.dpo_loss(chosen, rejected, reference, reference, beta=0.5).mean()
    loss.backward()
    yield same("C132", "DPO loss at policy = reference", 0.6931, loss, 4)
    yield same("C134", "its gradients to chosen and rejected", [-0.25, 0.25], [chosen.grad, rejected.grad], 2)

    # The snippet of section 6.1.
    grouped = rl_lab.group_advantages(torch.stack([f64(0, 0, 1, 1), f64(5, 5, 5, 5)]))
    yield same("C156", "group advantages of [0, 0, 1, 1] and [5, 5, 5, 5]", [-1, -1, 1, 1, 0, 0, 0, 0], grouped, 4)
    equal = rl_lab.group_advantages(torch.stack([f64(1, 1, 1, 1), f64(5, 5, 5, 5)]))
    yield same("C159", "group advantages of all ones and of all fives", [0] * 8, equal, 4)
    yield same("C164", "P(8 answers all right or all wrong) at success 0.99", 0.9227,
               rl_lab.zero_variance_probability(f64(0.99, 0.01), 8), 4)
    third = torch.full((3,), 1 / 3, dtype=torch.float64)
    for size in (2, 4, 8, 16):
        yield same("C165", f"P(no spread) at the uniform policy, G = {size}: 3^(1 - G)", 3.0 ** (1 - size),
                   rl_lab.zero_variance_probability(third, size), 12)
    yield same("C166", "P(no spread) at the uniform policy, G = 2 and 8", [0.333333, 0.000457],
               [rl_lab.zero_variance_probability(third, size) for size in (2, 8)])

    lengths = torch.arange(100) < torch.tensor([[10], [100]])
    in_long = torch.stack([torch.zeros(100), torch.ones(100)]).double()
    yield same("C188", "weight of 100 tokens beside 10: per response, over tokens", [0.5, 100 / 110],
               [token_objectives.mean_per_response(in_long, lengths), token_objectives.mean_over_tokens(in_long, lengths)])


def numbers_of_the_overview() -> Iterator[Number]:
    """The second guide."""
    group = rl_lab.group_advantages(f64(1, 0, 1, 0))
    yield same("C278", "four answers to 17 x 24, rewards [1, 0, 1, 0]: advantages", [1, -1, 1, -1], group, 4)
    yield same("C280", "group advantages of [1, 0, 1, 0]", [1, -1, 1, -1], group, 4)
    yield same("C281", "group advantages of [0, 1, 0, 0]", [-0.57735, 1.73205, -0.57735, -0.57735],
               rl_lab.group_advantages(f64(0, 1, 0, 0)), 5)
    yield same("C289", "group advantages of [0, 0, 0, 0]", [0, 0, 0, 0], rl_lab.group_advantages(f64(0, 0, 0, 0)), 4)

    theta = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)
    logits = torch.stack((theta, torch.zeros_like(theta)))
    logp = logits.log_softmax(dim=-1)
    loss = rl_lab.clipped_policy_loss(logp, logp.detach().clone(), f64(1.0, -1.0)).mean()
    loss.backward()
    yield same("C283", "loss of two answers at theta = 0, and its slope", [0, -0.5], [loss, theta.grad], 6)
    yield holds("C285", "|loss| and |slope + 0.5|", "below 1e-12", max(abs(loss.item()), abs(theta.grad.item() + 0.5)),
                abs(loss.item()) < 1e-12 and abs(theta.grad.item() + 0.5) < 1e-12)
    moved = theta.detach() - 0.2 * theta.grad
    yield same("C284", "theta after one step at learning rate 0.2", 0.1, moved, 4)
    yield same("C284", "p(A) there", 0.525, torch.stack([moved, torch.zeros_like(moved)]).softmax(0)[0], 3)

    rare, common = (f64(0.012).log(), f64(0.01).log()), (f64(0.6).log(), f64(0.5).log())
    yield same("C291", "ratio of 0.01 -> 0.012 and of 0.5 -> 0.6", [1.2, 1.2],
               [rl_lab.importance_ratio(*rare), rl_lab.importance_ratio(*common)])
    yield same("C291", "the same bound as a step in probability", [0.002, 0.1],
               [rare[0].exp() - rare[1].exp(), common[0].exp() - common[1].exp()], 3)
    weights = torch.zeros(2, 1000, dtype=torch.float64, requires_grad=True)
    token_objectives.mean_per_response(weights, torch.arange(1000) < torch.tensor([[1000], [50]])).backward()
    yield same("C292", "weight of a token in an answer of 1000 against one of 50", 1 / 20,
               weights.grad[0, 0] / weights.grad[1, 0])

    yield same("C293", "DPO loss at a margin of 2, beta 0.2", 0.513, rl_lab.dpo_loss(f64(2), f64(0), f64(0), f64(0), 0.2), 3)
    before, after = (f64(0.4).log(), f64(0.3).log()), (f64(0.3).log(), f64(0.1).log())
    yield same("C294", "ratio of ratios, chosen 0.4 -> 0.3, rejected 0.3 -> 0.1", 2.25,
               ((after[0] - before[0]) - (after[1] - before[1])).exp(), 2)
    losses = [rl_lab.dpo_loss(*policy, *before, beta=1.0) for policy in (before, after)]
    yield same("C294", "DPO loss before and after, beta 1", [0.6931, 0.3677], losses, 4)
    yield same("C135", "DPO loss although chosen has become less probable", 0.3677, losses[1], 4)

    rewards = f64(1, 0, 1, 0)
    batch = objectives.make_batch(
        logps=f64(-1, -1, -1, -1), ref_logps=f64(-1, -1, -1, -1), rewards=rewards, group_ids=torch.zeros(4, dtype=torch.long)
    )
    leave_one_out = objectives.evaluate(objectives.ROWS["rloo"], batch).advantages.flatten()
    yield same("C245", "leave-one-out advantages of [1, 0, 1, 0]: 4/3 (R - mean)", 4 / 3 * (rewards - rewards.mean()),
               leave_one_out, 4)


def numbers_of_the_tokens(lab: Lab) -> Iterator[Number]:
    """Section 7.6: token_objectives.py."""
    result = lab.tokens()
    sequences, mistake, dpo, grpo = (result[name] for name in ("sequences", "eos_mask_mistake", "dpo", "grpo"))
    yield same("C193", "ids of EOS and PAD in a table of 5", [4, 4],
               [result["config"]["eos_id"], result["config"]["pad_id"]], 0)
    yield same("C195", "the last two ids of the chosen answer: EOS and PAD", [4, 4], sequences["chosen"]["input_ids"][-2:],
               0)
    yield same("C196", "response lengths", [2, 3], mistake["right_tokens"], 0)
    yield same("C197", "tokens that mask & (ids != 4) keeps", [1, 2], mistake["kept_tokens"], 0)
    yield same("C184", "rows of logits scored under the mask [0, 0, 1, 1, 0]", [1, 2],
               sequences["chosen"]["scored_positions"], 0)
    yield same("C199", "log-probability of a token, of both answers", [-math.log(5), -2 * math.log(5), -3 * math.log(5)],
               [sequences["chosen"]["token_logps"][0], *mistake["right_response_logps"]])
    yield same("C200", "DPO loss at the start", 0.693147, dpo["loss_before"])
    yield same("C201", "advantages of rewards [1, 0]", [1, -1], grpo["advantages"], 4)
    yield same("C202", "GRPO loss at the start: mean per response, mean over tokens", [0, 0.2],
               [grpo["loss_before"], grpo["mean_over_tokens_before"]], 4)
    yield same("C163", "GRPO loss of a mixed group at ratio 1, gradient norm", [0, 0.414997],
               [grpo["loss_before"], grpo["gradient_norm"]])
    yield same("C203", "DPO loss after one step at learning rate 0.1", [0.1, 0.668435],
               [result["config"]["learning_rate"], dpo["loss_after"]])
    yield same("C204", "norm of the GRPO gradient", 0.414997, grpo["gradient_norm"])
    yield same("C205", "GRPO loss after one step", -0.017285, grpo["loss_after"])
    yield holds("C208", "margin before and after", "grows", f"{dpo['margin_before']:.6f} -> {dpo['margin_after']:.6f}",
                dpo["margin_before"] == 0 < dpo["margin_after"])


def numbers_of_the_bandit(lab: Lab) -> Iterator[Number]:
    """Sections 1, 4, 5, 6 and 8: the default run."""
    runs = {name: lab.bandit(name) for name in rl_lab.METHODS}
    ppo, dpo, grpo = (runs[name][0] for name in ("ppo", "dpo", "grpo"))
    config = runs["ppo"][1]["config"]
    yield same("C014", "default seed", 7, config["seed"], 0)
    yield same("C015", "default steps", 120, config["steps"], 0)
    yield same("C033", "rows of each CSV at 120 steps", [121] * 3, [len(rows) for rows in (ppo, dpo, grpo)], 0)
    yield same("C016", "default group size", 8, config["group_size"], 0)
    yield same("C017", "default prompts an iteration", 16, config["online_batch_prompts"], 0)
    yield same("C052", "prompts and group size in the saved configuration", [16, 8],
               [runs["grpo"][1]["config"][name] for name in ("online_batch_prompts", "group_size")], 0)
    yield same("C018", "actions of one GRPO iteration: 16 x 8", 128, grpo[1]["sampled_actions"], 0)
    yield same("C170", "GRPO: actions an iteration, updates in all", [128, 480],
               [grpo[2]["sampled_actions"] - grpo[1]["sampled_actions"], grpo[-1]["optimizer_steps"]], 0)
    yield same("C035", "sampled actions of ppo, grpo, dpo", [15360, 15360, 0],
               [r[-1]["sampled_actions"] for r in (ppo, grpo, dpo)], 0)
    yield same("C036", "pairs presented to dpo, ppo, grpo", [1440, 0, 0],
               [r[-1]["pair_presentations"] for r in (dpo, ppo, grpo)], 0)
    yield same("C037", "updates of dpo, grpo", [120, 480], [r[-1]["optimizer_steps"] for r in (dpo, grpo)], 0)
    for claim in ("C044", "C212"):
        yield same(claim, "expected reward at the start: (1 + 0.2 - 0.5) / 3", [0.2333] * 3,
                   [r[0]["expected_reward"] for r in (ppo, dpo, grpo)], 4)
    table = f64(*(x for row in runs["ppo"][1]["reward_table"] for x in row)).reshape(4, 3)
    yield same("C212", "largest and smallest expected reward", [1, -0.5], [table.amax(1).mean(), table.amin(1).mean()], 4)
    yield same("C213", "middle reward of each context", [0.2] * 4, table.median(dim=1).values, 4)
    for claim in ("C045", "C211"):
        yield same(claim, "probability of the best action at the start", [1 / 3] * 3,
                   [r[0]["optimal_action_probability"] for r in (ppo, dpo, grpo)])
    last = [r[-1]["optimal_action_probability"] for r in (ppo, dpo, grpo)]
    yield holds("C218", "probability of the best action at the end, lowest of three", "well above 1/3", min(last),
                min(last) > 0.99)
    yield same("C102", "samples of one PPO rollout", 128, ppo[1]["sampled_actions"], 0)
    updates = max(after["optimizer_steps"] - before["optimizer_steps"] for before, after in zip(ppo, ppo[1:]))
    yield holds("C103", "most updates on one PPO batch", "at most 4", updates, 1 <= updates <= 4)
    yield same("C104", "KL(old || current) that ends a batch's updates", 0.05, config["kl_stop"], 2)
    largest = max(row["kl_old_current"] for row in ppo)
    yield holds("C108", "largest KL to old, beside KL to the reference", "small, large",
                f"{largest:.4f} beside {ppo[-1]['kl_current_reference']:.4f}",
                largest < 0.05 and ppo[-1]["kl_current_reference"] > 1.0)
    yield same("C109", "old values of the first PPO batch", [0] * 8,
               [row["old_value"] for row in runs["ppo"][1]["first_batch_trace"]], 4)
    for claim, name, low, high in (("C111", "ppo", 0.9986, 0.9993), ("C214", "grpo", 0.9988, 0.9996)):
        others = [lab.bandit(name, "--seed", seed)[0] for seed in SEEDS if seed != config["seed"]]
        ends = [rows[-1]["expected_reward"] for rows in (runs[name][0], *others)]
        yield within(claim, f"{name}: expected reward at the end (sampled, {len(ends)} seeds)", None,
                     statistics.median(ends), low, high)
    yield same("C138", "preference pairs: 4 x 3", 12, len(runs["dpo"][1]["clean_preference_pairs"]), 0)
    yield same("C138", "DPO updates an iteration", 1, dpo[1]["optimizer_steps"], 0)
    yield same("C139", "actions DPO samples", 0, dpo[-1]["sampled_actions"], 0)
    yield same("C140", "KL(current || reference) of DPO at the start", 0, dpo[0]["kl_current_reference"])
    yield same("C214", "DPO: expected reward at the end", 0.9950, dpo[-1]["expected_reward"], 4)
    yield same("C042", "DPO: training loss at the start (log 2) and at the end", [0.6931, 0.0525],
               [dpo[0]["dpo_training_loss"], dpo[-1]["dpo_training_loss"]], 4)
    gap = max(abs(row["dpo_training_loss"] - row["dpo_original_loss"]) for row in dpo)
    yield same("C043", "DPO without flips: original-label loss, gap to training loss", [0.6931, 0],
               [dpo[0]["dpo_original_loss"], gap], 4)


def numbers_of_the_flips(lab: Lab) -> Iterator[Number]:
    """Section 10.3."""
    ends = {}
    for flips in (0, 3, 6, 12):
        rows, document = lab.bandit("dpo", "--preference-flips", flips)
        first, ends[flips] = rows[0], rows[-1]
        yield same("C022", f"{flips} flips, share of the pairs", {0: 0, 3: 0.25, 6: 0.5, 12: 1}[flips],
                   len(document["flipped_pair_indices"]) / len(document["clean_preference_pairs"]), 2)
        yield same("C143", f"{flips} flips, start: both losses and expected reward", [0.693147, 0.693147, 0.233333],
                   [first["dpo_training_loss"], first["dpo_original_loss"], first["expected_reward"]])
        yield same("C144", f"{flips} flips: pairs presented, updates", [1440, 120],
                   [ends[flips]["pair_presentations"], ends[flips]["optimizer_steps"]], 0)
    yield same("C145", "12 flips: training loss at the end", 0.0525, ends[12]["dpo_training_loss"], 4)
    yield holds("C146", "12 flips: expected reward at the end", "close to -0.5", ends[12]["expected_reward"],
                -0.5 <= ends[12]["expected_reward"] < -0.49)
    yield same("C147", "0 flips: training loss at the end", 0.0525, ends[0]["dpo_training_loss"], 4)
    yield holds("C147", "0 flips: expected reward at the end", "near 1", ends[0]["expected_reward"],
                0.99 < ends[0]["expected_reward"] <= 1)
    yield holds("C148", "12 flips: original-label loss at the end", "above 0.6931", ends[12]["dpo_original_loss"],
                ends[12]["dpo_original_loss"] > 0.6931)
    # Which pairs are flipped is drawn: the bands hold for all 220 and all 924 choices.
    for flips, bands in {
        3: ((0.0525, 0.5330), (0.3728, 0.9005), (0.4024, 0.9918)),
        6: ((0.0525, 0.6931), (0.5330, 1.9605), (-0.1429, 0.6192)),
    }.items():
        for name, (low, high) in zip(("dpo_training_loss", "dpo_original_loss", "expected_reward"), bands):
            yield within("C149", f"{flips} flips: {name} at the end (drawn)", None, ends[flips][name], low - 5e-5,
                         high + 5e-5)


def numbers_of_the_groups(lab: Lab) -> Iterator[Number]:
    """Section 6.5, and the printed commands with another group size."""
    wider, _ = lab.bandit("grpo", "--group-size", 16, "--steps", 1)
    yield same("C172", "actions of an iteration at G = 16 with 16 prompts", 256, wider[1]["sampled_actions"], 0)
    other, _ = lab.bandit("grpo", "--seed", 19, "--group-size", 4, "--steps", 1)
    yield same("C020", "actions of an iteration at --group-size 4", 64, other[1]["sampled_actions"], 0)
    # 5 % to 95 % of a hundred runs; one run may lie outside, so half the width is added on each side.
    bands = {2: (0.9604, 0.9659), 4: (0.9357, 0.9440), 8: (0.9145, 0.9240), 16: (0.8802, 0.8969)}
    for size, (low, high) in bands.items():
        rows, document = lab.bandit("grpo", "--seed", 7, "--steps", 120, "--group-size", size, "--grpo-prompts", 128 // size)
        share = statistics.fmean(row["zero_group_fraction"] for row in rows[1:])
        yield same("C023", f"G = {size}: prompts an iteration", {2: 64, 4: 32, 8: 16, 16: 8}[size],
                   document["config"]["online_batch_prompts"], 0)
        yield same("C174", f"G = {size}: actions in 120 iterations", 15360, rows[-1]["sampled_actions"], 0)
        yield same("C175", f"G = {size}: updates", 480, rows[-1]["optimizer_steps"], 0)
        spare = (high - low) / 2
        what = f"G = {size}: mean share of groups without spread (sampled)"
        yield within("C176", what, None, share, low - spare, high + spare)
        yield holds("C177", f"G = {size}: expected reward beside that share", "near 1", rows[-1]["expected_reward"],
                    rows[-1]["expected_reward"] > 0.99)


def numbers_of_the_chain(lab: Lab) -> Iterator[Number]:
    """Section 4.5."""
    rows, document = lab.chain("--seed", 7)
    config, trace = document["config"], document["first_rollout_trace"]
    yield same("C024", "defaults: seed, lambda, steps", [7, 0.95, 120],
               [config["seed"], config["gae_lambda"], config["steps"]], 2)
    yield same("C114", "episodes and transitions of an iteration", [64, 128],
               [config["episodes"], rows[1]["sampled_actions"]], 0)
    yield same("C049", "rows of the trace: four episodes of two steps", 8, len(trace), 0)
    rewarded = next((a, b) for a, b in zip(trace[::2], trace[1::2]) if b["reward"] == 1)
    yield same("C116", "advantages of the first episode that earns 1", [0.95, 1], [row["advantage"] for row in rewarded])
    settings = ("clip_epsilon", "learning_rate", "max_updates", "value_weight")
    yield same("C119", "clip, learning rate, updates a batch, value weight", [0.2, 0.08, 4, 0.5],
               [config[name] for name in settings], 2)
    yield same("C123", "expected return of the uniform policy, and the best", [0.3, 1],
               [rows[0]["expected_return"], max(map(max, document["reward_table"]))])
    yield same("C047", "expected return and value of the start before training", [0.3, 0],
               [rows[0]["expected_return"], rows[0]["value_start"]])
    yield same("C048", "probability of state 1 before training", 0.5, rows[0]["probability_state_1"])

    ends = [lab.chain("--seed", seed)[0][-1] for seed in SEEDS]
    for claim, name, guide, low, high in (
        ("C124", "expected_return", 0.9996, 0.99889, 0.99965),
        ("C124", "probability_state_1", 0.9997, 0.99929, 0.99985),
        ("C126", "value_start", None, 0.98395, 1.00855),
    ):
        yield within(claim, f"{name} at the end (sampled, {len(ends)} seeds)", guide,
                     statistics.median(row[name] for row in ends), low, high)
    zero, zero_document = lab.chain("--seed", 7, "--gae-lambda", 0)
    starts = [row["advantage"] for row in zero_document["first_rollout_trace"][::2]]
    yield same("C118", "lambda 0: advantages of the first steps, first batch", [0] * 4, starts)
    yield within("C118", "lambda 0: expected return at the end (sampled)", None, zero[-1]["expected_return"], 0.9983, 1.0)


def numbers_of_the_tests() -> Iterator[Number]:
    suite = unittest.defaultTestLoader.loadTestsFromName("test_rl_lab")
    yield same("C222", "tests in test_rl_lab.py", 19, suite.countTestCases(), 0)


def all_numbers(lab: Lab) -> Iterator[Number]:
    """Every number that the guides print and the lab can give, in the order of the guides' topics."""
    yield from numbers_of_the_atoms()
    yield from numbers_of_the_bandit(lab)
    yield from numbers_of_the_chain(lab)
    yield from numbers_of_the_flips(lab)
    yield from numbers_of_the_groups(lab)
    yield from numbers_of_the_tokens(lab)
    yield from numbers_of_the_tests()
    yield from numbers_of_the_overview()


# ------------------------------------------------------------------------------------------ command line


def ledger_table(claims: Sequence[Claim]) -> str:
    rows = [
        [claim.id, claim.kept, claim.tests.replace(" ", ", ") or f"README.txt, {claim.section}", claim.statement]
        for claim in claims
    ]
    return "\n".join(f"{number}  {kept:12}  {statement}\n{'':20}by {by}" for number, kept, by, statement in rows)


def one_claim(claim: Claim, numbers: Sequence[Number]) -> str:
    lines = [f"{claim.id}: {claim.statement}", f"kept as: {claim.kept}"]
    lines += [f"test: {test}" for test in claim.tests.split()]
    lines += [f"README.txt, section {claim.section}: {claim.words}"] if claim.section else []
    lines += [f"note: {claim.note}"] if claim.note else []
    lines += [f"number: {n.what}: guide {n.guide}, lab {n.lab}, {'agree' if n.agree else 'DIFFER'}" for n in numbers]
    return "\n".join(lines)


def numbers_table(numbers: Sequence[Number]) -> str:
    return format_table(
        ["claim  what", "the guide's value", "the lab's value", "agree"],
        [[f"{n.claim}   {n.what}", n.guide, n.lab, "yes" if n.agree else "NO"] for n in numbers],
    )


def show_progress(command: str) -> None:
    """One line on a terminal that says what is running."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"\r\033[K{command}", end="", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = rl_lab.LabParser(
        prog="python -m verification.claims",
        description="Recompute every number that the guides print with the lab, and compare (about ten seconds).\n"
        "Exits with 1 when a number disagrees or a row of the ledger points at nothing.",
        epilog="examples:\n  python -B -m verification.claims\n  python -B -m verification.claims --claim C124",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--ledger", action="store_true", help="list all claims, each with what keeps it; computes nothing")
    what.add_argument("--claim", metavar="ID", help="one claim in full, with its numbers; for example C083")
    arguments = parser.parse_args(argv)
    claims = read_ledger()
    if arguments.ledger:
        print(ledger_table(claims))
        counts = [f"{sum(claim.kept == kept for claim in claims)} by a {kept}" for kept in KEPT]
        print(f"\n{len(claims)} claims: {', '.join(counts)}".replace("a README", "README.txt"))
        return
    chosen = [claim for claim in claims if claim.id == arguments.claim]
    if arguments.claim and not chosen:
        parser.error(f"argument --claim: got {arguments.claim!r}, wanted an id from C001 to C{COUNT}")

    lab = Lab(show_progress)
    try:
        numbers = list(all_numbers(lab))
    finally:
        lab.close()
        show_progress("")
    wrong = problems(claims, (LAB / "README.txt").read_text(encoding="utf-8"), {number.claim for number in numbers})
    if chosen:
        numbers = [number for number in numbers if number.claim == arguments.claim]
        wrong = [line for line in wrong if line.startswith(arguments.claim)]
        print(one_claim(chosen[0], numbers))
    else:
        print(numbers_table(numbers))
        agreeing = sum(number.agree for number in numbers)
        of_claims = len({number.claim for number in numbers})
        print(f"\n{agreeing} of {len(numbers)} numbers agree; they belong to {of_claims} of {len(claims)} claims.")
        print("(sampled), (drawn): another random stream gives other digits; the band is where such runs end.")
    for line in wrong:
        print(f"ledger: {line}")
    if wrong or not all(number.agree for number in numbers):
        sys.exit(1)


if __name__ == "__main__":
    rl_lab.run_command(main)
