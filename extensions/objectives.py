"""The PPO, GRPO and DPO family as one table of choices, and one short engine that evaluates any row of it on any batch.

    python -m extensions.objectives                                       every row on one small batch
    python -m extensions.objectives --objective grpo                      one row, step by step
    python -m extensions.objectives --objective grpo --versus dr_grpo     the same, and what the other does differently
    python -m extensions.objectives --batch FILE.npz                      the same on your own batch
    python -m extensions.objectives --plot surrogates.svg                 gradient against ratio, weight against length
    python -m extensions.objectives --examples                            worked examples, by hand and by the engine
    python -m extensions.objectives --list                                every choice with its formula

A name such as "GRPO" stands for choices that can be made one at a time. `CHOICES` lists them with their formulas, a `Row`
holds one value of each, `ROWS` names the rows that papers and public trainers mean, and `evaluate(row, batch)` returns the
loss, its gradient with respect to every token's log-probability in closed form, and what happened on the way. The
gradient is the result. The value of the loss is not: on the first pass over a batch it is often 0 whatever is right or
wrong (`--examples` shows why).

    from dataclasses import replace
    from extensions.objectives import ROWS, evaluate, make_batch

    batch = make_batch(logps=logps, old_logps=old_logps, mask=mask, rewards=rewards, group_ids=group_ids)
    result = evaluate(ROWS["grpo"], batch)              # result.loss, result.dloss_dlogps, result.advantages, ...
    result = evaluate(replace(ROWS["grpo"], std_ddof=1, reduction="mean_over_tokens"), batch)

In a training loop, with logps (N, T) carrying the graph of the model:

    result = evaluate(row, make_batch(logps=logps.detach(), ...))
    loss_to_backpropagate(result, logps).backward()     # value result.loss, gradient result.dloss_dlogps

which is `(logps * result.dloss_dlogps).sum().backward()` with unused slots left unread.

A new objective is one entry in the table and one test:

    ROWS["my_grpo"] = replace(ROWS["grpo"], name="my_grpo", clip_high=0.28, reduction="mean_over_tokens",
                              source="...", differs="from grpo: higher upper clip, token mean")

    def test_my_grpo(self):                             # the gradient, by a route that does not use the engine
        self.assert_gradient_is_that_of_autograd(ROWS["my_grpo"])

A new choice is a line in CHOICES with its formula, a function beside its relatives, and its name in their dictionary.

Letters: N rows (answers), T padded width, P groups or pairs, G answers to one prompt, V vocabulary; l, l0, lr the
log-probability of a token under the current, old and reference policy; r a ratio, A an advantage, R a reward, T_i the
counted tokens of an answer, sg[.] a value without gradient.

Same as the sources named in each row; where a paper leaves a constant open the row says which one stands here. Left out,
with the reason: `NOT_EXPRESSED`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Callable, Mapping, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import rl_lab

INF = math.inf

# ------------------------------------------------------------------------------------------ the table of choices

# fmt: off
CHOICES: dict[str, dict[str, str]] = {
    # ---- which answers, which reward
    "group_filter": {
        "none": "every group is used",
        "spread": "groups whose rewards are all equal leave the batch (a trainer samples others in their place)",
    },
    "overlong": {
        "none": "no length penalty",
        "soft": "R += 0 if y <= Lmax - Lc; (Lmax - Lc - y) / Lc up to Lmax; -1 beyond; y counted tokens",
    },
    "reward_parts": {
        "sum_then_normalise": "R = sum_k weight_k r_k",
        "normalise_then_sum": "R = sum_k weight_k (r_k - group mean) / (group std + eps)",
    },
    "missing_reward": {
        "refuse": "a reward that is not a finite number is an error",
        "exclude": "a row whose reward is NaN is left out of every mean and std, and gets A = 0",
    },
    # ---- advantage: a baseline, then a scale
    "baseline": {
        "given": "A as the batch holds it: a length penalty or a KL in the reward is in it already",
        "none": "A = R",
        "group_mean": "A_i = R_i - mean of the group",
        "leave_one_out": "A_i = R_i - mean of the others in the group",
        "length_weighted_mean": "A_i = R_i - sum_j T_j R_j / sum_j T_j over the group",
        "best_minus_second": "A = largest - second largest R for the best answer of the group, 0 for the others",
        "greedy": "A = R - reward of the greedy answer to the same prompt",
        "gae": "A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t",
    },
    "credit": {
        "outcome": "one A for the answer, copied to its tokens",
        "reward_to_go": "A_t from sum_{j >= t} gamma^(j - t) r_j",
    },
    "scale": {
        "none": "A is left as it is",
        "group_std": "A / std(R of the group)",
        "batch_std_of_raw_rewards": "A / std(R of the whole batch)",
        "batch_std": "(A - mean over answers) / std over answers",
        "token_std": "(A - mean over tokens) / std over tokens, so long answers count more",
    },
    "std_guard": {
        "add": "x / (std + eps)",
        "inside": "x / sqrt(var + eps)",
        "floor": "x / max(std, eps)",
        "floor_variance": "x / sqrt(max(var, eps))",
    },
    "singleton": {
        "refuse": "a group of one is an error",
        "raw": "a group of one keeps its reward: mean 0, std 1",
        "zero": "a group of one gets A = 0",
    },
    # ---- ratio
    "ratio": {
        "token": "r_t = exp(l_t - l0_t)",
        "sequence_mean": "r = exp(mean_t(l - l0)), the geometric mean of the token ratios",
        "sequence_product": "r = exp(sum_t(l - l0)), the ratio of whole answers",
        "sequence_mean_token": "r_t = sg[exp(mean(l - l0))] exp(l_t - sg[l_t]): value of the mean, gradient of the token",
        "sequence_mean_of_clipped": "r = exp(mean_t x_t), x_t = l - l0 clipped to [-low, high] on the side A asks for",
        "none": "no ratio: the objective is A l",
    },
    # ---- surrogate J, which is maximised
    "surrogate": {
        "plain": "J = r A (without a ratio: A l)",
        "clip": "J = min(r A, clip(r, 1 - low, 1 + high) A)",
        "dual_clip": "J = as clip; where A < 0 not below c A",
        "capped_clip": "J = min(min(r, c) A, clip(r, 1 - low, 1 + high) A)",
        "cispo": "J = sg[clip(r, 1 - low, 1 + high)] A l",
        "sapo": "J = (4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A",
        "vespo": "J = sg[w^k exp(lam - lam w)] A l, w = exp(sum_t(l - l0)), k and lam by the sign of A",
        "dppo_tv": "J = sg[min(r, c)] A l; 0 where p - p0 is beyond high (A > 0) or p0 - p beyond low (A <= 0)",
        "dppo_kl": "J = sg[min(r, c)] A l; 0 where KL(p0 || p) of token against rest is beyond the band on that side",
    },
    "off_policy_rows": {
        "keep": "every answer is used",
        "drop": "J = 0 where A < 0 and mean_t(l0 - l) > threshold; denominators still count the answer",
    },
    # ---- KL to a fixed policy, d = l - lr
    "kl": {
        "none": "no KL term",
        "k1": "d",
        "k2": "d^2 / 2",
        "k3": "exp(-d) + d - 1",
        "abs": "|d|",
        "exact": "sum_a p_a (log p_a - log q_a) from logits",
    },
    "kl_place": {
        "loss": "loss += coef * KL, reduced",
        "reward": "r -= coef * KL of the policy that sampled, before any baseline",
    },
    "kl_anchor": {"reference": "lr is the reference policy", "old": "lr is l0, the policy that sampled"},
    "kl_weight": {"none": "KL_t", "ratio": "r KL_t, with gradient through r"},
    "kl_gradient": {"own": "gradient of the estimator", "k2": "value of the estimator, gradient of k2"},
    # ---- reduction of token losses x
    "reduction": {
        "mean_per_response": "(1/B) sum_i (1/T_i) sum_t x",
        "mean_over_tokens": "(1/N) sum_i sum_t x, N tokens of this batch",
        "mean_over_window": "(1/Nw) sum_i sum_t x, Nw tokens that one optimiser step averages over",
        "sum_per_response": "(1/B) sum_i sum_t x",
        "sum_over_budget": "(1/(B C)) sum_i sum_t x, C a fixed number of tokens",
        "sum_over_width": "(1/(B W)) sum_i sum_t x, W the padded width of this batch",
        "sum_over_tokens": "sum_i sum_t x",
    },
    "kl_reduction": {"same": "as the policy term"},
    "rows_counted": {
        "all": "B counts every row of the batch",
        "nonempty": "B counts the rows that have a token",
    },
    "accumulation": {
        "none": "the loss of a micro-batch stands as it is",
        "divide": "loss / number of accumulation steps",
    },
    # ---- critic
    "value_loss": {
        "none": "no critic",
        "square": "(V - G)^2, G the value target",
        "clip_max": "max((V - G)^2, (V0 + clip(V - V0, -c, c) - G)^2)",
        "clip_replace": "(V0 + clip(V - V0, -c, c) - G)^2",
    },
}
# fmt: on
CHOICES["kl_reduction"] |= CHOICES["reduction"]

# Numbers that a choice reads. A number that no choice of a row reads has no effect and is not shown.
NUMBERS: dict[tuple[str, str], tuple[str, ...]] = {
    ("overlong", "soft"): ("overlong_max", "overlong_cache"),
    ("reward_parts", "normalise_then_sum"): ("std_ddof", "std_eps"),
    ("baseline", "gae"): ("gamma", "lam"),
    ("credit", "reward_to_go"): ("gamma",),
    **{("scale", scale): ("std_ddof", "std_eps") for scale in CHOICES["scale"] if scale != "none"},
    **{("surrogate", name): ("clip_low", "clip_high") for name in ("clip", "cispo")},
    **{
        ("surrogate", name): ("clip_low", "clip_high", "ratio_cap")
        for name in ("dual_clip", "capped_clip", "dppo_tv", "dppo_kl")
    },
    ("ratio", "sequence_mean_of_clipped"): ("clip_low", "clip_high"),
    ("surrogate", "sapo"): ("tau_positive", "tau_negative"),
    ("surrogate", "vespo"): ("vespo_k_positive", "vespo_lam_positive", "vespo_k_negative", "vespo_lam_negative"),
    ("off_policy_rows", "drop"): ("off_policy_threshold",),
    **{("kl", kl): ("kl_coef",) for kl in CHOICES["kl"] if kl != "none"},
    ("value_loss", "square"): ("value_coef",),
    ("value_loss", "clip_max"): ("value_coef", "value_clip"),
    ("value_loss", "clip_replace"): ("value_coef", "value_clip"),
}


@dataclass(frozen=True)
class Row:
    """One objective: its choice at every step. Text fields are keys of CHOICES, numbers are plain numbers.

    `dataclasses.replace(row, field=value)` makes a neighbour; a row can be hashed and compared, and
    `dataclasses.asdict` writes it out. `row.needs` names what it reads of a batch.
    Raises ValueError for a name outside CHOICES, a number out of range, or choices that exclude each other.
    """

    name: str
    source: str = ""
    differs: str = ""  # from the paper, or from the rows that share the name
    # which answers, which reward
    group_filter: str = "none"
    overlong: str = "none"
    overlong_max: float = 20480.0  # Lmax, tokens
    overlong_cache: float = 4096.0  # Lc, tokens
    reward_parts: str = "sum_then_normalise"
    missing_reward: str = "refuse"
    # advantage
    baseline: str = "group_mean"
    credit: str = "outcome"
    gamma: float = 1.0
    lam: float = 0.95
    scale: str = "none"
    std_ddof: int = 0  # 0 population, 1 sample
    std_eps: float = 1e-8
    std_guard: str = "add"
    singleton: str = "refuse"
    # ratio
    ratio: str = "token"
    log_ratio_min: float = -INF  # l - l0 is cut here, and loses its gradient
    log_ratio_max: float = INF
    # surrogate
    surrogate: str = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    ratio_cap: float = 3.0  # c
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    vespo_k_positive: float = 2.0
    vespo_lam_positive: float = 3.0
    vespo_k_negative: float = 3.0
    vespo_lam_negative: float = 2.0
    off_policy_rows: str = "keep"
    off_policy_threshold: float = 0.0
    # KL
    kl: str = "none"
    kl_coef: float = 0.0
    kl_place: str = "loss"
    kl_anchor: str = "reference"
    kl_weight: str = "none"
    kl_gradient: str = "own"
    kl_log_limit: float = INF  # d is cut to +- this
    kl_limit: float = INF  # the estimate is cut to +- this
    # reduction
    reduction: str = "mean_per_response"
    kl_reduction: str = "same"
    rows_counted: str = "all"
    length_eps: float = 0.0  # added to T_i in mean_per_response
    accumulation: str = "none"
    # critic and entropy
    value_loss: str = "none"
    value_coef: float = 0.0
    value_clip: float = 0.2
    entropy_coef: float = 0.0  # loss -= entropy_coef * mean over tokens of the entropy

    def __post_init__(self) -> None:
        for field, allowed in CHOICES.items():
            if getattr(self, field) not in allowed:
                raise ValueError(f"{self.name}, {field}: got {getattr(self, field)!r}, wanted one of {', '.join(allowed)}")
        for field, (low, high) in _NUMBER_RANGES.items():
            value = getattr(self, field)
            is_number = isinstance(value, int if field == "std_ddof" else (int, float)) and not isinstance(value, bool)
            if not is_number or not low <= value <= high:
                raise ValueError(f"{self.name}, {field}: got {value!r}, wanted a number from {low:g} to {high:g}")
        per_token = self.baseline in ("given", "gae") or self.credit == "reward_to_go"
        grouped = self.baseline in GROUP_BASELINES or self.reward_parts == "normalise_then_sum"
        for excluded, reason in (
            (
                self.credit == "reward_to_go" and self.baseline not in ("none", "greedy"),
                "credit reward_to_go has a baseline only if that is none or greedy",
            ),
            (per_token and self.scale not in ("none", "token_std"), "advantages per token are scaled by none or token_std"),
            (
                self.scale == "group_std" and not grouped,
                "scale group_std needs a baseline of the group: R / std has no value for rewards that are all equal",
            ),
            (
                self.credit == "reward_to_go" and self.reward_parts != "sum_then_normalise",
                "reward_parts normalise_then_sum gives one number an answer, and reward_to_go one a token",
            ),
            (self.ratio == "none" and self.surrogate != "plain", "without a ratio the surrogate is plain"),
            (self.ratio == "sequence_mean_of_clipped" and self.surrogate != "plain", "a clipped mean is not clipped again"),
            (self.ratio != "token" and self.surrogate.startswith("dppo"), "dppo compares tokens: ratio token"),
            (self.ratio != "token" and self.surrogate == "vespo", "vespo makes its own ratio of answers: ratio token"),
            (
                self.kl_place == "reward" and self.kl_anchor == "old",
                "in the reward the KL is that of the policy that sampled: to itself it is 0",
            ),
            (
                self.kl == "exact" and (self.kl_place == "reward" or self.kl_anchor == "old"),
                "the exact KL is that of the current policy to the reference, in the loss",
            ),
            (self.ratio == "none" and self.kl_weight == "ratio", "kl_weight ratio needs a ratio"),
            (
                self.kl_place == "reward" and (self.kl_weight, self.kl_gradient) != ("none", "own"),
                "in the reward the KL carries no gradient and no weight",
            ),
        ):
            if excluded:
                raise ValueError(f"{self.name}: {reason}")

    @property
    def kl_in_loss(self) -> bool:
        return self.kl != "none" and self.kl_place == "loss" and self.kl_coef != 0

    @property
    def kl_in_reward(self) -> bool:
        return self.kl != "none" and self.kl_place == "reward" and self.kl_coef != 0 and self.baseline != "given"

    @property
    def needs(self) -> tuple[str, ...]:
        """What this row reads of a batch, besides logps and mask.

        Two have stand-ins: without old_logps the batch is a first pass, and rewards are summed from token_level_rewards or
        rewards_per_func. A batch with gen_ arrays brings those instead of rewards and group_ids.
        """
        grouped = self.baseline in GROUP_BASELINES or self.scale == "group_std" or self.group_filter == "spread"
        grouped = grouped or self.reward_parts == "normalise_then_sum"
        wanted = {
            "old_logps": self.ratio != "none" or self.kl_in_reward or (self.kl_in_loss and self.kl_anchor == "old"),
            "ref_logps": self.kl_in_reward or (self.kl_in_loss and self.kl_anchor == "reference" and self.kl != "exact"),
            "logits": self.kl_in_loss and self.kl == "exact",
            "ref_logits": self.kl_in_loss and self.kl == "exact",
            "advantages": self.baseline == "given",
            "rewards": self.baseline != "given" or self.group_filter == "spread",
            "group_ids": grouped,
            "rewards_per_func": self.reward_parts == "normalise_then_sum",
            "reward_weights": self.reward_parts == "normalise_then_sum",
            "budget": "sum_over_budget" in (self.reduction, self.kl_reduction),
            "reward_baselines": self.baseline == "greedy",
            "values": self.baseline == "gae" or self.value_loss in ("clip_max", "clip_replace"),
            "vpreds": self.value_loss != "none" and self.value_coef != 0,
            "entropies": self.entropy_coef != 0,
        }
        return tuple(name for name, is_wanted in wanted.items() if is_wanted)


_NUMBER_RANGES: dict[str, tuple[float, float]] = {
    "overlong_max": (1, INF),
    "overlong_cache": (1, INF),
    "gamma": (0, 1),
    "lam": (0, 1),
    "std_ddof": (0, 1),  # a whole number
    "std_eps": (0, INF),
    "log_ratio_min": (-INF, 0),
    "log_ratio_max": (0, INF),
    "clip_low": (0, INF),
    "clip_high": (-1, INF),
    "ratio_cap": (0, INF),
    "tau_positive": (1e-6, INF),
    "tau_negative": (1e-6, INF),
    "vespo_k_positive": (0, INF),
    "vespo_lam_positive": (1e-4, INF),
    "vespo_k_negative": (0, INF),
    "vespo_lam_negative": (1e-4, INF),
    "off_policy_threshold": (-INF, INF),
    "kl_coef": (0, INF),
    "kl_log_limit": (0, INF),
    "kl_limit": (0, INF),
    "length_eps": (0, 1),
    "value_coef": (0, INF),
    "value_clip": (0, INF),
    "entropy_coef": (-INF, INF),
}

GROUP_BASELINES = ("group_mean", "leave_one_out", "length_weighted_mean", "best_minus_second")

# ------------------------------------------------------------------------------------------ the batch


@dataclass(frozen=True, eq=False)
class Batch:
    """What an objective reads: N answers, padded to T tokens. Build it with make_batch, which checks and cleans.

    Slots outside the mask hold 0, whatever they held before. `dataclasses.replace(batch, logps=...)` moves the policy and
    keeps the rest; pass logps through make_batch when they may hold anything in unused slots.
    """

    logps: Tensor  # (N, T) log-probability of each token, policy being updated
    mask: Tensor  # (N, T) bool: counted response tokens, the real EOS included
    old_logps: Tensor | None = None  # (N, T) policy that sampled; None: first pass, every ratio is 1
    ref_logps: Tensor | None = None  # (N, T) reference policy
    rewards: Tensor | None = None  # (N,) before any normalisation; NaN: missing
    group_ids: Tensor | None = None  # (N,) integer, equal for answers to the same prompt
    advantages: Tensor | None = None  # (N,) or (N, T), read by baseline "given"
    token_level_rewards: Tensor | None = None  # (N, T); without it the reward sits on the last counted token
    rewards_per_func: Tensor | None = None  # (N, F); NaN where a reward function gave none
    reward_weights: Tensor | None = None  # (F,)
    reward_baselines: Tensor | None = None  # (N,) reward of the greedy answer
    values: Tensor | None = None  # (N, T) critic when the batch was sampled: for GAE, and V0 of a value clip
    next_values: Tensor | None = None  # (N, T) with the two flags, for environments; else the next token's value
    terminated: Tensor | None = None  # (N, T) bool
    boundary: Tensor | None = None  # (N, T) bool
    vpreds: Tensor | None = None  # (N, T) critic being updated
    returns: Tensor | None = None  # (N, T) value targets; without them A + values, A as GAE or the batch gives it
    entropies: Tensor | None = None  # (N, T)
    logits: Tensor | None = None  # (N, T, V) policy being updated, for the exact KL
    ref_logits: Tensor | None = None  # (N, T, V)
    # The generation batch this micro-batch was cut from: advantages are computed over its M rows, then row_ids are taken.
    gen_rewards: Tensor | None = None  # (M,)
    gen_rewards_per_func: Tensor | None = None  # (M, F)
    gen_group_ids: Tensor | None = None  # (M,)
    gen_lengths: Tensor | None = None  # (M,)
    gen_kl: Tensor | None = None  # (M,) sum over the answer of l0 - lr
    row_ids: Tensor | None = None  # (N,) rows of the generation batch
    # What one optimiser step averages over, as this process sees it.
    window_tokens: float | None = None  # Nw of mean_over_window; None: this batch is the window
    window_rows: float | None = None  # B of the other reductions; None: the rows of this batch
    accumulation_steps: int = 1
    budget: float | None = None  # C of sum_over_budget

    @property
    def lengths(self) -> Tensor:
        """Counted tokens of each row, (N,)."""
        return self.mask.sum(dim=1)

    @property
    def from_generation(self) -> bool:
        """Whether rewards, and so advantages, are those of the generation batch: M rows, of which row_ids are here."""
        return self.row_ids is not None and self.gen_rewards is not None


PER_TOKEN = ("old_logps", "ref_logps", "token_level_rewards", "values", "next_values", "vpreds", "returns", "entropies")
PER_TOKEN_FLAGS = ("terminated", "boundary")
PER_ROW = ("rewards", "reward_baselines")
GENERATION = ("gen_rewards", "gen_rewards_per_func", "gen_group_ids", "gen_lengths", "gen_kl")


def make_batch(
    *,
    logps,
    mask=None,
    dtype: torch.dtype | None = None,
    allow_empty_rows: bool = False,
    num_items_in_batch: float | None = None,
    steps_per_generation: int = 1,
    num_processes: int = 1,
    **arrays,
) -> Batch:
    """Check arrays (numpy, torch or lists) with the names of Batch's fields, and set their unused slots to 0.

    logps (N, T), or (N,) for N answers of one token each (then every per-token array is (N,) too, and mask may be left
    out). Everything is computed in the dtype of logps, or in `dtype` if given. `num_items_in_batch`, the counted tokens of
    the generation batch, sets window_tokens = num_items_in_batch / num_processes * accumulation_steps /
    steps_per_generation.

    Raises TypeError for an unknown name or a wrong dtype; ValueError for a shape that differs, a row without a counted
    token (unless allow_empty_rows) or a non-finite number in a used slot, naming the row and the position. Unused slots
    may hold anything. Rewards are checked later: some rows of the table allow a missing one.
    """
    known = {field.name for field in dataclasses.fields(Batch)}
    for name in arrays:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise TypeError(f"make_batch: unknown array {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    logps = _floating("logps", logps, dtype)
    one_token_rows = logps.dim() == 1
    if one_token_rows:
        logps = logps.unsqueeze(1)
        mask = np.ones(len(logps), dtype=bool) if mask is None else mask
    if logps.dim() != 2 or not logps.numel():
        raise ValueError(f"logps: got shape {tuple(logps.shape)}, wanted (N, T) with N and T at least 1")
    if mask is None:
        raise ValueError("mask: missing; wanted a bool array that is True on counted response tokens, EOS included")

    def per_token(name: str, tensor: Tensor) -> Tensor:
        tensor = tensor.unsqueeze(1) if one_token_rows and tensor.dim() == 1 else tensor
        if tensor.shape != logps.shape:
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, wanted {tuple(logps.shape)}, the shape of logps")
        return tensor

    mask = per_token("mask", _boolean("mask", mask))
    has_tokens = mask.any(dim=1)
    if not allow_empty_rows and not has_tokens.all():
        row = int((~has_tokens).nonzero()[0])
        raise ValueError(f"mask: row {row} has no counted token; drop the row, mend the mask, or pass allow_empty_rows=True")
    if not has_tokens.any():
        raise ValueError("mask: no row has a counted token")
    unused = ~mask
    made: dict[str, object] = {"logps": _cleaned("logps", logps, unused), "mask": mask}
    rows = len(logps)
    for name, value in arrays.items():
        if value is None:
            continue
        if name in PER_TOKEN:
            made[name] = _cleaned(name, per_token(name, _floating(name, value, logps.dtype)), unused)
        elif name in PER_TOKEN_FLAGS:
            made[name] = per_token(name, _boolean(name, value))
        elif name in PER_ROW:
            made[name] = _shaped(name, _floating(name, value, logps.dtype), (rows,), "one number a row")
            if name == "reward_baselines" and not made[name].isfinite().all():
                raise ValueError(f"{name}: row {int((~made[name].isfinite()).nonzero()[0])} is not finite")
        elif name in ("group_ids", "row_ids"):
            made[name] = _shaped(name, _integer(name, value), (rows,), "one whole number a row")
        elif name == "advantages":
            given = _floating(name, value, logps.dtype)
            if given.shape not in ((rows,), logps.shape):
                raise ValueError(f"advantages: got shape {tuple(given.shape)}, wanted ({rows},) or {tuple(logps.shape)}")
            given = given.unsqueeze(1) if given.dim() == 1 else given
            made[name] = _cleaned(name, given, unused if given.shape == mask.shape else ~has_tokens.unsqueeze(1))
        elif name in ("logits", "ref_logits"):
            scores = _floating(name, value, logps.dtype)
            if scores.dim() != 3 or scores.shape[:2] != logps.shape:
                raise ValueError(f"{name}: got shape {tuple(scores.shape)}, wanted {tuple(logps.shape)} + (V,)")
            made[name] = scores.masked_fill(unused.unsqueeze(2), 0.0)
            # -inf is a forbidden token. A sum shows the others at once: NaN and inf survive it.
            if not made[name].sum().item() < INF and (made[name].isnan() | (made[name] == INF)).any():
                raise ValueError(f"{name}: got NaN or inf where the mask is set, wanted finite numbers or -inf")
        elif name in ("gen_group_ids", "gen_lengths"):
            made[name] = _integer(name, value)
        elif name in ("rewards_per_func", "reward_weights") or name in GENERATION:
            made[name] = _floating(name, value, logps.dtype)
        else:  # the numbers of the window
            made[name] = float(value)
            if not 0 < made[name] < INF:
                raise ValueError(f"{name}: got {value!r}, wanted a finite number above 0")
            if name == "accumulation_steps":
                made[name] = int(value)
                if made[name] != value:
                    raise ValueError(f"{name}: got {value!r}, wanted a whole number")
    if num_items_in_batch is not None:
        steps = made.get("accumulation_steps", 1)
        made["window_tokens"] = max(float(num_items_in_batch), 1.0) / num_processes * steps / steps_per_generation
    _check_generation(made)
    _check_reward_parts(made, rows)
    return Batch(**made)


def _floating(name: str, value, dtype: torch.dtype | None) -> Tensor:
    tensor = torch.as_tensor(value).detach()
    if dtype is None and not tensor.is_floating_point():
        raise TypeError(f"{name}: got dtype {tensor.dtype}, wanted floating point numbers")
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"{name}: got dtype {tensor.dtype}, wanted real numbers")
    return tensor if dtype is None else tensor.to(dtype)


def _boolean(name: str, value) -> Tensor:
    tensor = torch.as_tensor(value)
    if tensor.dtype != torch.bool:
        raise TypeError(f"{name}: got dtype {tensor.dtype}, wanted bool; write `!= 0` where it is made if it holds 0 and 1")
    return tensor


def _integer(name: str, value) -> Tensor:
    tensor = torch.as_tensor(value)
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        raise TypeError(f"{name}: got dtype {tensor.dtype}, wanted whole numbers")
    return tensor.long()


def _shaped(name: str, tensor: Tensor, shape: tuple[int, ...], meaning: str) -> Tensor:
    if tensor.shape != shape:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, wanted {shape}, {meaning}")
    return tensor


def _cleaned(name: str, tensor: Tensor, unused: Tensor) -> Tensor:
    """The array with 0 in unused slots; refuses a used slot that is not finite, naming row and position."""
    cleaned = tensor.masked_fill(unused, 0.0)
    # One sum instead of a test of every number: NaN and inf survive a sum. A sum that merely overflows is looked at again.
    if not math.isfinite(cleaned.sum().item()) and not torch.isfinite(cleaned).all():
        row, position = (~torch.isfinite(cleaned)).nonzero()[0].tolist()
        raise ValueError(
            f"{name}: got {cleaned[row, position].item()} at row {row}, position {position}, where the mask is set; wanted "
            "finite numbers; likely a mask that covers padding, or a diverged model"
        )
    return cleaned


def _check_generation(made: Mapping[str, object]) -> None:
    given = [name for name in GENERATION if name in made]
    if bool(given) != ("row_ids" in made):
        raise ValueError("row_ids and the gen_ arrays belong together: got one without the other")
    if given:
        sizes = {name: len(made[name]) for name in given}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"gen_ arrays: got lengths {sizes}, wanted one length")
        low, high = (int(bound) for bound in made["row_ids"].aminmax())
        if low < 0 or high >= sizes[given[0]]:
            raise ValueError(f"row_ids: got numbers from {low} to {high}, wanted 0 to {sizes[given[0]] - 1}")


def _check_reward_parts(made: Mapping[str, object], rows: int) -> None:
    weights = made.get("reward_weights")
    for name, length in (("rewards_per_func", rows), ("gen_rewards_per_func", None)):
        if name in made:
            parts = made[name]
            if parts.dim() != 2 or length not in (None, len(parts)) or weights is None or weights.shape != parts.shape[1:]:
                got = f"{tuple(parts.shape)} with reward_weights {None if weights is None else tuple(weights.shape)}"
                wanted = f"({'M' if length is None else length}, F) with reward_weights (F,)"
                raise ValueError(f"{name}: got {got}, wanted {wanted}")


def _required(row: Row, batch: Batch, name: str) -> Tensor:
    value = getattr(batch, name)
    if value is None:
        raise ValueError(f"{row.name}: the batch has no {name}, which this row reads; it reads {', '.join(row.needs)}")
    return value


# ------------------------------------------------------------------------------------------ step 1: answers and rewards


def soft_overlong_penalty(lengths: Tensor, longest: float, cache: float) -> Tensor:
    """DAPO's length penalty: 0 if y <= Lmax - Lc; (Lmax - Lc - y) / Lc up to Lmax; -1 beyond.

    lengths [...] counted tokens -> [...] in [-1, 0]; longest Lmax and cache Lc in tokens.
    Source: arXiv 2503.14476 equation 13.
    """
    return ((longest - cache - lengths) / cache).clamp(-1.0, 0.0)


class Groups(NamedTuple):
    """Answers arranged one group a row, (P, G); a shorter group is filled up, and `real` marks what is not filling."""

    members: Tensor  # (P, G) row numbers
    real: Tensor  # (P, G) bool
    group: Tensor  # (M,) where each answer stands: its group
    place: Tensor  # (M,) and its place there

    def table(self, per_row: Tensor) -> Tensor:
        """(M, ...) -> (P, G, ...)."""
        return per_row[self.members]

    def per_row(self, table: Tensor) -> Tensor:
        """(P, G) -> (M,)."""
        return table[self.group, self.place]


def arrange_groups(group_ids: Tensor) -> Groups:
    """Groups by equal id, wherever the rows stand. group_ids (M,) integer."""
    _, group, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    first = sizes.cumsum(0) - sizes
    order = group.argsort(stable=True)
    place = torch.empty_like(group)
    place[order] = torch.arange(len(group)) - first[group[order]]
    members = order[first].unsqueeze(1).repeat(1, int(sizes.max()))
    members[group, place] = torch.arange(len(group))
    return Groups(members, torch.arange(members.shape[1]) < sizes.unsqueeze(1), group, place)


class Answers(NamedTuple):
    """The rewards that advantages are computed from: the rows of the batch, or of the generation batch it was cut from."""

    rewards: Tensor  # (M,) NaN: missing
    group_ids: Tensor | None
    lengths: Tensor  # (M,)
    parts: Tensor | None  # (M, F)
    kl: Tensor | None  # (M,) sum over the answer of l0 - lr


def _answers(row: Row, batch: Batch) -> Answers:
    if batch.from_generation:
        lengths = batch.gen_lengths
        if lengths is None and (row.overlong == "soft" or row.baseline == "length_weighted_mean"):
            raise ValueError(f"{row.name}: the batch has gen_rewards but no gen_lengths, which this row reads")
        if row.kl_in_reward and batch.gen_kl is None:
            raise ValueError(f"{row.name}: the batch has gen_rewards but no gen_kl, which this row reads")
        lengths = torch.ones_like(batch.gen_rewards) if lengths is None else lengths
        return Answers(batch.gen_rewards, batch.gen_group_ids, lengths, batch.gen_rewards_per_func, batch.gen_kl)
    rewards = batch.rewards
    if rewards is None and batch.token_level_rewards is not None:
        rewards = batch.token_level_rewards.sum(dim=1)
    if rewards is None and batch.rewards_per_func is not None:
        parts = batch.rewards_per_func
        rewards = (parts * batch.reward_weights).nansum(dim=1).masked_fill(parts.isnan().all(dim=1), math.nan)
    if rewards is None:
        _required(row, batch, "rewards")
    kl = None
    if row.kl_in_reward:
        kl = _kl_in_reward(row, batch).sum(dim=1)
    return Answers(rewards, batch.group_ids, batch.lengths, batch.rewards_per_func, kl)


def _kl_in_reward(row: Row, batch: Batch) -> Tensor:
    """KL estimate of the policy that sampled, per token (N, T), 0 in unused slots."""
    value, _ = kl_estimate(row, _old_logps(batch), _required(row, batch, "ref_logps"))
    return value.masked_fill(~batch.mask, 0.0)


def _old_logps(batch: Batch) -> Tensor:
    return batch.logps if batch.old_logps is None else batch.old_logps


def _check_rewards(row: Row, rewards: Tensor) -> None:
    missing_allowed = row.missing_reward == "exclude"
    bad = rewards.isinf() if missing_allowed else ~rewards.isfinite()
    if bad.any():
        where = int(bad.nonzero()[0])
        raise ValueError(
            f"{row.name}: rewards: got {rewards[where].item()} at row {where}, wanted finite numbers; likely a failed "
            "verifier"
            + ("" if missing_allowed else " (missing_reward='exclude' leaves a NaN row out)")
        )


def kept_rows(row: Row, batch: Batch) -> Tensor:
    """Rows that stay in the batch, (N,) bool: all, or with group_filter "spread" those whose group has unequal rewards.

    A row that leaves counts in no denominator: a trainer would have sampled another group in its place.
    """
    if row.group_filter == "none":
        return torch.ones(len(batch.mask), dtype=torch.bool)
    kept = _kept_answers(row, _answers(row, batch))
    kept = kept[batch.row_ids] if batch.from_generation else kept
    if not kept.any():
        raise ValueError(f"{row.name}: no group of this batch has unequal rewards, so group_filter 'spread' leaves nothing")
    return kept


def _kept_answers(row: Row, answers: Answers) -> Tensor:
    """Answers that the group filter leaves, (M,) bool."""
    _check_rewards(row, answers.rewards)
    if row.group_filter == "none":
        return torch.ones(len(answers.rewards), dtype=torch.bool)
    groups = arrange_groups(_group_ids(row, answers))
    present = answers.rewards.isfinite()
    table = groups.table(torch.where(present, answers.rewards, 0.0))
    return ~_all_equal(table, groups.real & groups.table(present))[groups.group]


def _all_equal(table: Tensor, real: Tensor) -> Tensor:
    """Groups whose real entries are all equal up to rounding, or that have none. (P, G), (P, G) bool -> (P,) bool."""
    filled = torch.where(real, table, table.gather(1, real.long().argmax(dim=1, keepdim=True)))
    return rl_lab.groups_without_spread(filled)


def _group_ids(row: Row, answers: Answers) -> Tensor:
    if answers.group_ids is None:
        raise ValueError(f"{row.name}: the batch has no group_ids, which this row reads; it reads {', '.join(row.needs)}")
    return answers.group_ids


# ------------------------------------------------------------------------------------------ step 2: advantage

# A baseline takes the rewards one group a row (P, G), which of them are real, the lengths, and returns what is left.


def _mean(table: Tensor, real: Tensor) -> Tensor:
    return torch.where(real, table, 0.0).sum(dim=-1, keepdim=True) / real.sum(dim=-1, keepdim=True).clamp(min=1)


def group_mean(rewards: Tensor, real: Tensor, lengths: Tensor) -> Tensor:
    """A_i = R_i - mean of the group."""
    return rewards - _mean(rewards, real)


def leave_one_out(rewards: Tensor, real: Tensor, lengths: Tensor) -> Tensor:
    """A_i = R_i - mean of the others = G / (G - 1) * (R_i - mean of the group)."""
    others = (real.sum(dim=-1, keepdim=True) - 1).clamp(min=1)
    total = torch.where(real, rewards, 0.0).sum(dim=-1, keepdim=True)
    return rewards - (total - rewards) / others


def length_weighted_mean(rewards: Tensor, real: Tensor, lengths: Tensor) -> Tensor:
    """A_i = R_i - sum_j T_j R_j / sum_j T_j."""
    weights = torch.where(real, lengths, 0.0)
    return rewards - (weights * rewards).sum(dim=-1, keepdim=True) / weights.sum(dim=-1, keepdim=True).clamp(min=1)


def best_minus_second(rewards: Tensor, real: Tensor, lengths: Tensor) -> Tensor:
    """A = largest - second largest for the best answer, 0 for the others; a tie for the best gives 0."""
    ranked = torch.where(real, rewards, -INF)
    top, where = ranked.topk(min(2, ranked.shape[1]), dim=-1)
    gap = torch.where(top[:, -1:].isfinite(), top[:, :1] - top[:, -1:], 0.0)
    return torch.zeros_like(rewards).scatter(-1, where[:, :1], gap)


BASELINES = {
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "length_weighted_mean": length_weighted_mean,
    "best_minus_second": best_minus_second,
}

GUARDS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "add": lambda x, variance, eps: x / (variance.sqrt() + eps),
    "inside": lambda x, variance, eps: x / (variance + eps).sqrt(),
    "floor": lambda x, variance, eps: x / variance.sqrt().clamp(min=eps),
    "floor_variance": lambda x, variance, eps: x / variance.clamp(min=eps).sqrt(),
}


def divide_by_std(row: Row, x: Tensor, variance: Tensor) -> Tensor:
    """x over a guarded standard deviation; 0 where x is 0, also with eps 0."""
    return torch.where(x == 0, 0.0, GUARDS[row.std_guard](x, variance, row.std_eps))


def variance_of(values: Tensor, real: Tensor, ddof: int) -> tuple[Tensor, Tensor]:
    """Mean and variance of the real entries along the last axis, each [..., 1]; divisor n - ddof, NaN if that is 0."""
    mean = _mean(values, real)
    squares = torch.where(real, values - mean, 0.0).square().sum(dim=-1, keepdim=True)
    return mean, squares / (real.sum(dim=-1, keepdim=True) - ddof).clamp(min=0)


def compute_advantages(row: Row, batch: Batch) -> Tensor:
    """The advantage of every token, (N, T), 0 in unused slots. Gradient: none.

    Steps: rewards (parts, length penalty, KL), baseline, scale. Over the generation batch if the batch brings one.
    Raises ValueError for an array the row needs and the batch lacks, a group of one (unless the row says otherwise), and a
    reward that is not finite.
    """
    advantages, _ = _advantages(row, batch, batch.mask & kept_rows(row, batch).unsqueeze(1))
    return torch.where(batch.mask, advantages, 0.0)


def _advantages(row: Row, batch: Batch, mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """Advantages (N, 1) or (N, T), and the value targets A + V where there is a critic."""
    targets = None
    if row.baseline == "given":
        advantages = _required(row, batch, "advantages")
        advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
        targets = None if batch.values is None else advantages + batch.values
    elif row.baseline == "gae":
        advantages, targets = gae_over_tokens(row, batch)
    elif row.credit == "reward_to_go":
        advantages = reward_to_go(token_rewards(row, batch), batch.mask, row.gamma)
        if row.baseline == "greedy":
            advantages = advantages - _required(row, batch, "reward_baselines").unsqueeze(1)
    else:
        advantages = outcome_advantages(row, batch).unsqueeze(1)
    if row.scale == "token_std":
        advantages = standardise_over_tokens(row, advantages, mask)
    return advantages, targets


def standardise_over_tokens(row: Row, advantages: Tensor, mask: Tensor) -> Tensor:
    """(A - mean over counted tokens) / guarded std over them. advantages (N, 1) or (N, T), mask (N, T) -> (N, T)."""
    flat, real = advantages.expand_as(mask).reshape(1, -1), mask.reshape(1, -1)
    mean, variance = variance_of(flat, real, row.std_ddof)
    return divide_by_std(row, flat - mean, variance).reshape(mask.shape)


def outcome_advantages(row: Row, batch: Batch) -> Tensor:
    """One advantage an answer, (N,): baseline, then scale, over answers."""
    answers = _answers(row, batch)
    rewards = answers.rewards
    kept = _kept_answers(row, answers)
    grouped = row.baseline in GROUP_BASELINES or row.reward_parts == "normalise_then_sum"
    groups = arrange_groups(_group_ids(row, answers) if grouped else torch.arange(len(rewards)))
    if row.reward_parts == "normalise_then_sum":
        if answers.parts is None:
            raise ValueError(f"{row.name}: the batch has no rewards_per_func, which reward_parts 'normalise_then_sum' reads")
        rewards = normalised_parts(row, answers.parts, batch.reward_weights, groups).masked_fill(rewards.isnan(), math.nan)
    if row.overlong == "soft":
        rewards = rewards + soft_overlong_penalty(answers.lengths, row.overlong_max, row.overlong_cache)
    if row.kl_in_reward:
        rewards = rewards - row.kl_coef * answers.kl

    present = rewards.isfinite()
    rewards = torch.where(present, rewards, 0.0)
    if grouped:
        table, real = groups.table(rewards), groups.real & groups.table(present)
        members = real.sum(dim=1, keepdim=True)
        if row.singleton == "refuse" and (members == 1).any():
            where = int(groups.members[int((members == 1).nonzero()[0, 0]), 0])
            raise ValueError(
                f"{row.name}: row {where} is alone in its group, wanted at least two answers to a prompt: one answer has "
                "nothing to be compared with (singleton='raw' or 'zero' says what it gets instead)"
            )
        if row.baseline in BASELINES:
            advantages = BASELINES[row.baseline](table, real, groups.table(answers.lengths.to(table.dtype)))
            # Rounding leaves a few ulps where all rewards are equal, and dividing by a tiny std would blow them up.
            advantages = torch.where(_all_equal(table, real).unsqueeze(1), 0.0, advantages)
        else:
            advantages = table
        variance = variance_of(table, real, row.std_ddof)[1]
        if row.singleton == "raw":
            advantages = torch.where(members == 1, table, advantages)
            variance = torch.where(members == 1, 1.0, variance)
        elif row.baseline in BASELINES:
            advantages = torch.where(members == 1, 0.0, advantages)
        if row.scale == "group_std":
            advantages = divide_by_std(row, advantages, variance)
        advantages = groups.per_row(advantages)
    else:
        advantages = rewards
        if row.baseline == "greedy":
            advantages = advantages - _required(row, batch, "reward_baselines")
    if row.scale == "batch_std_of_raw_rewards":
        advantages = divide_by_std(row, advantages, variance_of(rewards, present & kept, row.std_ddof)[1])
    elif row.scale == "batch_std":
        mean, variance = variance_of(advantages, present & kept, row.std_ddof)
        advantages = divide_by_std(row, advantages - mean, variance)
    advantages = torch.where(present, advantages, 0.0)
    return advantages[batch.row_ids] if batch.from_generation else advantages


def normalised_parts(row: Row, parts: Tensor, weights: Tensor, groups: Groups) -> Tensor:
    """R = sum_k weight_k (r_k - group mean) / (group std + eps); a missing part adds nothing. parts (M, F) -> (M,)."""
    total = torch.zeros(len(parts), dtype=parts.dtype)
    for part, weight in zip(parts.unbind(dim=1), weights):
        table, real = groups.table(part), groups.real & groups.table(part.isfinite())
        mean, variance = variance_of(torch.where(real, table, 0.0), real, row.std_ddof)
        total += weight * torch.where(real, divide_by_std(row, table - mean, variance), 0.0)[groups.group, groups.place]
    return total


def token_rewards(row: Row, batch: Batch) -> Tensor:
    """Reward of every token, (N, T): as given, or the answer's on its last counted token; less a KL in the reward."""
    rewards = batch.token_level_rewards
    if rewards is None:
        answer = _answers(replace(row, kl="none"), batch).rewards
        _check_rewards(replace(row, missing_reward="refuse"), answer)
        answer = answer[batch.row_ids] if batch.from_generation else answer
        last = _last_token(batch.mask)
        rewards = torch.zeros_like(batch.logps).masked_scatter(last, answer[batch.mask.any(dim=1)])
    if row.overlong == "soft":
        penalty = soft_overlong_penalty(batch.lengths, row.overlong_max, row.overlong_cache).to(rewards.dtype)
        rewards = rewards + torch.where(_last_token(batch.mask), penalty.unsqueeze(1), 0.0)
    if row.kl_in_reward:
        rewards = rewards - row.kl_coef * _kl_in_reward(row, batch)
    return rewards


