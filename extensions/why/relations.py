"""What a logged number means. A relation is exact or it says "cannot tell"; a new one is a function in RELATIONS.

First pass over a batch (every ratio 1), advantages A_i of answers with T_i tokens and mean A = 0:
    loss of the token mean = -sum_i A_i T_i / sum_i T_i = -Cov(A, T) / mean T        (0 for the mean per answer)
with a KL term: + beta * KL of the same reduction. Derived; test_why.py checks both on a batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Callable, Sequence

from extensions.why.reader import PART, name_of

VERDICTS = ("fine", "look", "mistake", "cannot tell")
STEADY = 3  # records from which a sign counts as steady
SMALL = 1e-6  # a printed 0.0


@dataclass(frozen=True)
class Said:
    """One number: its key in the log, the verdict, the relation behind it, and what to record next."""

    key: str
    value: float
    verdict: str
    relation: str
    record_next: str = ""


@dataclass(frozen=True)
class Line:
    """The last record, its numbers under our names, and the history of each."""

    values: dict[str, float]  # our name -> number
    keys: dict[str, str]  # our name -> key in the log
    history: dict[str, list[float]]
    parts: dict[str, tuple[float, float]]  # reward function -> mean, std
    beta: float | None
    updates: float | None  # updates per batch of samples; None: not known

    def get(self, name: str) -> float | None:
        return self.values.get(name)


def first_pass_token_mean_loss(advantages: Sequence[float], lengths: Sequence[float]) -> float:
    """-sum A_i T_i / sum T_i, the loss of the token mean where every ratio is 1."""
    return -sum(a * t for a, t in zip(advantages, lengths)) / sum(lengths)


Relation = Callable[[Line, float], tuple[str, str, str]]


def loss(line: Line, value: float) -> tuple[str, str, str]:
    gradient, std, kl = line.get("gradient_norm"), line.get("reward_std"), line.get("kl")
    if not math.isfinite(value):
        return "mistake", "the loss is no number: one row's log-probability or advantage is not finite", "record that batch; the audit names the row"
    if line.get("margin") is not None or line.get("accuracy") is not None:
        if abs(value - math.log(2)) < 0.01:
            return "fine", "ln 2 = 0.6931 is the DPO loss at margin 0: policy = reference, as at the first step", ""
        return ("fine" if 0 <= value < math.log(2) + 0.1 else "look",
                "DPO's loss is -log sigmoid(beta margin): below ln 2 = 0.6931 the chosen answers lead", "rewards/chosen and rewards/rejected, apart")
    if abs(value) < SMALL:
        if gradient is not None and gradient > SMALL and (std is None or std > SMALL):
            return "fine", "on the first pass the advantages sum to 0, so the mean per answer is 0 whatever is learned; the gradient is not 0", ""
        if std is not None and std <= SMALL:
            return "look", "every group's rewards are equal: all advantages are 0, and so is the gradient of the policy term", "each reward function's std"
        if gradient is not None and gradient <= SMALL:
            return "mistake", "loss 0 and gradient 0 with rewards that differ: nothing is learned", "one batch for the audit (advantages, mask, logps)"
        return "cannot tell", "0 is what the first pass gives; whether something is learned is in the gradient", "grad_norm and reward_std"
    if kl is not None and line.beta and abs(value - line.beta * kl) <= 1e-3 * max(abs(value), line.beta * abs(kl)):
        return "fine", f"loss = beta * kl = {line.beta:g} * {kl:g}: on the first pass the policy term of the mean per answer is 0", ""
    if line.get("value_loss") is not None:
        return "cannot tell", "a sum of policy, value and entropy terms; only the terms say something", "the terms apart"
    sign = "longer answers have lower advantages" if value > 0 else "longer answers have higher advantages"
    if std is not None or line.get("silent_groups") is not None:
        extra = f" plus beta * kl = {line.beta * kl:g}" if line.beta and kl is not None else ""
        return ("fine", f"with a token mean the first-pass loss is -Cov(A, T) / mean T{extra}: {'positive' if value > 0 else 'negative'} means {sign}. "
                "It is no measure of progress, and need not fall", "advantages and lengths of one batch, to check the number")
    return "cannot tell", "a policy loss has no scale of its own, and need not fall", "grad_norm, reward, reward_std, kl"


def gradient_norm(line: Line, value: float) -> tuple[str, str, str]:
    if not math.isfinite(value):
        return "mistake", "the gradient is no number: the step is lost, or the weights are", "the batch before; the smallest log-probability in it"
    if value <= SMALL:
        if (line.get("reward_std") or 0.0) <= SMALL and line.get("reward_std") is not None:
            return "look", "no reward differs inside a group: the gradient of the policy term is 0", "reward functions apart; the share of right answers"
        return "mistake", "a gradient of 0 with rewards that differ: detached, masked or clipped away", "one batch for the audit"
    if value > 100:
        return "look", "logged before it is cut: above max_grad_norm the step's length no longer depends on it", "max_grad_norm; the largest ratio"
    return "fine", "above 0 and finite; its size depends on the reduction (a sum is as many times larger as there are tokens)", ""


def reward_std(line: Line, value: float) -> tuple[str, str, str]:
    varying = {name: std for name, (_, std) in line.parts.items() if std > SMALL}
    if value <= SMALL and len(varying) >= 2:
        total = ", ".join(f"{name} {std:g}" for name, std in varying.items())
        return "mistake", f"the parts vary ({total}) and their sum does not: they cancel to a constant, so nothing is learned", "weights and signs of the reward functions"
    if value <= SMALL and varying:
        return "look", "a reward function varies and the total does not: its weight is 0, or another cancels it", "reward_weights"
    if value <= SMALL:
        return "look", "all answers of every group have the same reward: no advantage", "some answers, read by eye; the reward of a right one"
    return "fine", "answers to the same prompt differ: there is something to learn from", ""


def silent_groups(line: Line, value: float) -> tuple[str, str, str]:
    if value >= 1 - SMALL:
        return "mistake", "every group is without spread: the gradient of the policy term is 0", "accuracy per prompt; easier or harder prompts"
    if value > 0.5:
        return "look", "more than half of the groups give no gradient: with G answers and success q the expected share is q^G + (1-q)^G", "accuracy per prompt"
    return "fine", "share of groups that give no gradient", ""


def reward(line: Line, value: float) -> tuple[str, str, str]:
    history = line.history.get("reward", [])
    if not math.isfinite(value):
        return "mistake", "a reward is no number", "the answer that got it"
    if len(history) >= 20:
        early, late = sum(history[: len(history) // 4]) / (len(history) // 4), sum(history[-(len(history) // 4) :]) / (len(history) // 4)
        moved = late - early
        return ("fine" if moved > 0 else "look", f"mean of the first quarter {early:g}, of the last {late:g}", "" if moved > 0 else "reward_std, clipped_ratio and kl beside it")
    return "cannot tell", "one mean says nothing; a trend over 20 records does", "the whole log"


def kl(line: Line, value: float) -> tuple[str, str, str]:
    history = line.history.get("kl", [])
    if value < -SMALL:
        negative = [number for number in history if number < 0]
        if len(history) >= STEADY and len(negative) > 0.8 * len(history):
            return "mistake", ("a KL is not negative. Its sample mean log p - log r may be, by chance; steadily negative means the samples are not from the policy "
                               "(temperature, top-k, minimal length, dropout, another precision)"), "first-pass ratio; sampler's own log-probabilities"
        return "look", "the estimate log p - log r may be negative by chance; k3 may not", "some more records: is it steadily below 0?"
    if abs(value) <= SMALL:
        return "fine", "policy = reference, as at the first step", ""
    if value > 10:
        return "look", "far from the reference: at 10 nats the reference gives such answers once in 22000", "beta; some answers, read by eye"
    return "fine", "above 0: how far the policy is from the reference, per token or per answer as the trainer has it", ""


def kl_old_current(line: Line, value: float) -> tuple[str, str, str]:
    if abs(value) <= SMALL:
        return "fine", "one update per batch: the current policy is the one that sampled", ""
    if value > 0.1:
        return "look", "the policy moved far within one batch (stable-baselines3 stops at 1.5 target_kl)", "target_kl, epochs, learning rate"
    return "fine", "how far the policy moved within one batch", ""


def clip_fraction(line: Line, value: float) -> tuple[str, str, str]:
    if value <= SMALL:
        if line.updates is not None and line.updates <= 1:
            return "fine", "one update per batch of samples: every ratio is 1, nothing can be clipped", ""
        if line.updates is not None:
            return "look", "several updates per batch, and no ratio leaves the band: a small step, or a denominator that is computed again", "the largest ratio in the second pass"
        return "cannot tell", "0 is right with one update per batch (ratio 1). With more it would be a small step, or a recomputed denominator", "--updates N: updates per batch of samples"
    if value > 0.3:
        return "look", "more than 30 % of the tokens are clipped: the policy moves too far within one batch", "learning rate; epochs"
    return "fine", "share of tokens whose clipped branch was chosen", ""


def truncated_share(line: Line, value: float) -> tuple[str, str, str]:
    if value >= 1 - SMALL:
        return "mistake", "no answer ends: no end token is written (template, eos id), or the budget is too small for any", "one answer with its last ids; the eos id"
    if value > 0.3:
        return "look", "many answers are cut off: their rewards judge unfinished text", "max completion length; lengths of right answers"
    return "fine", "share of answers that reached the budget", ""


def entropy(line: Line, value: float) -> tuple[str, str, str]:
    if value < -SMALL:
        return "mistake", "an entropy over tokens is not negative: this is its negative, or a sum with another sign", "the formula that logs it"
    if value < 0.01:
        return "look", "the policy is nearly deterministic: groups of equal answers, no spread", "share of groups without spread"
    return "fine", "mean entropy per token, at most ln of the vocabulary", ""


def entropy_loss(line: Line, value: float) -> tuple[str, str, str]:
    return "fine", "stable-baselines3 logs minus the mean entropy: negative is right for discrete actions", ""


def explained_variance(line: Line, value: float) -> tuple[str, str, str]:
    if value > 1 + SMALL:
        return "mistake", "1 - Var(return - V) / Var(return) is at most 1", "the formula that logs it"
    if value < 0:
        return "look", "1 - Var(return - V) / Var(return) below 0: the critic is worse than a constant", "value loss; scale of returns"
    return "fine", "1 - Var(return - V) / Var(return); 1 is perfect", ""


def margin(line: Line, value: float) -> tuple[str, str, str]:
    chosen, rejected = line.get("chosen_reward"), line.get("rejected_reward")
    if chosen is not None and rejected is not None and abs(chosen - rejected - value) > 1e-2 * max(1.0, abs(value)):
        return "mistake", f"margin = chosen - rejected, and {chosen:g} - {rejected:g} is {chosen - rejected:g}", "the formula that logs it"
    return ("fine" if value >= 0 else "look"), "beta times (log-ratio of chosen - log-ratio of rejected), the mean over pairs", ""


def chosen_reward(line: Line, value: float) -> tuple[str, str, str]:
    rejected = line.get("rejected_reward")
    if value < 0 and rejected is not None and rejected < value:
        return "look", "both fell and rejected fell more: DPO asks for the difference alone. It is no error; too far it costs quality", "log-probability of chosen; an SFT term holds it up"
    return "fine", "beta * (log p - log reference) of the chosen answers", ""


def accuracy(line: Line, value: float) -> tuple[str, str, str]:
    if not 0 <= value <= 1:
        return "mistake", "a share lies between 0 and 1", "the formula that logs it"
    return "fine", "share of pairs in which the chosen answer leads", ""


def learning_rate(line: Line, value: float) -> tuple[str, str, str]:
    if value == 0:
        return "look", "0: the first step of a warm-up, or the end of a schedule; nothing moves in this step", ""
    return "fine", "", ""


def sampler_ratio(line: Line, value: float) -> tuple[str, str, str]:
    if abs(value - 1) > 0.05:
        return "look", "the mean of pi_train / pi_sampler under the sampler is exactly 1 over its support; away from 1 the sampler is truncated (top-p: the kept mass) or other", "top_p, temperature, precision of the sampler"
    return "fine", "the mean of pi_train / pi_sampler is 1, up to chance", ""


RELATIONS: dict[str, Relation] = {
    "loss": loss, "policy_loss": loss, "gradient_norm": gradient_norm, "reward": reward, "reward_std": reward_std, "silent_groups": silent_groups,
    "kl": kl, "kl_old_current": kl_old_current, "clip_fraction": clip_fraction, "truncated_share": truncated_share, "entropy": entropy,
    "entropy_loss": entropy_loss, "explained_variance": explained_variance, "margin": margin, "chosen_reward": chosen_reward,
    "accuracy": accuracy, "learning_rate": learning_rate, "sampler_ratio": sampler_ratio,
}  # fmt: skip


def line_of(records: list[dict[str, float]], beta: float | None, updates: float | None) -> Line:
    """The last value of each name, and its history."""
    values, keys, history, parts = {}, {}, {}, {}
    for record in records:
        for key, value in record.items():
            if (name := name_of(key)) is not None:
                if keys.get(name, key) == key:
                    values[name], keys[name] = value, key
                    history.setdefault(name, []).append(value)
            elif made := PART.fullmatch(key):
                mean, std = parts.get(made[1], (0.0, 0.0))
                parts[made[1]] = (value, std) if made[2] == "mean" else (mean, value)
    return Line(values, keys, history, parts, beta, updates)


def explain_records(records: list[dict[str, float]], beta: float | None = None, updates: float | None = None) -> list[Said]:
    """Every number of the last record that has a name here, in the order of the log.

    beta is the KL coefficient, updates the number of updates per batch of samples: what a log line does not hold.
    """
    line = line_of(records, beta, updates)
    made = []
    for name, value in line.values.items():
        verdict, relation, following = RELATIONS[name](line, value) if name in RELATIONS else ("cannot tell", "no exact relation for this one", "")
        made.append(Said(line.keys[name], value, verdict, relation, following))
    return made
