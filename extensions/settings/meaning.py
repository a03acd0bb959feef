"""From settings to the row of the table of objectives that they mean.

`meaning(settings)` returns the row, the named row it starts from and the fields it changes. What the table cannot express is
said in `missing` and not passed over. One function per method, in MEANINGS; a new loss of a trainer is an entry in its table
of names (TRL_LOSSES, TRL_PAIRS, VERL_ADVANTAGES, VERL_LOSSES, ORLHF_ADVANTAGES). How an outcome is checked: test_meaning.py
takes the settings of every recorded batch through here and compares the loss.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field, replace
from typing import Callable

from extensions.objectives import PREFERENCE_ROWS, ROWS, PreferenceRow, Row
from extensions.settings.trainers import Settings

TRL_SUFFIX, VERL_SUFFIX = "@trl-1.16.0", "@verl-0.9.1"


@dataclass
class Meaning:
    """The row that settings mean."""

    row: Row | PreferenceRow | None  # None: the table has no such objective; `missing` says which
    base: Row | PreferenceRow | None
    missing: list[str] = field(default_factory=list)

    @property
    def changed(self) -> dict[str, tuple[object, object]]:
        """Field -> value of the named row and of this one."""
        if self.row is None or self.base is None:
            return {}
        return {
            item.name: (getattr(self.base, item.name), getattr(self.row, item.name))
            for item in dataclasses.fields(self.row)
            if item.name not in ("name", "source", "differs")
            and getattr(self.base, item.name) != getattr(self.row, item.name)
        }


class Refused(ValueError):
    """Settings that the trainer itself refuses, or that name something it does not have."""


def one_of(settings: Settings, key: str, table: dict) -> object:
    """table[value of key]. Raises Refused that names the key and what it may be."""
    value = settings.get(key)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, (str, bool, int)) or value not in table:
        raise Refused(f"{key}: got {value!r}, wanted one of {', '.join(map(str, table))}")
    return table[value]


# ------------------------------------------------------------------------------------------------------------ TRL

TRL_LOSSES = {name: name for name in ("grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")}
_TRL_SCALES = {
    "group": "group_std", True: "group_std", "batch": "batch_std_of_raw_rewards", "none": "none", False: "none", None: "none",
}  # fmt: skip
# vllm_importance_sampling_mode -> (level of the weight, level at which it is held against the bounds)
_TRL_SAMPLER = {
    "token_truncate": ("token", None),
    "sequence_truncate": ("product", None),
    "token_mask": ("token", "token"),
    "sequence_mask": ("product", "sum"),
}


def trl_grpo(settings: Settings) -> Meaning:
    """TRL's GRPOTrainer: loss_type names the reduction and sometimes the surrogate, the rest are switches."""
    name = one_of(settings, "loss_type", TRL_LOSSES)
    is_sequence = one_of(settings, "importance_sampling_level", {"token": False, "sequence": True})
    is_parts = settings.get("multi_objective_aggregation") == "normalize_then_sum"
    base = ROWS[("gdpo" if is_parts else "gspo" if name == "grpo" and is_sequence else name) + TRL_SUFFIX]
    row = replace(ROWS[name + TRL_SUFFIX], name=base.name, source=base.source, differs=base.differs)
    if is_parts:
        row = replace(row, reward_parts=base.reward_parts, baseline=base.baseline, scale=base.scale)
    elif settings.get("scale_rewards") is not None or settings.has("scale_rewards"):
        row = replace(row, scale=_trl_scale(settings))
    low = settings.number("epsilon", 0.2)
    high = settings.number("epsilon_high", low)
    if name == "cispo":
        row = replace(row, clip_high=high - 1)
    else:
        row = replace(row, clip_low=low, clip_high=high)
    row = replace(row, ratio="sequence_mean" if is_sequence else "token" if name != "vespo" else row.ratio)
    if settings.get("delta") is not None and row.surrogate == "clip":
        row = replace(row, surrogate="capped_clip", ratio_cap=settings.number("delta"))
    if name == "sapo":
        row = replace(row, tau_positive=settings.number("sapo_temperature_pos"), tau_negative=settings.number("sapo_temperature_neg"))
    if name == "vespo":
        row = replace(row, **{
            f"vespo_{ours}_{side}": settings.number(f"vespo_{theirs}_{side[:3]}")
            for ours, theirs in (("k", "k"), ("lam", "lambda")) for side in ("positive", "negative")
        })  # fmt: skip
    # A row with beta 0 has no KL term whatever its weight says: k3 stays named as TRL's form of it.
    row = replace(row, kl_coef=settings.number("beta"), kl_weight="ratio" if settings.get("use_bias_correction_kl") else "none")
    missing = []
    if (coefficient := settings.number("entropy_coef")) and not settings.get("use_adaptive_entropy"):
        row = replace(row, entropy_coef=coefficient, accumulation="divide")
    if settings.get("use_adaptive_entropy"):
        missing.append("use_adaptive_entropy changes the entropy coefficient from step to step")
    if settings.get("off_policy_mask_threshold") is not None:
        row = replace(row, off_policy_rows="drop", off_policy_threshold=settings.number("off_policy_mask_threshold"))
    if settings.get("mask_truncated_completions"):
        row = replace(row, overlong="mask")
    if (share := settings.number("top_entropy_quantile", 1.0)) < 1:
        row = replace(row, token_selection="top_entropy", selected_share=share)
    if settings.get("use_vllm") and settings.get("vllm_importance_sampling_correction") and name != "vespo":
        row = replace(row, **_trl_sampler(settings))
    return Meaning(row, base, missing)