def _last_token(mask: Tensor) -> Tensor:
    """True on the last counted token of each row."""
    return mask & (mask.flip(1).cumsum(dim=1).flip(1) == 1)


def reward_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """G_t = sum_{j >= t} gamma^(j - t) r_j over counted tokens: GAE without a critic and with lambda 1. (N, T) -> (N, T)."""
    nothing = torch.zeros_like(rewards)
    return _gae_over_counted_tokens(rewards, nothing, mask, gamma, 1.0)[0]


def gae_over_tokens(row: Row, batch: Batch) -> tuple[Tensor, Tensor]:
    """GAE and its value targets, each (N, T); the answer's last counted token is terminal, tokens in a hole are skipped.

    With next_values, terminated and boundary in the batch the rows are stretches of an environment instead.
    """
    rewards, values = token_rewards(row, batch), _required(row, batch, "values")
    if batch.next_values is not None:
        if batch.terminated is None or batch.boundary is None:
            raise ValueError(f"{row.name}: next_values needs terminated and boundary beside it")
        return rl_lab.gae(rewards, values, batch.next_values, batch.terminated, batch.boundary, row.gamma, row.lam)
    return _gae_over_counted_tokens(rewards, values, batch.mask, row.gamma, row.lam)


def _gae_over_counted_tokens(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float):
    # Counted tokens move to the left, so that a hole (tool output) is no step in time.
    order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)
    counted = mask.gather(1, order)
    ends = ~F.pad(counted[:, 1:], (0, 1))
    rewards, values = (torch.where(counted, series.gather(1, order), 0.0) for series in (rewards, values))
    packed = rl_lab.gae(rewards, values, F.pad(values[:, 1:], (0, 1)), ends, ends, gamma, lam)
    return tuple(torch.where(mask, torch.zeros_like(series).scatter(1, order, series), 0.0) for series in packed)


