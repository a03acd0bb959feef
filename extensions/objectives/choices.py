"""The table of choices, and a row of it: what a PPO or GRPO objective is.

A new choice is a line in CHOICES with its formula, a function beside its relatives, and its name in their dictionary; a
number that it reads is a line in NUMBERS, in Row and in the ranges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

INF = math.inf

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