def _trl_scale(settings: Settings) -> str:
    value = settings.get("scale_rewards")
    if value not in _TRL_SCALES:
        raise Refused(f"scale_rewards: got {value!r}, wanted group, batch or none")
    return _TRL_SCALES[value]


def _trl_sampler(settings: Settings) -> dict[str, object]:
    level, drop = one_of(settings, "vllm_importance_sampling_mode", _TRL_SAMPLER)
    low, high = settings.get("vllm_importance_sampling_clip_min"), settings.get("vllm_importance_sampling_clip_max")
    low = 0.0 if low is None else settings.number("vllm_importance_sampling_clip_min")
    high = math.inf if high is None else settings.number("vllm_importance_sampling_clip_max")
    made: dict[str, object] = {"sampler_correction": level}
    if drop is None:
        return made | {"sampler_bound": "banded", "sampler_low": low, "sampler_high": high}
    return made | {
        "sampler_drop": "ratio", "sampler_drop_level": drop, "sampler_drop_low": low, "sampler_drop_high": high,
    }  # fmt: skip


def trl_rloo(settings: Settings) -> Meaning:
    base = ROWS["rloo" + TRL_SUFFIX]
    low = settings.number("epsilon", 0.2)
    row = replace(base, kl_coef=settings.number("beta"), clip_low=low, clip_high=settings.number("epsilon_high", low))
    missing = []
    if settings.get("normalize_advantages"):
        row = replace(row, scale="batch_std", std_ddof=1, std_eps=1e-4)
    if (bounds := settings.get("reward_clip_range")) is not None:
        if isinstance(bounds, list) and len(bounds) == 2 and bounds[0] == -bounds[1]:
            row = replace(row, reward_clip="before_baseline", reward_limit=float(bounds[1]))
        else:
            missing.append("reward_clip_range that is not symmetric")
    if settings.get("mask_truncated_completions"):
        row = replace(row, overlong="mask")
    return Meaning(row, base, missing)


# TRL's loss_type -> name in PREFERENCE_ROWS
TRL_PAIRS = {
    "sigmoid": "dpo", "sigmoid_norm": "dpo_mean", "hinge": "hinge", "ipo": "ipo_mean", "exo_pair": "exo", "robust": "robust",
    "bco_pair": "bco", "sppo_hard": "sppo_hard", "aot": "aot", "aot_unpaired": "aot_unpaired",
}  # fmt: skip
TRL_PAIRS_NOT_EXPRESSED = ("nca_pair", "apo_zero", "apo_down", "discopop")
_SMOOTHED = ("robust", "exo", "aot", "aot_unpaired")
_DIVERGENCES = {"reverse_kl": "reverse_kl", "forward_kl": "forward_kl", "js_divergence": "js"}