# ------------------------------------------------------------------------------------------ step 3: ratio


def choose(condition: Tensor, yes: float, no: float, dtype: torch.dtype) -> Tensor:
    """One of two numbers at every place. torch.where of two plain numbers would round them to float32."""
    return torch.where(condition, torch.tensor(yes, dtype=dtype), torch.tensor(no, dtype=dtype))


class Ratio(NamedTuple):
    """A ratio, (N, T) or one an answer (N, 1), and how far a slope with respect to its logarithm reaches."""

    value: Tensor
    share: Tensor | float  # d log r / d l_t
    of_answer: bool  # the slopes of an answer's tokens are summed before they reach each of them
    cut: Tensor | bool  # tokens or answers whose log-ratio a limit, or a clip inside the ratio, has cut


def _exp(log_ratio: Tensor) -> Tensor:
    return rl_lab.importance_ratio(log_ratio, torch.zeros((), dtype=log_ratio.dtype).expand_as(log_ratio))


def compute_ratio(row: Row, l: Tensor, l0: Tensor, lengths: Tensor, advantages: Tensor) -> Ratio:
    """The ratio that row.ratio asks for. l, l0 (N, T) with 0 in unused slots, lengths (N, 1), advantages (N, 1) or (N, T).

    d log r / d l_t: token and sequence_mean_token 1, sequence_mean 1 / T_i, sequence_product 1; 0 where something has cut.
    """
    lengths = lengths.clamp(min=1)
    has_limit = not (math.isinf(row.log_ratio_min) and math.isinf(row.log_ratio_max))
    if row.ratio == "none" or (row.ratio == "token" and not has_limit):
        return Ratio(rl_lab.importance_ratio(l, l0), 1.0, False, False)
    log_ratio = l - l0
    if row.ratio == "sequence_mean_of_clipped":
        low, high = choose(advantages < 0, -row.clip_low, -INF, l.dtype), choose(advantages > 0, row.clip_high, INF, l.dtype)
        clipped = log_ratio.clamp(low, high)
        cut = clipped != log_ratio
        return Ratio(_exp(clipped.sum(dim=1, keepdim=True) / lengths), (~cut).to(l.dtype) / lengths, True, cut)
    share: Tensor | float = 1.0
    if row.ratio == "sequence_product":
        log_ratio = log_ratio.sum(dim=1, keepdim=True)
    elif row.ratio in ("sequence_mean", "sequence_mean_token"):
        log_ratio = log_ratio.sum(dim=1, keepdim=True) / lengths
        share = 1 / lengths if row.ratio == "sequence_mean" else 1.0
    cut = False
    if has_limit:
        limited = log_ratio.clamp(row.log_ratio_min, row.log_ratio_max)
        cut, log_ratio = limited != log_ratio, limited
        share = share * (~cut).to(l.dtype)
    return Ratio(_exp(log_ratio), share, row.ratio in ("sequence_mean", "sequence_product"), cut)