def trl_pairs(settings: Settings) -> Meaning:
    """DPOTrainer and the experimental CPO and ORPO."""
    if settings.trainer.name == "trl.ORPOConfig":
        return Meaning(replace(PREFERENCE_ROWS["orpo"], beta=settings.number("beta")), PREFERENCE_ROWS["orpo"])
    if settings.trainer.name == "trl.CPOConfig":
        return _trl_cpo(settings)
    losses = settings.get("loss_type")
    losses = losses if isinstance(losses, list) else [losses]
    weights = settings.get("loss_weights") or [1.0] * len(losses)
    if not isinstance(weights, list) or len(weights) != len(losses):
        raise Refused(f"loss_weights: got {weights!r} for the losses {losses!r}, wanted one weight for each")
    for loss in losses:
        if loss not in (*TRL_PAIRS, *TRL_PAIRS_NOT_EXPRESSED, "sft"):
            raise Refused(f"loss_type: got {loss!r}, wanted one of {', '.join((*TRL_PAIRS, *TRL_PAIRS_NOT_EXPRESSED, 'sft'))}")
    policy = [(loss, weight) for loss, weight in zip(losses, weights) if loss != "sft"]
    if len(policy) != 1 or policy[0][0] in TRL_PAIRS_NOT_EXPRESSED:
        return Meaning(None, None, [f"loss_type {losses}"])
    base = PREFERENCE_ROWS[TRL_PAIRS[policy[0][0]]]
    row = replace(base, beta=settings.number("beta"))
    if row.loss in _SMOOTHED:
        row = replace(row, label_smoothing=settings.number("label_smoothing"))
    if settings.get("ld_alpha") is not None:
        row = replace(row, tail_weight=settings.number("ld_alpha"))
    missing = [] if policy[0][1] == 1 else [f"the weight {policy[0][1]:g} of the loss {policy[0][0]}"]
    divergence = settings.get("f_divergence_type")
    if divergence in _DIVERGENCES:
        row = replace(row, divergence=_DIVERGENCES[divergence])
    else:
        missing.append(f"f_divergence_type {divergence}")
    if settings.get("use_weighting"):
        missing.append("use_weighting, a weight of each pair by its log-probabilities")
    return Meaning(replace(row, sft_coef=float(sum(w for loss, w in zip(losses, weights) if loss == "sft"))), base, missing)


def _trl_cpo(settings: Settings) -> Meaning:
    loss = settings.get("loss_type")
    names = {"sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo", "simpo": "simpo"}
    base = PREFERENCE_ROWS[one_of(settings, "loss_type", names)]
    row = replace(base, reference="unused", beta=settings.number("beta"), sft_coef=settings.number("cpo_alpha"))
    if loss == "simpo":
        row = replace(row, gamma=settings.number("simpo_gamma"))
    missing = []
    if smoothing := settings.number("label_smoothing"):
        if loss == "sigmoid":
            row = replace(row, loss="cdpo", label_smoothing=smoothing)
        elif loss == "simpo":
            missing.append("label_smoothing of simpo")
    return Meaning(row, base, missing)


def trl_kto(settings: Settings) -> Meaning:
    if settings.get("loss_type") != "kto":
        return Meaning(None, None, [f"loss_type {settings.get('loss_type')}"])
    names = ("beta", "desirable_weight", "undesirable_weight")
    return Meaning(replace(PREFERENCE_ROWS["kto"], **{name: settings.number(name) for name in names}), PREFERENCE_ROWS["kto"])


# ----------------------------------------------------------------------------------------------------------- verl

ACTOR = "actor_rollout_ref.actor."
VERL_ADVANTAGES = {
    "gae": "ppo", "grpo": "grpo", "grpo_vectorized": "grpo", "grpo_passk": "grpo_passk", "opo": "opo", "rloo": "rloo",
    "rloo_vectorized": "rloo_vectorized", "remax": "remax", "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}  # fmt: skip
VERL_LOSSES = {
    "vanilla": "grpo", "gspo": "gspo", "cispo": "cispo", "sapo": "sapo", "gpg": "gpg", "dro": "dro", "geo_mean": "geo_mean",
    "dppo_tv": "dppo_tv", "dppo_kl": "dppo_kl",
}  # fmt: skip
VERL_REDUCTIONS = {
    "token-mean": "mean_over_window", "token-sum": "sum_over_tokens", "seq-mean-token-sum": "sum_per_response",
    "seq-mean-token-sum-norm": "sum_over_width", "seq-mean-token-mean": "mean_per_response",
}  # fmt: skip
VERL_KLS = {
    "kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3",
}  # fmt: skip
_OF_ADVANTAGE = (
    "baseline", "credit", "scale", "std_ddof", "std_eps", "std_guard", "singleton", "gamma", "lam", "value_loss", "value_coef",
    "value_clip", "missing_reward",
)  # fmt: skip


def verl_kl(name: object, coefficient: float, place: str) -> dict[str, object]:
    """Fields of a KL term by verl's name of it; a + asks for the value of one estimator and the gradient of k2."""
    text = str(name)
    if text.rstrip("+") not in VERL_KLS:
        raise Refused(f"the KL is named {text!r}, wanted one of {', '.join(VERL_KLS)}, in a loss also with +")
    kl = VERL_KLS[text.rstrip("+")]
    limits = {"kl_log_limit": 20.0, "kl_limit": 10.0} if kl == "k3" else {}
    gradient = "k2" if text.endswith("+") and kl != "k2" and place == "loss" else "own"
    return {"kl": kl, "kl_coef": coefficient, "kl_place": place, "kl_gradient": gradient, **limits}


def verl(settings: Settings) -> Meaning:
    estimator = settings.get("algorithm.adv_estimator")
    if estimator not in VERL_ADVANTAGES:
        return Meaning(None, None, [f"adv_estimator {estimator}"])
    mode = settings.get(ACTOR + "policy_loss.loss_mode")
    if mode not in VERL_LOSSES:
        return Meaning(None, None, [f"loss_mode {mode}"])
    advantage = ROWS[VERL_ADVANTAGES[estimator] + VERL_SUFFIX]
    loss = ROWS[VERL_LOSSES[mode] + VERL_SUFFIX]
    base = loss if VERL_ADVANTAGES[estimator] == "grpo" and mode != "vanilla" else advantage
    row = replace(loss, name=base.name, source=base.source, differs=base.differs)
    row = replace(row, **{name: getattr(advantage, name) for name in _OF_ADVANTAGE})
    if estimator == "gae":
        row = replace(row, gamma=settings.number("algorithm.gamma"), lam=settings.number("algorithm.lam"))
        row = replace(row, value_clip=settings.number("critic.cliprange_value", 0.5))
    if estimator == "reinforce_plus_plus":
        row = replace(row, gamma=settings.number("algorithm.gamma"))
    if VERL_ADVANTAGES[estimator] == "grpo" and settings.get("algorithm.norm_adv_by_std_in_grpo") is False:
        row = replace(row, scale="none")
    if mode not in ("geo_mean", "sapo"):
        reduction = one_of(settings, ACTOR + "loss_agg_mode", VERL_REDUCTIONS)
        if reduction == "sum_over_width" and settings.get(ACTOR + "loss_scale_factor") is not None:
            reduction = "sum_over_budget"
        row = replace(row, reduction=reduction)
    clip = settings.number(ACTOR + "clip_ratio", 0.2)
    row = replace(
        row,
        clip_low=settings.number(ACTOR + "clip_ratio_low", clip),
        clip_high=settings.number(ACTOR + "clip_ratio_high", clip),
        ratio_cap=settings.number(ACTOR + "clip_ratio_c", 3.0) if mode in ("vanilla", "dppo_tv", "dppo_kl") else row.ratio_cap,
    )
    if mode == "sapo":
        row = replace(row, tau_positive=settings.number(ACTOR + "tau_pos"), tau_negative=settings.number(ACTOR + "tau_neg"))
    return _verl_terms(settings, row, base, mode)


def _verl_terms(settings: Settings, row: Row, base: Row, mode: str) -> Meaning:
    """The terms beside the policy's: KL, entropy, sampler correction, filter."""
    missing = []
    in_loss, in_reward = settings.get(ACTOR + "use_kl_loss"), settings.get("algorithm.use_kl_in_reward")
    if mode == "dro":
        beta = settings.get(ACTOR + "policy_loss.dro_beta")
        row = replace(row, kl_coef=row.kl_coef if beta is None else float(beta))
        if in_loss or in_reward:
            missing.append("the KL to the reference beside the pull of dro")
    elif in_loss:
        row = replace(row, **verl_kl(settings.get(ACTOR + "kl_loss_type"), settings.number(ACTOR + "kl_loss_coef"), "loss"))
        if in_reward:
            missing.append("the KL in the reward, beside the one in the loss")
    elif in_reward:
        coefficient = settings.number("algorithm.kl_ctrl.kl_coef")
        row = replace(row, **verl_kl(settings.get("algorithm.kl_penalty"), coefficient, "reward"))
        if settings.get("algorithm.kl_ctrl.type") == "adaptive":
            missing.append("kl_ctrl.type adaptive changes kl_coef from step to step")
    if entropy := settings.number(ACTOR + "entropy_coeff"):
        row = replace(row, entropy_coef=entropy, entropy_reduction="same")
    level = settings.get("algorithm.rollout_correction.rollout_is")
    if level in ("token", "sequence"):
        cap = settings.number("algorithm.rollout_correction.rollout_is_threshold")
        level = {"token": "token", "sequence": "product"}[level]
        row = replace(row, sampler_correction=level, sampler_bound="capped", sampler_high=cap)
    if settings.get("algorithm.rollout_correction.rollout_rs") is not None:
        missing.append("rollout_rs, the rejection of tokens or answers by the sampler's ratio")
    if settings.get("algorithm.filter_groups.enable"):
        row = replace(row, group_filter="spread")
    return Meaning(row, base, missing)


# ------------------------------------------------------------------------------------------------------- OpenRLHF

_TOKEN_WHITENED = {"scale": "token_std", "std_ddof": 0, "std_eps": 1e-8, "std_guard": "floor_variance"}
ORLHF_ADVANTAGES: dict[str, dict[str, object]] = {
    "group_norm": {},
    "dr_grpo": {"scale": "none"},
    "rloo": {"baseline": "leave_one_out", "scale": "none"},
    "reinforce_baseline": _TOKEN_WHITENED,
    "reinforce": {"baseline": "none", "credit": "reward_to_go", **_TOKEN_WHITENED},
    "flash_reinforce": {"baseline": "batch_mean", "scale": "none"},
    "gae": {"baseline": "gae", **_TOKEN_WHITENED, "value_loss": "clip_max", "value_coef": 0.5},
}
_ORLHF_REDUCTIONS = {"token-mean": "mean_over_window", "seq-mean-token-mean": "mean_per_response"}


def openrlhf(settings: Settings) -> Meaning:
    base = ROWS["grpo@openrlhf-3c3be62"]
    estimator = str(settings.get("algo.advantage.estimator"))
    row = replace(base, **one_of(settings, "algo.advantage.estimator", ORLHF_ADVANTAGES), log_ratio_min=-20.0, log_ratio_max=20.0)
    missing = []
    if estimator in ("gae", "reinforce"):
        row = replace(row, gamma=settings.number("algo.advantage.gamma"))
    if estimator == "gae":
        row = replace(row, lam=settings.number("algo.advantage.lambd"), value_clip=settings.number("critic.value_clip"))
    if settings.get("algo.advantage.no_std_norm") and row.scale == "token_std":
        row = replace(row, scale="none")
        missing.append("the mean over tokens that no_std_norm still subtracts")
    if isinstance(bounds := settings.get("reward.clip_range"), list) and len(bounds) == 2 and -bounds[0] == bounds[1]:
        after = row.baseline in ("group_mean", "leave_one_out", "batch_mean") or row.baseline == "none" and row.credit == "outcome"
        row = replace(row, reward_clip="after_baseline" if after else "before_baseline", reward_limit=float(bounds[1]))
    band = settings.get("actor.eps_clip_low_high") or [settings.number("actor.eps_clip")] * 2
    row = replace(row, clip_low=float(band[0]), clip_high=float(band[1]))
    row = replace(row, surrogate="clip", reduction=one_of(settings, "actor.loss_agg_mode", _ORLHF_REDUCTIONS))
    if settings.get("actor.dual_clip") is not None:
        row = replace(row, surrogate="dual_clip", ratio_cap=settings.number("actor.dual_clip"))
    if settings.get("actor.policy_loss_type") == "gspo":
        row = replace(row, ratio="sequence_mean", log_ratio_min=-math.inf, log_ratio_max=math.inf, reduction="mean_per_response")
    if coefficient := settings.number("algo.kl.init_coef"):
        kl = {"kl": one_of(settings, "algo.kl.estimator", {"k1": "k1", "k2": "k2", "k3": "k3"}), "kl_coef": coefficient, "kl_limit": 10.0}
        in_groups = row.baseline in ("group_mean", "leave_one_out", "batch_mean")
        place = "loss" if settings.get("algo.kl.use_loss") else "after_baseline" if in_groups else "reward"
        row = replace(row, **kl, kl_place=place)
        if settings.get("algo.kl.target") is not None:
            missing.append("kl.target changes the KL coefficient from step to step")
    if entropy := settings.number("actor.entropy_coef"):
        row = replace(row, entropy_coef=entropy, entropy_reduction="same")
    if settings.get("algo.advantage.is_correction_level") != "off":
        row, unsaid = _orlhf_sampler(settings, row)
        missing += unsaid
    if settings.get("algo.dynamic_filtering_enable"):
        missing.append("dynamic filtering, which keeps groups by their mean reward")
    return Meaning(row, base, missing)


def _orlhf_sampler(settings: Settings, row: Row) -> tuple[Row, list[str]]:
    level, mode = settings.get("algo.advantage.is_correction_level"), settings.get("algo.advantage.is_correction_mode")
    if settings.get("algo.advantage.is_correction_gating") != "ratio":
        return row, ["is_correction_gating that is not the ratio"]
    low, high = ([0.0] + list(settings.get("algo.advantage.is_correction_threshold")))[-2:]
    row = replace(row, sampler_correction="token")
    if mode == "clip":
        return replace(row, sampler_bound="banded", sampler_low=float(low), sampler_high=float(high)), []
    drop = {"token": "token", "seq": "mean"}[level]
    return replace(row, sampler_drop="ratio", sampler_drop_level=drop, sampler_drop_low=float(low), sampler_drop_high=float(high)), []


def openrlhf_dpo(settings: Settings) -> Meaning:
    smoothing = settings.number("model.label_smoothing")
    base = PREFERENCE_ROWS["ipo" if settings.get("model.ipo_enable") else "cdpo" if smoothing else "dpo"]
    row = replace(base, beta=settings.number("model.beta"), sft_coef=settings.number("model.nll_loss_coef"))
    return Meaning(replace(row, label_smoothing=smoothing) if base.loss == "cdpo" else row, base)


# ----------------------------------------------------------------------------------------------- stable-baselines3


def sb3(settings: Settings) -> Meaning:
    base = ROWS["ppo@sb3-2.9.2"]
    clip = settings.number("clip_range")
    row = replace(
        base,
        clip_low=clip,
        clip_high=clip,
        value_coef=settings.number("vf_coef"),
        entropy_coef=settings.number("ent_coef"),
        gamma=settings.number("gamma"),
        lam=settings.number("gae_lambda"),
        scale="token_std" if settings.get("normalize_advantage") else "none",
    )
    if settings.get("clip_range_vf") is not None:
        row = replace(row, value_loss="clip_replace", value_clip=settings.number("clip_range_vf"))
    return Meaning(row, base)


def a2c(settings: Settings) -> Meaning:
    """One pass over fresh data: the ratio is 1 and the clip never acts, so A2C is the same row without a ratio."""
    base = ROWS["ppo@sb3-2.9.2"]
    row = replace(
        base,
        ratio="none",
        surrogate="plain",
        value_coef=settings.number("vf_coef"),
        entropy_coef=settings.number("ent_coef"),
        gamma=settings.number("gamma"),
        lam=settings.number("gae_lambda"),
        scale="token_std" if settings.get("normalize_advantage") else "none",
    )
    return Meaning(row, base)


MEANINGS: dict[str, Callable[[Settings], Meaning]] = {
    "grpo": trl_grpo, "rloo": trl_rloo, "pairs": trl_pairs, "kto": trl_kto, "verl": verl, "openrlhf": openrlhf,
    "openrlhf_dpo": openrlhf_dpo, "sb3": sb3, "a2c": a2c,
}  # fmt: skip


def meaning(settings: Settings) -> Meaning:
    """The row that settings mean. Raises Refused, a ValueError, where a value is none that the trainer takes."""
    return MEANINGS[settings.trainer.method](settings)