# ------------------------------------------------------------------------------------------ step 4: surrogate

# A surrogate takes the row, r, A and l, l0. It returns J and one slope: with respect to log r, or with respect to l where r
# is only a weight on the token. `effective` is what stands in for r; the clipped branch is where it is not r.


class Surrogate(NamedTuple):
    value: Tensor
    slope_log_ratio: Tensor | None = None
    slope_logp: Tensor | None = None
    effective: Tensor | None = None


def plain(row: Row, r: Tensor, A: Tensor, l: Tensor, l0: Tensor) -> Surrogate:
    """J = r A, dJ / d log r = r A; without a ratio J = A l, dJ / dl = A."""
    return Surrogate(A * l, slope_logp=A) if row.ratio == "none" else Surrogate(r * A, slope_log_ratio=r * A)


def bounded(r: Tensor, A: Tensor, top_if_positive: float, floor_if_negative: float, top_if_negative: float) -> Surrogate:
    """J = A b, b = r cut at a top where A > 0, at a floor and a top where A < 0; dJ / d log r = r A, 0 where cut.

    min(r A, clip(r) A) is that: with A > 0 only the top of the band can make it smaller, with A < 0 only the floor.
    """
    low = choose(A < 0, floor_if_negative, -INF, r.dtype)
    high = torch.where(A > 0, top_if_positive, choose(A < 0, top_if_negative, INF, r.dtype))
    b = r.clamp(low, high)
    value = A * b
    return Surrogate(value, slope_log_ratio=value.masked_fill(b != r, 0.0), effective=b)


def clip(row: Row, r: Tensor, A: Tensor, l: Tensor, l0: Tensor) -> Surrogate:
    """J = min(r A, clip(r, 1 - low, 1 + high) A)."""
    return bounded(r, A, 1 + row.clip_high, 1 - row.clip_low, INF)


def dual_clip(row: Row, r: Tensor, A: Tensor, l: Tensor, l0: Tensor) -> Surrogate:
    """J = max(min(r A, clip(r) A), c A) where A < 0: there r also stops at c."""
    return bounded(r, A, 1 + row.clip_high, 1 - row.clip_low, max(row.ratio_cap, 1 - row.clip_low))


def capped_clip(row: Row, r: Tensor, A: Tensor, l: Tensor, l0: Tensor) -> Surrogate:
    """J = min(min(r, c) A, clip(r) A): dual clip if c > 1 + high; a smaller c lowers the top of A > 0 instead."""
    return bounded(r, A, min(1 + row.clip_high, row.ratio_cap), 1 - row.clip_low, max(1 + row.clip_high, row.ratio_cap))


def cispo(row: Row, r: Tensor, A: Tensor, l: Tensor, l0: Tensor) -> Surrogate:
    """J = sg[w] A l, w = clip(r, 1 - low, 1 + high); dJ / dl = w A: cutting w never takes a gradient away."""
    w = r.clamp(1 - row.clip_low, 1 + row.clip_high)
    slope = w * A
    return Surrogate(slope * l, slope_logp=slope, effective=w)


def sapo(row: Row, r: Tensor, A: Tensor, l: Tensor, l0: Tensor) -> Surrogate:
    """J = (4 / tau) p A, p = sigmoid(tau (r - 1)); dJ / d log r = 4 p (1 - p) r A. tau by the sign of A; 0 is negative."""
    tau = choose(A > 0, row.tau_positive, row.tau_negative, r.dtype)
    p = torch.sigmoid(tau * (r - 1))
    value = p * (4 / tau * A)
    return Surrogate(value, slope_log_ratio=value * (1 - p) * r * tau)


def vespo(row: Row, r: Tensor, A: Tensor, l: Tensor, l0: Tensor) -> Surrogate:
    """J = sg[phi] A l, log phi = lam + k log w - lam w, w = exp(sum_t(l - l0)) with logs cut as its trainer cuts them."""
    k = choose(A >= 0, row.vespo_k_positive, row.vespo_k_negative, l.dtype)
    lam = choose(A >= 0, row.vespo_lam_positive, row.vespo_lam_negative, l.dtype)
    log_w = (l - l0).clamp(-20, 20).sum(dim=1, keepdim=True).clamp(math.log(1e-8), 20)
    slope = (lam + k * log_w - lam * log_w.exp()).exp() * A
    return Surrogate(slope * l, slope_logp=slope)


def dppo_tv(row: Row, r: Tensor, A: Tensor, l: Tensor, l0: Tensor) -> Surrogate:
    """J = sg[min(r, c)] A l; 0 where p - p0 > high (A > 0) or p0 - p > low (A <= 0), p = exp(l), p0 = exp(l0)."""
    moved = l.exp() - l0.exp()
    return _trusted(row, r, A, l, torch.where(A > 0, moved > row.clip_high, moved < -row.clip_low))


def dppo_kl(row: Row, r: Tensor, A: Tensor, l: Tensor, l0: Tensor) -> Surrogate:
    """As dppo_tv, with p0 log(p0 / p) + (1 - p0) log((1 - p0) / (1 - p)) in place of the distance."""
    p, p0 = l.exp(), l0.exp()
    distance = p0 * (l0 - l) + (1 - p0) * ((1 - p0 + 1e-8) / (1 - p + 1e-8)).log()
    beyond = torch.where(A > 0, (distance > row.clip_high) & (p > p0), (distance > row.clip_low) & (p < p0))
    return _trusted(row, r, A, l, beyond)


def _trusted(row: Row, r: Tensor, A: Tensor, l: Tensor, beyond: Tensor) -> Surrogate:
    w = torch.where(beyond, 0.0, r.clamp(max=row.ratio_cap))
    return Surrogate(w * A * l, slope_logp=w * A, effective=w)


SURROGATES = {
    "plain": plain,
    "clip": clip,
    "dual_clip": dual_clip,
    "capped_clip": capped_clip,
    "cispo": cispo,
    "sapo": sapo,
    "vespo": vespo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
}


# ------------------------------------------------------------------------------------------ step 5: KL


def kl_estimate(row: Row, logps: Tensor, anchor_logps: Tensor) -> tuple[Tensor, Tensor]:
    """Estimate of KL(policy || anchor) at each sampled token, and its slope d KL_t / d l_t. [...] -> [...], [...].

    d = l - lr. k1: d, slope 1. k2: d^2/2, slope d. k3: exp(-d) + d - 1, slope 1 - exp(-d). abs: |d|, slope sign(d).
    A limit cuts the value and its slope. kl_gradient "k2" keeps the value and takes slope d, which no limit cuts.
    """
    d = logps - anchor_logps
    limited = d if math.isinf(row.kl_log_limit) else d.clamp(-row.kl_log_limit, row.kl_log_limit)
    k1, k2, k3 = rl_lab.kl_estimates(limited, torch.zeros((), dtype=d.dtype).expand_as(d))
    if row.kl == "k1":
        value, slope = k1, torch.ones_like(d)
    elif row.kl == "k2":
        value, slope = k2, k1
    elif row.kl == "k3":
        value, slope = k3, k1 - k3  # 1 - exp(-d) = d - (exp(-d) + d - 1)
    else:
        value, slope = limited.abs(), limited.sign()
    if not math.isinf(row.kl_limit):
        slope = torch.where(value.abs() > row.kl_limit, 0.0, slope)
        value = value.clamp(-row.kl_limit, row.kl_limit)
    if limited is not d:
        slope = torch.where(limited != d, 0.0, slope)
    return value, d if row.kl_gradient == "k2" else slope


def exact_kl(batch: Batch, mask: Tensor) -> tuple[Tensor, Tensor]:
    """KL(policy || reference) at each counted prefix, and its slope d KL / d z_a = p_a (log p_a - log q_a - KL).

    -> (N, T), (N, T, V), 0 in unused slots. logits of unused slots are never read.
    """
    logits, reference = batch.logits[mask], batch.ref_logits[mask]
    kl = rl_lab.categorical_kl(logits, reference)
    logp = logits.log_softmax(dim=-1)
    p = logp.exp()
    gap = (logp - reference.log_softmax(dim=-1)).masked_fill(p == 0, 0.0)
    slope = p * (gap - kl.unsqueeze(-1))
    everywhere = torch.zeros_like(batch.logits)
    everywhere[mask] = slope
    return torch.zeros_like(batch.logps).masked_scatter(mask, kl), everywhere


# ------------------------------------------------------------------------------------------ step 6: reduction


def reduction_weights(row: Row, batch: Batch, reduction: str | None = None) -> Tensor:
    """Weight of a token of each answer, (N, 1): a reduced loss is sum(weight * mask * x). See CHOICES["reduction"].

    B is batch.window_rows if given, else the rows that row.rows_counted counts; Nw is batch.window_tokens if given, else
    the tokens of this batch. Every weight is divided by the accumulation steps where row.accumulation says so. Rows that a
    filter took out are in no count. Raises ValueError for sum_over_budget without a budget.
    """
    kept = kept_rows(row, batch)
    return _row_weights(row, batch, reduction or row.reduction, batch.lengths.unsqueeze(1) * kept.unsqueeze(1), kept)


def _row_weights(row: Row, batch: Batch, reduction: str, lengths: Tensor, kept: Tensor) -> Tensor:
    lengths = lengths.to(batch.logps.dtype)
    tokens = float(lengths.sum(dtype=torch.float64))
    rows = (
        float((kept if row.rows_counted == "all" else lengths > 0).sum()) if batch.window_rows is None else batch.window_rows
    )
    if reduction == "mean_per_response":
        # A row without tokens has no token to weigh; the floor only keeps its division finite.
        weights = 1 / (rows * (lengths + row.length_eps).clamp(min=row.length_eps or 1.0))
    else:
        denominator = {
            "mean_over_tokens": tokens,
            "mean_over_window": tokens if batch.window_tokens is None else batch.window_tokens,
            "sum_per_response": rows,
            "sum_over_budget": rows * (batch.budget or 0.0),
            "sum_over_width": rows * batch.mask.shape[1],
            "sum_over_tokens": 1.0,
        }[reduction]
        if reduction == "sum_over_budget" and batch.budget is None:
            raise ValueError(f"{row.name}: the batch has no budget, the C of reduction 'sum_over_budget'")
        if not denominator:
            raise ValueError(f"{row.name}: reduction {reduction!r} divides by 0: no row that is left has a counted token")
        weights = torch.full_like(lengths, 1 / denominator)
    return weights / _accumulation(row, batch)


def _accumulation(row: Row, batch: Batch) -> int:
    return batch.accumulation_steps if row.accumulation == "divide" else 1


# ------------------------------------------------------------------------------------------ step 7: critic


def value_loss_and_slope(row: Row, vpreds: Tensor, old_values: Tensor | None, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Squared error of the critic with its clip, and its slope with respect to vpreds. [...] -> [...], [...].

    square: (V - G)^2, slope 2 (V - G). With V' = V0 + clip(V - V0, -c, c): clip_max takes the larger of both squares and
    keeps the slope where the unclipped one is as large; clip_replace takes the square of V' and keeps the slope in the band.
    """
    error = vpreds - targets
    if row.value_loss == "square":
        return error.square(), 2 * error
    inside = (vpreds - old_values).abs() <= row.value_clip
    clipped_error = old_values + (vpreds - old_values).clamp(-row.value_clip, row.value_clip) - targets
    if row.value_loss == "clip_replace":
        return clipped_error.square(), torch.where(inside, 2 * clipped_error, 0.0)
    loss = rl_lab.clipped_value_loss(vpreds, old_values, targets, row.value_clip)
    return loss, torch.where(error.square() >= clipped_error.square(), 2 * error, 0.0)


# ------------------------------------------------------------------------------------------ the engine


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What evaluate returns. (N, T) unless stated, 0 in unused slots; nothing carries a graph.

    The losses and gradients are there at once; what explains them is computed when it is first read.

    Three fractions of the counted tokens, which are three different things: a ratio may be outside the band while the
    unclipped branch is chosen (r = 1.5, A = -1), the clipped branch may be chosen while the gradient stays (CISPO), and a
    gradient may be 0 without any clip (A = 0).
    """

    loss: Tensor  # () = policy_loss + kl_loss + value_loss + entropy_loss
    policy_loss: Tensor  # () sum(weights * token_losses)
    kl_loss: Tensor  # () coefficient and reduction included; 0 without the term, as the next two
    value_loss: Tensor  # ()
    entropy_loss: Tensor  # ()
    dloss_dlogps: Tensor  # gradient of `loss`, in closed form
    dloss_dvpreds: Tensor | None
    dloss_dentropies: Tensor | None
    dloss_dlogits: Tensor | None  # (N, T, V): the part of an exact KL, beside dloss_dlogps
    kl: Tensor | None  # KL_t before weight and coefficient; None without a KL term in the loss
    kept: Tensor  # (N,) bool: rows that the group filter left in the batch
    _row: Row
    _batch: Batch
    _advantages: Tensor  # this and the next three (N, T), or (N, 1) for one number an answer
    _ratio: Ratio
    _surrogate: Surrogate
    _policy_gradient: Tensor
    _row_weights: Tensor  # (N, 1)

    @cached_property
    def _mask(self) -> Tensor:
        return self._batch.mask & self.kept.unsqueeze(1)

    def _fraction(self, chosen: Tensor) -> float:
        return int(torch.count_nonzero(chosen & self._mask)) / int(torch.count_nonzero(self._mask))

    @cached_property
    def advantages(self) -> Tensor:
        return _used(self._advantages, self._batch.mask)

    @cached_property
    def ratios(self) -> Tensor:
        return _used(self._ratio.value, self._batch.mask)

    @cached_property
    def token_losses(self) -> Tensor:
        """-J."""
        return _used(-self._surrogate.value, self._mask)

    @cached_property
    def weights(self) -> Tensor:
        """What the reduction multiplies each token's loss by."""
        return self._mask * self._row_weights

    @cached_property
    def _branch(self) -> Tensor:
        clipped = torch.zeros((), dtype=torch.bool)
        if self._surrogate.effective is not None:
            clipped = self._surrogate.effective != self._ratio.value
        return (clipped | self._ratio.cut) & (self._advantages != 0) & self._mask

    @cached_property
    def flat(self) -> Tensor:
        """bool: tokens whose policy gradient the clip has removed."""
        return self._branch & (self._policy_gradient == 0)

    @cached_property
    def ratio_outside_fraction(self) -> float:
        """Ratio outside [1 - low, 1 + high], whatever A; 0 where the row has no band of ratios."""
        row, r = self._row, self._ratio.value
        if row.ratio == "sequence_mean_of_clipped":
            log_ratio = self._batch.logps - _old_logps(self._batch)
            return self._fraction((log_ratio < -row.clip_low) | (log_ratio > row.clip_high))
        if row.surrogate not in ("clip", "dual_clip", "capped_clip", "cispo"):
            return 0.0
        return self._fraction((r < 1 - row.clip_low) | (r > 1 + row.clip_high))

    @cached_property
    def clipped_branch_fraction(self) -> float:
        """The clipped branch was chosen: J is not the unclipped one."""
        return self._fraction(self._branch)

    @cached_property
    def zero_gradient_fraction(self) -> float:
        """The policy term's gradient is exactly 0, for whatever reason."""
        return self._fraction(self._policy_gradient == 0)

    @cached_property
    def kl_mean(self) -> float | None:
        """Mean of `kl` over counted tokens."""
        return None if self.kl is None else self.kl.sum().item() / int(torch.count_nonzero(self._mask))


@torch.no_grad()
def evaluate(row: Row, batch: Batch) -> Evaluation:
    """One objective on one batch: loss, closed-form gradient, and what happened on the way.

    loss = -sum_t w_t J_t + kl_coef * sum_t u_t k_t (+ critic, - entropy), w and u the weights of the reductions,
    d loss / d l_t = -(d log r / d l_t) * w_t dJ_t / d log r - w_t dJ_t / dl + kl_coef * u_t dk_t / dl_t,
    a ratio of the whole answer passing the sum over its tokens to each of them.

    Gradient: none; `dloss_dlogps` is the gradient, see loss_to_backpropagate. Advantages, old and reference
    log-probabilities are constants. Raises ValueError as compute_advantages, or if the batch lacks an array the row reads.
    """
    kept = kept_rows(row, batch)
    mask = batch.mask if row.group_filter == "none" else batch.mask & kept.unsqueeze(1)
    l, l0 = batch.logps, _old_logps(batch)
    used = mask.to(l.dtype)
    lengths = used.sum(dim=1, keepdim=True)
    advantages, targets = _advantages(row, batch, mask)

    ratio = compute_ratio(row, l, l0, lengths, advantages)
    J = SURROGATES[row.surrogate](row, ratio.value, advantages, l, l0)
    if row.off_policy_rows == "drop":
        lag = (l0 - l).sum(dim=1, keepdim=True) / lengths.clamp(min=1)
        dropped = (advantages < 0) & (lag > row.off_policy_threshold)
        J = Surrogate(*(part if part is None or part is J.effective else torch.where(dropped, 0.0, part) for part in J))

    of_row = _row_weights(row, batch, row.reduction, lengths, kept)
    weighing = Weighing(used, lengths, -of_row)
    policy_loss = weighing.total(J.value)
    gradient = weighing.of_tokens(J.slope_logp) if J.slope_log_ratio is None else weighing.through(ratio, J.slope_log_ratio)
    policy_gradient = gradient

    kl = dloss_dlogits = None
    kl_loss = value_loss = entropy_loss = torch.zeros((), dtype=l.dtype)
    if row.kl_in_loss:
        slope_of_logits = None
        if row.kl == "exact":
            _required(row, batch, "logits"), _required(row, batch, "ref_logits")
            kl, slope_of_logits = exact_kl(batch, mask)
            slope = torch.zeros_like(kl)
        else:
            kl, slope = kl_estimate(row, l, l0 if row.kl_anchor == "old" else _required(row, batch, "ref_logps"))
        reduction = row.reduction if row.kl_reduction == "same" else row.kl_reduction
        weighing_kl = Weighing(used, lengths, row.kl_coef * _row_weights(row, batch, reduction, lengths, kept))
        r = ratio.value if row.kl_weight == "ratio" else 1.0
        kl_loss = weighing_kl.total(r * kl)
        gradient = gradient + weighing_kl.of_tokens(r * slope)
        if row.kl_weight == "ratio":  # d (r k) = r dk + k r d log r
            gradient = gradient + weighing_kl.through(ratio, r * kl)
        if slope_of_logits is not None:
            dloss_dlogits = weighing_kl.of_tokens(r * torch.ones_like(kl)).unsqueeze(2) * slope_of_logits
        kl = kl * used

    dloss_dvpreds = dloss_dentropies = None
    if row.value_loss != "none" and row.value_coef:
        targets = batch.returns if batch.returns is not None else targets
        if targets is None:
            raise ValueError(f"{row.name}: the critic has no target: the batch has neither returns nor values")
        old_values = None if row.value_loss == "square" else _required(row, batch, "values")
        errors, slope = value_loss_and_slope(row, _required(row, batch, "vpreds"), old_values, targets)
        weighing_values = Weighing(used, lengths, row.value_coef * of_row)
        value_loss, dloss_dvpreds = weighing_values.total(errors), weighing_values.of_tokens(slope)
    if row.entropy_coef:
        share = torch.full_like(lengths, -row.entropy_coef / (float(lengths.sum()) * _accumulation(row, batch)))
        weighing_entropies = Weighing(used, lengths, share)
        entropy_loss = weighing_entropies.total(_required(row, batch, "entropies"))
        dloss_dentropies = weighing_entropies.weights

    return Evaluation(
        loss=policy_loss + kl_loss + value_loss + entropy_loss,
        policy_loss=policy_loss,
        kl_loss=kl_loss,
        value_loss=value_loss,
        entropy_loss=entropy_loss,
        dloss_dlogps=gradient,
        dloss_dvpreds=dloss_dvpreds,
        dloss_dentropies=dloss_dentropies,
        dloss_dlogits=dloss_dlogits,
        kl=kl,
        kept=kept,
        _row=row,
        _batch=batch,
        _advantages=advantages,
        _ratio=ratio,
        _surrogate=J,
        _policy_gradient=policy_gradient,
        _row_weights=of_row,
    )


class Weighing:
    """The sum over counted tokens of weight * x, and its gradients. x is (N, T), or (N, 1) of whole answers."""

    def __init__(self, used: Tensor, lengths: Tensor, of_row: Tensor):
        self.used, self.of_row, self.whole = used, of_row, of_row * lengths

    @cached_property
    def weights(self) -> Tensor:
        return self.used * self.of_row

    def of_tokens(self, slope: Tensor) -> Tensor:
        """weight * slope at every token."""
        return self.used * (self.of_row * slope) if slope.shape[1] == 1 else self.weights * slope

    def total(self, x: Tensor) -> Tensor:
        """sum(weight * x); what an answer's tokens share meets the sum of their weights."""
        return (self.whole * x).sum() if x.shape[1] == 1 else (self.weights * x).sum()

    def through(self, ratio: Ratio, slope: Tensor) -> Tensor:
        """The gradient at every token's log-probability where dx / d log r = slope."""
        if not ratio.of_answer:
            return self.of_tokens(slope if isinstance(ratio.share, float) else slope * ratio.share)
        of_answer = self.whole * slope if slope.shape[1] == 1 else (self.weights * slope).sum(dim=1, keepdim=True)
        return self.used * (of_answer * ratio.share)


def _used(values: Tensor, mask: Tensor) -> Tensor:
    """(N, 1) or (N, T) -> (N, T) with 0 in unused slots."""
    return values.expand_as(mask).masked_fill(~mask, 0.0)


def loss_to_backpropagate(
    result: Evaluation | PreferenceEvaluation,
    logps: Tensor,
    *,
    vpreds: Tensor | None = None,
    entropies: Tensor | None = None,
    logits: Tensor | None = None,
) -> Tensor:
    """A scalar whose value is result.loss and whose gradient is the closed form: the row as a loss in a training loop.

    value + sum(dloss_dlogps * (logps - sg[logps])), and the same for vpreds, entropies and logits where the row has a
    critic, an entropy term or an exact KL. Each tensor is the one the batch was made from, with its graph; what it holds in
    unused slots is not read.

    Gradient: to the tensors given. Raises ValueError if one that the row differentiates is missing, or for a wrong shape.
    """
    total = result.loss
    for name, given in (("logps", logps), ("vpreds", vpreds), ("entropies", entropies), ("logits", logits)):
        slope = getattr(result, f"dloss_d{name}", None)
        if slope is None:
            continue
        if given is None:
            raise ValueError(f"loss_to_backpropagate: {name} is missing, and this row has a gradient for it")
        if given.shape != slope.shape and (*given.shape, 1) != slope.shape:  # (N,) for (N, 1): answers of one token
            raise ValueError(f"{name}: got shape {tuple(given.shape)}, wanted {tuple(slope.shape)}")
        live = torch.where(slope != 0, given.reshape(slope.shape), 0.0)
        total = total + (slope.to(live.dtype) * (live - live.detach())).sum()
    return total


# ------------------------------------------------------------------------------------------ preference losses

# fmt: off
PREFERENCE_CHOICES: dict[str, dict[str, str]] = {
    "loss": {
        "sigmoid": "-log sigmoid(beta D)",
        "cdpo": "-(1 - e) log sigmoid(beta D) - e log sigmoid(-beta D)",
        "robust": "(-(1 - e) log sigmoid(beta D) + e log sigmoid(-beta D)) / (1 - 2 e)",
        "ipo": "(D - 1 / (2 beta))^2",
        "hinge": "max(0, 1 - beta D)",
        "exo": "KL(Bernoulli(sigmoid(beta D)) || Bernoulli(1 - e))",
        "sppo_hard": "(u - 1 / (2 beta))^2 + (v + 1 / (2 beta))^2",
        "bco": "-log sigmoid(beta u) - log sigmoid(-beta v)",
        "aot": "cdpo on D = sorted policy gaps - sorted reference gaps",
        "aot_unpaired": "cdpo on D = sorted u - sorted v",
        "simpo": "-log sigmoid(beta D - gamma)",
        "orpo": "-beta log sigmoid(odds(u) - odds(v)), odds(s) = s - log(1 - exp(s))",
        "kto": "weight (1 - sigmoid(+-beta (u - z0))), z0 = max(0, mean of mismatched u) without gradient",
    },
    "score": {
        "sum": "score of an answer: sum over its tokens",
        "mean": "score of an answer: mean over its tokens",
    },
    "reference": {
        "used": "u, v = score under the policy - score under the reference",
        "unused": "u, v = score under the policy",
    },
    "divergence": {
        "reverse_kl": "u stays",
        "forward_kl": "1 - exp(-u)",
        "js": "log 2 + log sigmoid(u)",
    },
}
# fmt: on


@dataclass(frozen=True)
class PreferenceRow:
    """One preference loss, a mean over pairs: u is the score of the chosen answer, v of the rejected one, D = u - v.

    Raises ValueError for a name outside PREFERENCE_CHOICES, a number out of range, or choices that exclude each other.
    """

    name: str
    source: str = ""
    differs: str = ""
    loss: str = "sigmoid"
    score: str = "sum"
    reference: str = "used"
    divergence: str = "reverse_kl"
    beta: float = 0.1
    label_smoothing: float = 0.0  # e
    gamma: float = 0.0  # SimPO's target margin
    sft_coef: float = 0.0  # + sft_coef * mean over the chosen tokens of -l
    tail_weight: float = 1.0  # weight of tokens beyond the shorter length of a pair
    desirable_weight: float = 1.0  # KTO
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        for field, allowed in PREFERENCE_CHOICES.items():
            if getattr(self, field) not in allowed:
                raise ValueError(f"{self.name}, {field}: got {getattr(self, field)!r}, wanted one of {', '.join(allowed)}")
        for field, low in _PREFERENCE_LOWEST.items():
            value = getattr(self, field)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not low <= value < INF or (field == "beta" and not value):
                wanted = "above 0" if field == "beta" else f"of at least {low:g}"
                raise ValueError(f"{self.name}, {field}: got {value!r}, wanted a finite number {wanted}")
        most = 0.5 if self.loss == "robust" else 1.0
        if not 0 <= self.label_smoothing < most:
            raise ValueError(
                f"{self.name}, label_smoothing: got {self.label_smoothing!r}, wanted at least 0 and below {most}"
            )
        if self.loss == "exo" and self.label_smoothing == 0:
            raise ValueError(f"{self.name}, label_smoothing: got 0, wanted above 0: exo takes its logarithm")
        maps = self.divergence != "reverse_kl"
        for excluded, reason in (
            (self.loss == "aot" and maps, "aot sorts gaps, not scores: divergence reverse_kl"),
            (self.loss == "kto" and (maps or self.sft_coef or self.tail_weight != 1), "kto has no pairs: no divergence, "
             "sft_coef or tail_weight"),
            (self.loss == "orpo" and (maps or self.reference == "used"), "orpo takes odds, which need reference unused"),
        ):  # fmt: skip
            if excluded:
                raise ValueError(f"{self.name}: {reason}")

    @property
    def needs(self) -> tuple[str, ...]:
        """What the data must hold: paired or labelled answers, a reference, mismatched answers."""
        if self.loss == "kto":
            return ("labels", "ref_logps", "kl_seq_logps", "ref_kl_seq_logps")
        return ("pairs", "ref_logps") if self.reference == "used" else ("pairs",)


_PREFERENCE_LOWEST = {
    "beta": 0.0,
    "label_smoothing": 0.0,
    "gamma": -1e308,
    "sft_coef": 0.0,
    "tail_weight": 0.0,
    "desirable_weight": 0.0,
    "undesirable_weight": 0.0,
}


@dataclass(frozen=True, eq=False)
class Preferences:
    """Token log-probabilities of answers that were compared or labelled. Build it with make_preferences."""

    logps: Tensor  # (2P, T): P chosen answers, then their P rejected ones; KTO (N, T)
    mask: Tensor  # the same shape, bool
    are_pairs: bool  # False: labelled answers that belong to no pair
    ref_logps: Tensor | None = None
    labels: Tensor | None = None  # (N,) bool: desirable; KTO
    kl_seq_logps: Tensor | None = None  # (N,) policy's log-probability of mismatched answers; KTO
    ref_kl_seq_logps: Tensor | None = None  # (N,) the reference's


def make_preferences(
    *,
    logps=None,
    mask=None,
    ref_logps=None,
    labels=None,
    kl_seq_logps=None,
    ref_kl_seq_logps=None,
    chosen_logps=None,
    rejected_logps=None,
    ref_chosen_logps=None,
    ref_rejected_logps=None,
    dtype: torch.dtype | None = None,
) -> Preferences:
    """Check preference data: token arrays (2P, T), chosen first; or one number an answer, chosen_logps (P,) and so on.

    With whole-answer numbers every answer counts as one token, so per-token means need the token arrays.
    Raises TypeError and ValueError as make_batch, for a side without the other, and for an odd number of rows without
    labels.
    """
    pairs = _both_sides("chosen_logps", chosen_logps, "rejected_logps", rejected_logps)
    ref_pairs = _both_sides("ref_chosen_logps", ref_chosen_logps, "ref_rejected_logps", ref_rejected_logps)
    for name, whole, sides in (("logps", logps, pairs), ("ref_logps", ref_logps, ref_pairs)):
        if whole is not None and sides is not None:
            raise ValueError(f"{name}: given both as one array and as chosen and rejected; wanted one of the two")
    logps, ref_logps = (whole if sides is None else sides for whole, sides in ((logps, pairs), (ref_logps, ref_pairs)))
    if logps is None:
        raise ValueError("logps: missing; wanted logps with mask, or chosen_logps and rejected_logps")
    made = make_batch(logps=logps, mask=mask, ref_logps=ref_logps, dtype=dtype)
    rows = len(made.logps)
    if labels is None and rows % 2:
        raise ValueError(f"logps: got {rows} rows, wanted an even number: the chosen answers, then the rejected ones")
    per_row = {}
    for name, value in (("kl_seq_logps", kl_seq_logps), ("ref_kl_seq_logps", ref_kl_seq_logps)):
        if value is not None:
            per_row[name] = _shaped(name, _floating(name, value, made.logps.dtype), (rows,), "one number a row")
            if not per_row[name].isfinite().all():
                raise ValueError(f"{name}: row {int((~per_row[name].isfinite()).nonzero()[0])} is not finite")
    if labels is not None:
        per_row["labels"] = _shaped("labels", _boolean("labels", labels), (rows,), "True where the answer is desirable")
    return Preferences(made.logps, made.mask, labels is None, made.ref_logps, **per_row)


def _both_sides(chosen_name: str, chosen, rejected_name: str, rejected) -> Tensor | None:
    """Chosen and rejected answers below each other, or None where neither is given."""
    if chosen is None and rejected is None:
        return None
    for name, side, other in ((chosen_name, chosen, rejected_name), (rejected_name, rejected, chosen_name)):
        if side is None:
            raise ValueError(f"{name}: missing; wanted beside {other}")
    chosen, rejected = torch.as_tensor(chosen), torch.as_tensor(rejected)
    if chosen.shape != rejected.shape:
        got, wanted = tuple(rejected.shape), tuple(chosen.shape)
        raise ValueError(f"{rejected_name}: got shape {got}, wanted {wanted}, as {chosen_name} has")
    return torch.cat([chosen, rejected])


@dataclass(frozen=True, eq=False)
class PreferenceEvaluation:
    """What evaluate_preference returns; nothing carries a graph."""

    loss: Tensor  # ()
    losses: Tensor  # (P,) per pair, KTO (N,) per answer; without the SFT term
    margins: Tensor  # (P,) D; KTO (N,) u - z0
    dloss_dlogps: Tensor  # shape of logps, 0 in unused slots
    dloss_dscores: Tensor  # (2P,) or (N,): gradient with respect to each answer's score, without the SFT term


@torch.no_grad()
def evaluate_preference(row: PreferenceRow, data: Preferences) -> PreferenceEvaluation:
    """One preference loss and its closed-form gradient with respect to every token's log-probability.

    loss = mean over pairs of f(u, v) + sft_coef * token mean of -l over chosen answers;
    d loss / d l_t = (1/P) df/du * h'(u) * (weight of the token in the score), h the divergence's map.
    loss_to_backpropagate takes the result too. Raises ValueError if the data lack what the row needs.
    """
    for name in row.needs:
        present = data.are_pairs if name == "pairs" else getattr(data, name) is not None
        if not present:
            raise ValueError(f"{row.name}: the data have no {name}; this row needs {', '.join(row.needs)}")
    mask = data.mask
    lengths = mask.sum(dim=1, keepdim=True)
    token_weight = mask.to(data.logps.dtype)
    if row.tail_weight != 1:
        shorter = torch.minimum(*lengths.chunk(2)).repeat(2, 1)
        token_weight = torch.where(mask.cumsum(dim=1) > shorter, row.tail_weight * token_weight, token_weight)
    if row.score == "mean":
        token_weight = token_weight / lengths
    score = (data.logps * token_weight).sum(dim=1)
    if row.reference == "used":
        reference = (data.ref_logps * token_weight).sum(dim=1)
    else:
        reference = torch.zeros_like(score)

    if row.loss == "kto":
        losses, slope, margins = kto(row, score - reference, data)
        slope = slope / len(losses)
    else:
        mapped, mapped_slope = _divergence(row, score - reference)
        if row.loss == "aot":
            losses, slope_u, slope_v, margins = aot(row, score.chunk(2), reference.chunk(2))
        else:
            losses, slope_u, slope_v, margins = PREFERENCE_LOSSES[row.loss](row, *mapped.chunk(2))
        slope = torch.cat([slope_u, slope_v]) * mapped_slope / len(losses)
    loss = losses.mean()
    gradient = slope.unsqueeze(1) * token_weight
    if row.sft_coef:
        chosen = mask.clone()
        chosen[len(chosen) // 2 :] = False
        loss = loss - row.sft_coef * data.logps[chosen].mean()
        gradient = gradient - row.sft_coef * chosen.to(gradient.dtype) / chosen.sum()
    return PreferenceEvaluation(loss, losses, margins, gradient, slope)


def _divergence(row: PreferenceRow, u: Tensor) -> tuple[Tensor, Tensor]:
    """h(u) and h'(u): the score map of an f-divergence, h(log t) = f'(t) up to a constant."""
    if row.divergence == "forward_kl":
        return 1 - torch.exp(-u), torch.exp(-u)
    if row.divergence == "js":
        return math.log(2) + F.logsigmoid(u), torch.sigmoid(-u)
    return u, torch.ones_like(u)


# Each takes the row, u and v (P,), and returns the losses with their slopes in u and v, and the margin D.


def _of_margin(losses: Tensor, slope: Tensor, margin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return losses, slope, -slope, margin


def sigmoid_loss(row: PreferenceRow, u: Tensor, v: Tensor):
    """-log sigmoid(beta D), slope in D: -beta sigmoid(-beta D)."""
    nothing = torch.zeros_like(u)
    losses = rl_lab.dpo_loss(u, v, nothing, nothing, row.beta)
    return _of_margin(losses, -row.beta * torch.sigmoid(-row.beta * (u - v)), u - v)


def smoothed_loss(row: PreferenceRow, u: Tensor, v: Tensor):
    """-(1 - e) log sigmoid(beta D) - e log sigmoid(-beta D), slope in D: beta (sigmoid(beta D) - (1 - e))."""
    return _smoothed(row, u - v)


def _smoothed(row: PreferenceRow, margin: Tensor):
    e, z = row.label_smoothing, row.beta * margin
    losses = -(1 - e) * F.logsigmoid(z) - e * F.logsigmoid(-z)
    return _of_margin(losses, row.beta * (torch.sigmoid(z) - (1 - e)), margin)


def robust_loss(row: PreferenceRow, u: Tensor, v: Tensor):
    """(-(1 - e) log s(z) + e log s(-z)) / (1 - 2 e), z = beta D; slope -beta ((1 - e) s(-z) + e s(z)) / (1 - 2 e)."""
    e, z = row.label_smoothing, row.beta * (u - v)
    losses = (-(1 - e) * F.logsigmoid(z) + e * F.logsigmoid(-z)) / (1 - 2 * e)
    slope = -row.beta * ((1 - e) * torch.sigmoid(-z) + e * torch.sigmoid(z)) / (1 - 2 * e)
    return _of_margin(losses, slope, u - v)


def ipo_loss(row: PreferenceRow, u: Tensor, v: Tensor):
    """(D - 1 / (2 beta))^2: a regression of the margin to a finite target, not DPO with a penalty."""
    error = u - v - 1 / (2 * row.beta)
    return _of_margin(error.square(), 2 * error, u - v)


def hinge_loss(row: PreferenceRow, u: Tensor, v: Tensor):
    """max(0, 1 - beta D), slope -beta below the hinge and 0 above."""
    gap = 1 - row.beta * (u - v)
    return _of_margin(gap.clamp(min=0), choose(gap > 0, -row.beta, 0.0, u.dtype), u - v)


def exo_loss(row: PreferenceRow, u: Tensor, v: Tensor):
    """KL(q || 1 - e), q = sigmoid(beta D); slope beta q (1 - q) (log(q / (1 - e)) - log((1 - q) / e))."""
    e, z = row.label_smoothing, row.beta * (u - v)
    q = torch.sigmoid(z)
    win, lose = F.logsigmoid(z) - math.log1p(-e), F.logsigmoid(-z) - math.log(e)
    return _of_margin(q * win + (1 - q) * lose, row.beta * q * (1 - q) * (win - lose), u - v)


def sppo_hard_loss(row: PreferenceRow, u: Tensor, v: Tensor):
    """(u - 1 / (2 beta))^2 + (v + 1 / (2 beta))^2: both answers move to a fixed score."""
    win, lose = u - 0.5 / row.beta, v + 0.5 / row.beta
    return win.square() + lose.square(), 2 * win, 2 * lose, u - v


def bco_loss(row: PreferenceRow, u: Tensor, v: Tensor):
    """-log sigmoid(beta u) - log sigmoid(-beta v): two classifications instead of a comparison."""
    losses = -F.logsigmoid(row.beta * u) - F.logsigmoid(-row.beta * v)
    return losses, -row.beta * torch.sigmoid(-row.beta * u), row.beta * torch.sigmoid(row.beta * v), u - v


def simpo_loss(row: PreferenceRow, u: Tensor, v: Tensor):
    """-log sigmoid(beta D - gamma), slope in D: -beta sigmoid(gamma - beta D)."""
    z = row.beta * (u - v) - row.gamma
    return _of_margin(-F.logsigmoid(z), -row.beta * torch.sigmoid(-z), u - v)


def orpo_loss(row: PreferenceRow, u: Tensor, v: Tensor):
    """-beta log sigmoid(O), O = odds(u) - odds(v), odds(s) = s - log(1 - e^s), d odds / ds = 1 / (1 - e^s)."""
    odds = u - torch.log(-torch.expm1(u)) - (v - torch.log(-torch.expm1(v)))
    slope = -row.beta * torch.sigmoid(-odds)
    return -row.beta * F.logsigmoid(odds), slope / -torch.expm1(u), -slope / -torch.expm1(v), odds


def aot(row: PreferenceRow, policy: tuple[Tensor, Tensor], reference: tuple[Tensor, Tensor]):
    """Smoothed DPO on D_(k) = k-th smallest policy gap - k-th smallest reference gap; slopes return to the pairs by rank."""
    gaps, order = torch.sort(policy[0] - policy[1])
    losses, slope, _, margin = _smoothed(row, gaps - torch.sort(reference[0] - reference[1]).values)
    per_pair = torch.zeros_like(slope).scatter(0, order, slope)
    return losses, per_pair, -per_pair, margin


def aot_unpaired_loss(row: PreferenceRow, u: Tensor, v: Tensor):
    """Smoothed DPO on D_(k) = k-th smallest u - k-th smallest v."""
    (sorted_u, order_u), (sorted_v, order_v) = torch.sort(u), torch.sort(v)
    losses, slope, _, margin = _smoothed(row, sorted_u - sorted_v)
    nothing = torch.zeros_like(slope)
    return losses, nothing.scatter(0, order_u, slope), -nothing.scatter(0, order_v, slope), margin


def kto(row: PreferenceRow, u: Tensor, data: Preferences) -> tuple[Tensor, Tensor, Tensor]:
    """weight (1 - sigmoid(s beta (u - z0))), s = +1 desirable and -1 not; slope -s weight beta p (1 - p).

    z0 = max(0, mean of the mismatched answers' u) estimates a KL and carries no gradient. (N,) each.
    """
    z0 = (data.kl_seq_logps - data.ref_kl_seq_logps).mean().clamp(min=0)
    sign = choose(data.labels, 1.0, -1.0, u.dtype)
    weight = choose(data.labels, row.desirable_weight, row.undesirable_weight, u.dtype)
    p = torch.sigmoid(sign * row.beta * (u - z0))
    return weight * (1 - p), -sign * weight * row.beta * p * (1 - p), u - z0


PREFERENCE_LOSSES = {
    "sigmoid": sigmoid_loss,
    "cdpo": smoothed_loss,
    "robust": robust_loss,
    "ipo": ipo_loss,
    "hinge": hinge_loss,
    "exo": exo_loss,
    "sppo_hard": sppo_hard_loss,
    "bco": bco_loss,
    "aot_unpaired": aot_unpaired_loss,
    "simpo": simpo_loss,
    "orpo": orpo_loss,
}


# ------------------------------------------------------------------------------------------ the named rows

# A constant that the source leaves open is chosen here and said so in `differs`. Rows named name@program are what that
# program computes under the name, with its defaults.

TRL = "TRL 1.16.0, GRPOTrainer"
VERL = "verl 0.9.1, core_algos"


def _table(*rows: Row | PreferenceRow) -> dict:
    return {row.name: row for row in rows}


# fmt: off
_PPO = Row("ppo", "Schulman et al. 2017, arXiv 1707.06347, equations 7 and 9; GAE: arXiv 1506.02438",
    "the paper tunes the weight of the critic, 0.5 here, and has an entropy term; gamma is 1 here",
    baseline="gae", reduction="mean_over_tokens", value_loss="square", value_coef=0.5)
_GRPO = Row("grpo", "Shao et al. 2024 (DeepSeekMath), arXiv 2402.03300, section 4.1",
    "the paper leaves the divisor of std and its guard open; population std and 1e-8 are this lab's",
    scale="group_std", kl="k3", kl_coef=0.04)
_REINFORCE = Row("reinforce", "Williams 1992; Sutton et al. 1999",
    "answers without a baseline: every answer with R > 0 is pushed up",
    baseline="none", ratio="none", surrogate="plain", reduction="sum_per_response")

PAPER_ROWS = _table(
    _REINFORCE,
    replace(_REINFORCE, name="rloo", source="Ahmadian et al. 2024, arXiv 2402.14740, sections 2.2 and 2.3",
        differs="from reinforce: the mean of the other answers as baseline; the paper tunes the KL coefficient, 0.05 is"
                " TRL's",
        baseline="leave_one_out", kl="k1", kl_coef=0.05, kl_place="reward"),
    replace(_REINFORCE, name="remax", source="Li et al. 2023, arXiv 2310.10505",
        differs="from reinforce: the reward of the greedy answer as baseline, reward to go",
        baseline="greedy", credit="reward_to_go"),
    _PPO,
    replace(_PPO, name="dual_clip", source="Ye et al. 2019, arXiv 1912.09729, section 3",
        differs="from ppo: with A < 0 the ratio also stops at c = 3",
        surrogate="dual_clip"),
    _GRPO,
    replace(_GRPO, name="grpo@lab", source="the guide's token check: token_objectives.py",
        differs="from grpo: exact KL per prefix with coefficient 0.02 instead of the sampled k3",
        kl="exact", kl_coef=0.02),
    replace(_GRPO, name="dr_grpo", source="Liu et al. 2025, arXiv 2503.20783, section 3.2",
        differs="from grpo: no division by std, no division by length, no KL; trainers divide by a constant budget "
                "besides",
        scale="none", kl="none", kl_coef=0.0, reduction="sum_per_response"),
    replace(_GRPO, name="dapo", source="Yu et al. 2025, arXiv 2503.14476, section 3",
        differs="from grpo: higher upper clip, token mean, groups without spread leave, soft length penalty, no KL",
        group_filter="spread", overlong="soft", clip_high=0.28, kl="none", kl_coef=0.0, reduction="mean_over_tokens"),
    replace(_GRPO, name="bnpo", source="the loss that TRL calls bnpo",
        differs="from grpo: mean over the tokens of the micro-batch, no KL; so the loss depends on how a batch is split",
        kl="none", kl_coef=0.0, reduction="mean_over_tokens"),
    replace(_GRPO, name="gspo", source="Zheng et al. 2025, arXiv 2507.18071, equations 5 to 7",
        differs="from grpo: one ratio per answer, the geometric mean, in a band a thousand times narrower; no KL",
        ratio="sequence_mean", clip_low=3e-4, clip_high=4e-4, kl="none", kl_coef=0.0),
    replace(_GRPO, name="gspo_token", source="Zheng et al. 2025, arXiv 2507.18071, section on GSPO-token",
        differs="from gspo: the gradient runs through each token's own log-probability; the same while A is one per "
                "answer",
        ratio="sequence_mean_token", clip_low=3e-4, clip_high=4e-4, kl="none", kl_coef=0.0),
    replace(_GRPO, name="cispo", source="MiniMax-M1 2025, arXiv 2506.13585, section 3",
        differs="from grpo: the clipped ratio is a constant weight on A l, so no token loses its gradient; token mean. "
                "The lower bound is off, as in the paper's runs; the upper one, 1 + high, is tuned there and 5 here",
        surrogate="cispo", clip_low=1.0, clip_high=4.0, kl="none", kl_coef=0.0, reduction="mean_over_tokens"),
    replace(_GRPO, name="sapo", source="Gao et al. 2025, arXiv 2511.20347",
        differs="from grpo: a sigmoid gate instead of the clip; the gradient fades and never stops. Its value at r = 1 "
                "is 2 A / tau, so centred advantages do not give loss 0",
        surrogate="sapo", kl="none", kl_coef=0.0),
    Row("reinforce_pp", "Hu 2025, arXiv 2501.03262, first version, section 3",
        "the paper tunes the KL coefficient, 0.01 here, and leaves the std open: population std over tokens + 1e-8 here; no "
        "trained baseline, and no promise of an unbiased gradient",
        baseline="none", credit="reward_to_go", scale="token_std", kl="k1", kl_coef=0.01, kl_place="reward",
        reduction="mean_over_tokens"),
    Row("reinforce_pp_baseline", "Hu et al. 2025, arXiv 2501.03262, version 9, section 3.2",
        "from reinforce_pp: group mean first, then the batch's mean and std over answers; KL as a loss of its own (k2)."
        " The coefficient is tuned there, 0.01 here; population std + 1e-8 is this lab's",
        scale="batch_std", kl="k2", kl_coef=0.01, reduction="mean_over_tokens"),
)

_TRL_GRPO = Row("grpo@trl-1.16.0", TRL + '(loss_type="grpo"); not its default loss, which is dapo',
    "from the paper: sample std + 1e-4, no KL unless beta is set, and then k3 times the ratio",
    scale="group_std", std_ddof=1, std_eps=1e-4, missing_reward="exclude", singleton="zero", kl="k3", kl_weight="ratio",
    accumulation="divide")
_TRL_WINDOW = replace(_TRL_GRPO, reduction="mean_over_window", accumulation="none")

TRL_ROWS = _table(
    _TRL_GRPO,
    replace(_TRL_WINDOW, name="dapo@trl-1.16.0", source=TRL + "(): the default",
        differs="from the paper: only the denominator is DAPO's; upper clip 0.2, no group filter, no length penalty. "
                "The window is the generation batch's tokens, scaled to one optimiser step by counts of rows"),
    replace(_TRL_GRPO, name="bnpo@trl-1.16.0", source=TRL + '(loss_type="bnpo")',
        differs="from dapo@trl-1.16.0: the micro-batch's own tokens, then / accumulation steps",
        reduction="mean_over_tokens"),
    replace(_TRL_GRPO, name="dr_grpo@trl-1.16.0", source=TRL + '(loss_type="dr_grpo", scale_rewards="none")',
        differs="from the paper: / (rows * max_completion_length); without scale_rewards set, the division by std stays",
        scale="none", reduction="sum_over_budget"),
    replace(_TRL_GRPO, name="gspo@trl-1.16.0", source=TRL + '(loss_type="grpo", importance_sampling_level="sequence")',
        differs="from the paper: epsilon stays 0.2 unless set, sample std + 1e-4",
        ratio="sequence_mean"),
    replace(_TRL_WINDOW, name="cispo@trl-1.16.0", source=TRL + '(loss_type="cispo")',
        differs="from the paper: the weight is min(r, epsilon_high), without 1 +, so 1 + clip_high is epsilon_high. "
                "Left at the default 0.2 every on-policy weight is 0.2 instead of 1; 5.0 is what is meant",
        surrogate="cispo", clip_low=INF, clip_high=-0.8),
    replace(_TRL_GRPO, name="sapo@trl-1.16.0", source=TRL + '(loss_type="sapo")',
        differs="from the paper: sample std + 1e-4; A = 0 counts as negative",
        surrogate="sapo"),
    replace(_TRL_GRPO, name="luspo@trl-1.16.0", source=TRL + '(loss_type="luspo", importance_sampling_level="sequence")',
        differs="from gspo@trl-1.16.0: the sum over an answer's tokens, so an answer weighs T_i times as much",
        ratio="sequence_mean", reduction="sum_per_response"),
    replace(_TRL_WINDOW, name="vespo@trl-1.16.0", source=TRL + '(loss_type="vespo")',
        differs="a smooth weight of the whole answer's ratio on A l",
        surrogate="vespo"),
    replace(_TRL_GRPO, name="gdpo@trl-1.16.0",
        source=TRL + '(multi_objective_aggregation="normalize_then_sum", loss_type="dapo")',
        differs="from dapo@trl-1.16.0: each reward function is normalised in its group, the weighted sum over the batch",
        reward_parts="normalise_then_sum", baseline="none", scale="batch_std", reduction="mean_over_window",
        accumulation="none"),
    Row("rloo@trl-1.16.0", "TRL 1.16.0, RLOOTrainer()",
        "from the paper: the ratio of whole answers, clipped; the loss returned for a micro-batch is not divided by the"
        " accumulation steps, its backward is",
        baseline="leave_one_out", missing_reward="exclude", singleton="zero", ratio="sequence_product", kl="k1",
        kl_coef=0.05, kl_place="reward"),
)

_VERL_GRPO = Row("grpo@verl-0.9.1", VERL + ', adv_estimator grpo, loss_mode vanilla, loss_agg_mode "token-mean"',
    "from the paper: dual clip always (c = 3), token mean, sample std + 1e-6, a group of one keeps its reward, no KL",
    scale="group_std", std_ddof=1, std_eps=1e-6, singleton="raw", log_ratio_min=-20.0, log_ratio_max=20.0,
    surrogate="dual_clip", reduction="mean_over_window", rows_counted="nonempty", length_eps=1e-8)
_VERL_TOKEN_STD = replace(_VERL_GRPO, scale="token_std", std_eps=1e-8, std_guard="inside")

VERL_ROWS = _table(
    _VERL_GRPO,
    replace(_VERL_GRPO, name="grpo_kl@verl-0.9.1", source=VERL + ", use_kl_loss with low_var_kl",
        differs="from grpo@verl-0.9.1: + 0.001 * k3, its logarithm cut at +-20 and its value at +-10",
        kl="k3", kl_coef=0.001, kl_log_limit=20.0, kl_limit=10.0),
    replace(_VERL_GRPO, name="dr_grpo@verl-0.9.1",
        source=VERL + ', norm_adv_by_std_in_grpo=False, loss_agg_mode "seq-mean-token-sum-norm"',
        differs="from the paper: dual clip; divided by the padded width of the batch unless loss_scale_factor is set "
                '(then reduction "sum_over_budget")',
        scale="none", reduction="sum_over_width"),
    replace(_VERL_GRPO, name="grpo_passk@verl-0.9.1", source=VERL + ", adv_estimator grpo_passk; arXiv 2503.19595",
        differs="from grpo@verl-0.9.1: only the best answer of a group gets an advantage",
        baseline="best_minus_second", singleton="refuse"),
    replace(_VERL_GRPO, name="opo@verl-0.9.1", source=VERL + ", adv_estimator opo; arXiv 2505.23585",
        differs="from grpo@verl-0.9.1: length-weighted baseline, no division by std",
        baseline="length_weighted_mean", scale="none"),
    replace(_VERL_GRPO, name="rloo@verl-0.9.1", source=VERL + ", adv_estimator rloo",
        differs="from the paper: token ratios with the dual clip; a group of one keeps its reward",
        baseline="leave_one_out", scale="none"),
    replace(_VERL_GRPO, name="rloo_vectorized@verl-0.9.1", source=VERL + ", adv_estimator rloo_vectorized",
        differs="from rloo@verl-0.9.1: a group of one gets 0",
        baseline="leave_one_out", scale="none", singleton="zero"),
    replace(_VERL_GRPO, name="remax@verl-0.9.1", source=VERL + ", adv_estimator remax",
        differs="from the paper: token ratios with the dual clip",
        baseline="greedy", credit="reward_to_go", scale="none"),
    replace(_VERL_TOKEN_STD, name="reinforce_pp@verl-0.9.1", source=VERL + ", adv_estimator reinforce_plus_plus",
        differs="from the paper: sample std over tokens with 1e-8 inside the root, dual clip, no KL unless switched on",
        baseline="none", credit="reward_to_go"),
    replace(_VERL_TOKEN_STD, name="reinforce_pp_baseline@verl-0.9.1",
        source=VERL + ", adv_estimator reinforce_plus_plus_baseline",
        differs="from the paper: mean and std over tokens instead of answers, so long answers count more; dual clip"),
    replace(_VERL_TOKEN_STD, name="ppo@verl-0.9.1", source=VERL + ", adv_estimator gae",
        differs="from the paper: advantages whitened over tokens, dual clip, gamma = lam = 1, critic with the larger of"
                " two squares times 0.5 (trained apart, so its weight is its own)",
        baseline="gae", lam=1.0, value_loss="clip_max", value_coef=0.5, value_clip=0.5),
    replace(_VERL_GRPO, name="gspo@verl-0.9.1", source=VERL + ", loss_mode gspo",
        differs="from the paper: the token form; clip 0.2 unless clip_ratio_low and _high are set; log-ratio cut at 10",
        ratio="sequence_mean_token", log_ratio_min=-INF, log_ratio_max=10.0, surrogate="clip",
        reduction="mean_per_response"),
    replace(_VERL_GRPO, name="cispo@verl-0.9.1", source=VERL + ", loss_mode cispo",
        differs="from the paper: both bounds at 0.2 unless set",
        surrogate="cispo"),
    replace(_VERL_GRPO, name="sapo@verl-0.9.1", source=VERL + ", loss_mode sapo",
        differs="from sapo@trl-1.16.0: sample std + 1e-6, non-empty rows counted",
        surrogate="sapo", reduction="mean_per_response"),
    replace(_VERL_GRPO, name="gpg@verl-0.9.1", source=VERL + ", loss_mode gpg",
        differs="no ratio at all: REINFORCE on group advantages, token mean",
        ratio="none", surrogate="plain"),
    replace(_VERL_GRPO, name="dro@verl-0.9.1", source=VERL + ", loss_mode dro",
        differs="REINFORCE with a squared pull to the policy that sampled: A l - beta / 2 (l - l0)^2, beta 0.1 here",
        ratio="none", surrogate="plain", kl="k2", kl_anchor="old", kl_coef=0.1),
    replace(_VERL_GRPO, name="geo_mean@verl-0.9.1", source=VERL + ", loss_mode geo_mean; arXiv 2507.20673",
        differs="clips each token's log-ratio and then takes the geometric mean; mean over all rows whatever is "
                "configured; one advantage an answer",
        ratio="sequence_mean_of_clipped", log_ratio_min=-INF, log_ratio_max=INF, surrogate="plain", clip_low=0.4,
        clip_high=0.4, reduction="mean_per_response", rows_counted="all"),
    replace(_VERL_GRPO, name="dppo_tv@verl-0.9.1", source=VERL + ", loss_mode dppo_tv; arXiv 2602.04879",
        differs="the band is in probability, not in ratio: rare tokens may move by large factors",
        surrogate="dppo_tv"),
    replace(_VERL_GRPO, name="dppo_kl@verl-0.9.1", source=VERL + ", loss_mode dppo_kl; arXiv 2602.04879",
        differs="from dppo_tv@verl-0.9.1: the band is in a two-outcome KL",
        surrogate="dppo_kl"),
)

OTHER_ROWS = _table(
    Row("ppo@sb3-2.9.2", "stable-baselines3 2.9.2, PPO.train, on advantages as its buffer holds them",
        "from the paper: advantages standardised per minibatch (sample std + 1e-8; skipped for a minibatch of one)",
        baseline="given", scale="token_std", std_ddof=1, reduction="mean_over_tokens", value_loss="square",
        value_coef=0.5),
    Row("ppo@rlax-0.1.9", "rlax 0.1.9, clipped_surrogate_pg_loss, on advantages as given",
        "the policy term alone: no critic, no entropy",
        baseline="given", reduction="mean_over_tokens"),
    Row("grpo@torchrl-0.14.1",
        "torchrl 0.14.1, MCAdvantage and GRPOLoss; from its source, not checked against a recording",
        "from the paper: sample std with a floor of 1e-6 instead of a sum, token mean, KL as a mean over the padded width; "
        "its entropy bonus of 0.01 is left out",
        scale="group_std", std_ddof=1, std_eps=1e-6, std_guard="floor", kl="k3", reduction="mean_over_tokens",
        kl_reduction="sum_over_width"),
    Row("grpo@openrlhf-3c3be62",
        "OpenRLHF 3c3be62, group_norm with token_level_loss; from its source, not checked against a recording",
        "from the paper: sample std + 1e-9, token mean; its clip of the baselined reward to +-10, and the k1 KL that it "
        "then subtracts from each token, are left out",
        scale="group_std", std_ddof=1, std_eps=1e-9, reduction="mean_over_window", rows_counted="nonempty",
        length_eps=1e-8),
)

ROWS: dict[str, Row] = PAPER_ROWS | TRL_ROWS | VERL_ROWS | OTHER_ROWS
"""Every named row. A new one is an entry here and a test."""

_DPO = PreferenceRow("dpo", "Rafailov et al. 2023, arXiv 2305.18290, equation 7",
    "sums over tokens, as the paper's log pi(y | x)")

PREFERENCE_ROWS: dict[str, PreferenceRow] = _table(
    _DPO,
    replace(_DPO, name="dpo_mean", source="TRL calls it sigmoid_norm",
        differs="from dpo: means over tokens; another objective, not a rescaled one",
        score="mean"),
    replace(_DPO, name="cdpo", source="Mitchell 2023, note on noisy preferences, equation 3",
        differs="from dpo: labels are flipped with probability e, so the margin has a finite optimum",
        loss="cdpo", label_smoothing=0.1),
    replace(_DPO, name="robust", source="Chowdhury et al. 2024, arXiv 2403.00409",
        differs="from cdpo: the flips are subtracted instead of mixed in, which keeps the loss unbiased",
        loss="robust", label_smoothing=0.1),
    replace(_DPO, name="ipo", source="Azar et al. 2023, arXiv 2310.12036, equation 17; beta is the paper's tau",
        differs="from dpo: the margin is fitted to 1 / (2 beta)",
        loss="ipo"),
    replace(_DPO, name="ipo_mean", source="TRL 1.16.0 calls it ipo",
        differs="from ipo: means over tokens, so the target does not depend on length",
        loss="ipo", score="mean"),
    replace(_DPO, name="hinge", source="Zhao et al. 2023 (SLiC), arXiv 2305.10425, with a reference",
        differs="from dpo: no gradient once beta D > 1",
        loss="hinge"),
    PreferenceRow("kto", "Ethayarajh et al. 2024, arXiv 2402.01306, equations 7 and 8",
        "labelled answers instead of pairs; the mean is over all answers, z0 from mismatched ones, as in TRL 1.16.0",
        loss="kto"),
    PreferenceRow("simpo", "Meng et al. 2024, arXiv 2405.14734",
        "no reference, means over tokens, a target margin; the paper tunes beta and gamma for each model; 2 and 1 here",
        loss="simpo", score="mean", reference="unused", beta=2.0, gamma=1.0),
    PreferenceRow("orpo", "Hong et al. 2024, arXiv 2403.07691",
        "no reference; odds of per-token means, beside the chosen answers' NLL; beta is the paper's lambda",
        loss="orpo", score="mean", reference="unused", sft_coef=1.0),
    replace(_DPO, name="exo", source="Ji et al. 2024, arXiv 2402.00856, equation 16 for two answers",
        differs="from cdpo: the KL the other way round",
        loss="exo", label_smoothing=0.1),
    replace(_DPO, name="sppo_hard", source="Wu et al. 2024, arXiv 2405.00675, with hard labels",
        differs="from ipo: both answers have a target of their own",
        loss="sppo_hard"),
    replace(_DPO, name="bco", source="Jung et al. 2024, arXiv 2404.04656",
        differs="from dpo: classifies each answer; the paper's running mean of rewards is left out, as in TRL's bco_pair",
        loss="bco"),
    replace(_DPO, name="aot", source="Melnyk et al. 2024, arXiv 2406.05882",
        differs="from dpo: compares sorted gaps, so a pair's gradient depends on its rank in the batch",
        loss="aot"),
    replace(_DPO, name="aot_unpaired", source="Melnyk et al. 2024, arXiv 2406.05882",
        differs="from aot: chosen and rejected scores are sorted apart",
        loss="aot_unpaired"),
    replace(_DPO, name="dpo_sft", source='TRL 1.16.0, loss_type=["sigmoid", "sft"], loss_weights=[1, 0.5]',
        differs="from dpo: + 0.5 * NLL of the chosen answers, so their probability is held up",
        sft_coef=0.5),
    replace(_DPO, name="dpo_forward_kl", source="Wang et al. 2023, arXiv 2309.16240",
        differs="from dpo: the reward behind it is regularised by the forward KL",
        divergence="forward_kl"),
    replace(_DPO, name="dpo_js", source="Wang et al. 2023, arXiv 2309.16240",
        differs="from dpo: the reward behind it is regularised by the Jensen-Shannon divergence",
        divergence="js"),
    replace(_DPO, name="ld_dpo", source="Liu et al. 2024, arXiv 2409.06411",
        differs="from dpo: tokens beyond the shorter answer's length weigh half",
        tail_weight=0.5),
)

# fmt: on
NOT_EXPRESSED: dict[str, str] = {
    "Clip-Cov, KL-Cov (verl)": "which tokens are cut depends on a covariance over the batch and on a random draw that no "
    "recorded array holds",
    "adaptive KL controller (verl)": "a rule for kl_coef from step to step, not an objective on one batch",
    "V-trace (rlax)": "its targets weigh each later step by a product of clipped ratios; the table has GAE only",
    "top-entropy token selection (TRL top_entropy_quantile)": "a quantile over the batch decides the mask; pass the mask",
    "sampler correction (TRL with vLLM, verl rollout weights)": "a second ratio to the sampler's own log-probabilities, "
    "with a clip of its own; no batch here holds them",
    "reward clip range (OpenRLHF)": "cuts the baselined reward before the KL is subtracted from each token",
    "sampling of replacement groups (DAPO)": "the filter is here; drawing new prompts belongs to a trainer",
    "advantages of gamma < 1 that restart after a hole in the mask (verl reinforce_plus_plus)": "here a hole is skipped",
    "Beta Normalization Policy Optimization": "fits a Beta distribution to rewards; the name bnpo here is TRL's reduction",
}


if __name__ == "__main__":
    from extensions.objectives_report import main

    rl_lab.run_command(main)
