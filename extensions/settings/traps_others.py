"""Traps of verl 0.9.1, OpenRLHF 0.11.2 and stable-baselines3 2.9.2."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from extensions.objectives import Row, compute_advantages, make_batch
from extensions.settings.meaning import ACTOR, VERL_ADVANTAGES, verl_kl
from extensions.settings.trap import Case, Trap, cosine, evaluated, first_pass, small
from extensions.settings.traps_trl import SUCCESS, compared, silent_share

ROLLOUT = "actor_rollout_ref.rollout."
GROUP_ESTIMATORS = tuple(name for name in VERL_ADVANTAGES if name not in ("gae", "remax", "reinforce_plus_plus"))


def _mode(case: Case) -> str:
    return str(case.settings.get(ACTOR + "policy_loss.loss_mode"))


def _estimator(case: Case) -> str:
    return str(case.settings.get("algorithm.adv_estimator", case.settings.get("algo.advantage.estimator")))


def _padded(case: Case) -> tuple[str, dict[str, float]]:
    """The same answers padded to twice the width."""
    batch, _ = small()
    wide = make_batch(
        **{name: torch.nn.functional.pad(getattr(batch, name), (0, batch.mask.shape[1])) for name in ("logps", "old_logps", "ref_logps", "mask")},
        rewards=batch.rewards, group_ids=batch.group_ids, budget=batch.budget,
    )  # fmt: skip
    row = replace(case.row, kl="none", kl_coef=0.0, kl_place="loss", kl_gradient="own", sampler_correction="none", sampler_bound="as_is",
                  entropy_coef=0.0)  # fmt: skip
    row = row if row.baseline in ("group_mean", "leave_one_out") else replace(row, baseline="group_mean", credit="outcome", scale="none", value_loss="none")
    (loss, narrow), (loss_wide, padded) = evaluated(row), evaluated(row, wide)
    made = {"loss": loss, "loss_padded": loss_wide, "gradient_norm": float(narrow.norm()), "gradient_norm_padded": float(padded.norm())}
    text = (
        f"gradient norm {made['gradient_norm']:.6f}; the same answers padded to twice the width: {made['gradient_norm_padded']:.6f}"
    )
    return text, made


def _singleton(case: Case) -> tuple[str, dict[str, float]]:
    reward = 2.0
    row = replace(case.row, overlong="none")
    batch = make_batch(logps=torch.zeros(1, 1, dtype=torch.float64), mask=torch.ones(1, 1, dtype=torch.bool),
                       rewards=torch.tensor([reward], dtype=torch.float64), group_ids=torch.tensor([0]))  # fmt: skip
    try:
        value = float(compute_advantages(row, batch)[0, 0])
    except ValueError:
        return f"the advantage of a single answer with reward {reward:g} is no number", {"reward": reward}
    return f"the advantage of a single answer with reward {reward:g} is {value:.6f}", {"reward": reward, "advantage": value}


def _filter(case: Case) -> tuple[str, dict[str, float]]:
    low, high = case.settings.get("algo.dynamic_filtering_range")
    rewards = torch.tensor([0.5, 0.5, 0.5, 0.5])
    kept = low < float(rewards.mean()) < high
    return f"four answers with reward 0.5 each have mean 0.5 and std 0: {'kept' if kept else 'dropped'}", {"mean": 0.5, "std": 0.0, "kept": float(kept)}


def _kl_twice(case: Case) -> tuple[str, dict[str, float]]:
    s = case.settings
    coefficient = s.number("algorithm.kl_ctrl.kl_coef")
    base = replace(case.row, kl="none", kl_coef=0.0, kl_gradient="own", kl_log_limit=math.inf, kl_limit=math.inf)
    reward_row = replace(base, **verl_kl(s.get("algorithm.kl_penalty"), coefficient, "reward"))
    _, plain = evaluated(base)
    _, in_loss = evaluated(case.row)
    _, in_reward = evaluated(reward_row)
    made = {"gradient_norm_of_loss_kl": float((in_loss - plain).norm()), "gradient_norm_of_reward_kl": float((in_reward - plain).norm())}
    text = (
        f"the KL in the loss moves the gradient by {made['gradient_norm_of_loss_kl']:.6f}, the one in the reward by another "
        f"{made['gradient_norm_of_reward_kl']:.6f}"
    )
    return text, made


def _norm_number(case: Case) -> tuple[str, dict[str, float]]:
    value = case.settings.number(ACTOR + "optim.clip_grad", 1.0)
    norm = float(evaluated(case.row)[1].norm())
    return f"a gradient of norm {norm:.6f} is multiplied by {value:g} / {norm:.6f}", {"gradient_norm": norm, "clip_grad": value}


def _grad_clip_number(case: Case) -> tuple[str, dict[str, float]]:
    wanted, read = case.settings.number(ACTOR + "grad_clip"), case.settings.number(ACTOR + "optim.clip_grad", 1.0)
    return f"the norm is cut at {read:g}, not at {wanted:g}", {"grad_clip": wanted, "clip_grad": read}


def _small_group(case: Case) -> tuple[str, dict[str, float]]:
    group = int(case.words.numbers["group_size"])
    share = silent_share(group, SUCCESS)
    return f"{share:.3f} of the groups are all right or all wrong at {SUCCESS:.0%} success", {"silent_groups": share}


def _on_policy(case: Case) -> tuple[str, dict[str, float]]:
    row = case.row
    return compared(row, replace(row, clip_low=1.0, clip_high=1e9) if row.ratio != "none" else row, first_pass(small()[0]))


def _gamma_number(case: Case) -> tuple[str, dict[str, float]]:
    theirs, ours = case.settings.number("vec_normalize.gamma"), case.settings.number("gamma")
    made = {"vec_normalize_gamma": theirs, "gamma": ours, "horizon_vec_normalize": 1 / (1 - theirs) if theirs < 1 else math.inf,
            "horizon": 1 / (1 - ours) if ours < 1 else math.inf}  # fmt: skip
    return f"rewards are scaled by the std of returns at gamma {theirs:g}, the returns are at {ours:g}", made


def _last_minibatch(case: Case) -> tuple[str, dict[str, float]]:
    rest = int(case.words.numbers["answers_per_generation"]) % int(case.settings.number("batch_size"))
    return f"{rest} transitions in the last mini-batch of every epoch", {"last_mini_batch": float(rest)}


def _sb3_standardised(case: Case) -> tuple[str, dict[str, float]]:
    """Standardised in two mini-batches of three answers against once over all."""
    batch, _ = small()
    row = replace(case.row, value_loss="none", entropy_coef=0.0)
    whole = compute_advantages(row, batch)
    parts = whole.clone()
    for rows in (slice(0, 3), slice(3, 6)):
        piece = batch.advantages[rows][batch.mask[rows]]
        parts[rows] = torch.where(batch.mask[rows], (batch.advantages[rows] - piece.mean()) / (piece.std() + 1e-8), 0.0)
    made = {"cosine": cosine(parts, whole)}
    return f"the advantages of two mini-batches of three answers, standardised apart or together: cosine {made['cosine']:.6f}", made


VERL_TRAPS: tuple[Trap, ...] = (
    Trap(1, "dr_grpo_keeps_std", ("verl",), lambda c: c.settings.get(ACTOR + "loss_agg_mode") == "seq-mean-token-sum-norm"
         and c.row.scale == "group_std",
         "The reduction is Dr. GRPO's; the advantages are still divided by the group's std, which Dr. GRPO leaves out.",
         "algorithm.norm_adv_by_std_in_grpo=False", "arXiv 2503.20783 section 3.2; verl docs", "mistake", meant=lambda c: replace(c.row, scale="none")),
    Trap(4, "clip_without_effect", ("verl", "openrlhf"), lambda c: c.on_policy,
         "One update per generation batch: every ratio is 1, the clip does nothing, pg_clipfrac 0 is right.",
         "a smaller mini-batch or more epochs, if reuse is wanted; else nothing", "verl#1477, trl#3120",
         lambda c: "warning" if any("clip_ratio" in key or "eps_clip" in key for key in c.settings.written) else "note", number_made=_on_policy),
    Trap(5, "sequence_ratio_on_policy", ("verl", "openrlhf"), lambda c: c.on_policy and c.row.ratio in ("sequence_mean", "sequence_mean_token"),
         "GSPO's ratio of whole answers is 1 when every batch is used once: value and gradient are those of token ratios.",
         "ppo_mini_batch_size = train_batch_size / 4, as GSPO's recipe", "arXiv 2507.18071"),
    Trap(7, "truncated_sampling_with_correction", ("verl",), lambda c: (c.settings.number(ROLLOUT + "top_p", 1.0) < 1
         or c.settings.number(ROLLOUT + "top_k", -1) > 0) and c.settings.get("algorithm.rollout_correction.rollout_is") is not None,
         "Tokens come from a truncated distribution, the trainer's log-probabilities from the whole one: the sampler correction carries the kept mass.",
         f"{ROLLOUT}top_p=1.0 {ROLLOUT}top_k=-1", "trl#6789, PR#7269; verl docs rollout_corr_math", "mistake",
         number_made=lambda c: (f"100 tokens at top_p {c.settings.number(ROLLOUT + 'top_p', 1.0):g}: "
                                f"{c.settings.number(ROLLOUT + 'top_p', 1.0) ** 100:.3g}", {"ratio_of_100_tokens": c.settings.number(ROLLOUT + "top_p", 1.0) ** 100})),
    Trap(11, "small_group", ("verl", "openrlhf"), lambda c: 2 <= c.words.numbers["group_size"] <= 3 and c.row is not None and getattr(c.row, "is_grouped", False),
         "In small groups most are all right or all wrong: no advantage, no gradient.", "8 answers per prompt or more",
         "CoursIA#10603; guide 1, section 6.3", number_made=_small_group),
    Trap(15, "clip_ratio_alone", ("verl",), lambda c: c.settings.has(ACTOR + "clip_ratio") and not _mode(c).startswith("dppo")
         and not (c.settings.has(ACTOR + "clip_ratio_low") or c.settings.has(ACTOR + "clip_ratio_high")) and c.settings.number(ACTOR + "clip_ratio") != 0.2,
         "clip_ratio alone does nothing: clip_ratio_low and clip_ratio_high are 0.2 by default, not empty, and win.",
         lambda c: f"{ACTOR}clip_ratio_low={c.settings.number(ACTOR + 'clip_ratio'):g} {ACTOR}clip_ratio_high={c.settings.number(ACTOR + 'clip_ratio'):g}",
         "verl ActorConfig, core_algos.compute_policy_loss_vanilla", "mistake",
         meant=lambda c: replace(c.row, clip_low=c.settings.number(ACTOR + "clip_ratio"), clip_high=c.settings.number(ACTOR + "clip_ratio"))),
    Trap(16, "dual_clip_always", ("verl",), lambda c: c.row.surrogate == "dual_clip" and not c.settings.has(ACTOR + "clip_ratio_c") and not c.on_policy,
         "verl's vanilla loss is dual-clipped with c = 3: it differs from PPO and GRPO where A < 0 and the ratio is above 3.",
         f"{ACTOR}clip_ratio_c=1e6 for the papers' clip; nothing if it is wanted", "arXiv 1912.09729; verl core_algos", "note",
         meant=lambda c: replace(c.row, surrogate="clip")),
    Trap(17, "default_estimator_is_gae", ("verl",), lambda c: not c.settings.has("algorithm.adv_estimator") and c.settings.number(ROLLOUT + "n", 1) > 1,
         "Several answers per prompt, and adv_estimator is not written: the default is gae, which needs a critic and makes no groups.",
         "algorithm.adv_estimator=grpo", "verl ppo_trainer.yaml", "mistake",
         meant=lambda c: replace(c.row, baseline="group_mean", scale="group_std", std_ddof=1, std_eps=1e-6, std_guard="add", value_loss="none")),
    Trap(17, "grpo_is_a_token_mean", ("verl",), lambda c: _estimator(c) == "grpo" and _mode(c) == "vanilla" and not c.settings.has(ACTOR + "loss_agg_mode"),
         "loss_agg_mode is not written: token-mean, so a long answer weighs more. GRPO's paper takes the mean per answer first.",
         f"{ACTOR}loss_agg_mode=seq-mean-token-mean for the paper's mean; nothing for DAPO's", "verl actor.yaml; DeepSeekMath section 4.1", "note",
         meant=lambda c: replace(c.row, reduction="mean_per_response")),
    Trap(18, "denominator_is_padded_width", ("verl",), lambda c: c.row.reduction == "sum_over_width",
         "loss_scale_factor is empty: seq-mean-token-sum-norm divides by the padded width of the batch, which changes from batch to batch.",
         lambda c: f"{ACTOR}loss_scale_factor={c.settings.get('data.max_response_length', 512)}", "verl core_algos.agg_loss", number_made=_padded),
    Trap(19, "group_of_one", ("verl",), lambda c: _estimator(c) in GROUP_ESTIMATORS and c.settings.number(ROLLOUT + "n", 1) == 1,
         lambda c: f"rollout.n is 1: {_estimator(c)} has groups of one answer. grpo and rloo then take the raw reward as advantage, rloo_vectorized takes 0.",
         f"{ROLLOUT}n=8", "verl core_algos", "mistake", number_made=_singleton),
    Trap(20, "kl_twice", ("verl",), lambda c: bool(c.settings.get(ACTOR + "use_kl_loss")) and bool(c.settings.get("algorithm.use_kl_in_reward")),
         "The KL to the reference is penalised twice, in the reward and in the loss. verl prints one NOTICE and goes on.",
         "algorithm.use_kl_in_reward=False (GRPO) or actor.use_kl_loss=False (PPO)", "verl utils/config.py validate_config", number_made=_kl_twice),
    Trap(21, "grad_clip_is_not_read", ("verl",), lambda c: c.settings.has(ACTOR + "grad_clip")
         and c.settings.number(ACTOR + "grad_clip") != c.settings.number(ACTOR + "optim.clip_grad", 1.0),
         "actor.grad_clip is accepted and read by nothing; the norm is cut at actor.optim.clip_grad.",
         lambda c: f"{ACTOR}optim.clip_grad={c.settings.number(ACTOR + 'grad_clip'):g}", "verl PR#7923", number_made=_grad_clip_number),
    Trap(21, "clip_grad_is_zero", ("verl",), lambda c: c.settings.number(ACTOR + "optim.clip_grad", 1.0) <= 0,
         "A gradient norm cut at 0 or below is a factor of 0 or less: nothing is learned, or the sign turns.",
         f"{ACTOR}optim.clip_grad=1.0", "verl PR#7923", "mistake", number_made=_norm_number),
    Trap(22, "gamma_and_lambda_are_one", ("verl",), lambda c: _estimator(c) == "gae" and not (c.settings.has("algorithm.gamma") or c.settings.has("algorithm.lam")),
         "gamma = lam = 1 by default (stable-baselines3: 0.99 and 0.95): advantages are the whole return minus the value, with its whole variance.",
         "algorithm.lam=0.95 where the critic is good; gamma 1 is usual for one reward at the end", "verl ppo_trainer.yaml", "note",
         meant=lambda c: replace(c.row, lam=0.95)),
)  # fmt: skip


def _clipped_after(row: Row) -> bool:
    return row.reward_clip == "after_baseline"


OTHER_TRAPS: tuple[Trap, ...] = (
    Trap(23, "reward_clip_after_baseline", ("openrlhf",), lambda c: _clipped_after(c.row),
         lambda c: f"reward.clip_range acts on the reward after the baseline was subtracted: what is cut at {c.row.reward_limit:g} is the advantage.",
         "a wide range (-1e6 1e6), and clip inside the reward function", "OpenRLHF experience_maker",
         lambda c: "warning" if c.settings.has("reward.clip_range") else "note", meant=lambda c: replace(c.row, reward_clip="before_baseline")),
    Trap(23, "filter_by_mean", ("openrlhf",), lambda c: bool(c.settings.get("algo.dynamic_filtering_enable")),
         "Dynamic filtering keeps a group by the mean of its rewards, not by their spread: with partial rewards a group without spread stays.",
         "rewards of 0 and 1, for which both are the same", "OpenRLHF#1270", number_made=_filter),
    Trap(14, "prompt_without_template", ("openrlhf",), lambda c: not c.settings.get("data.apply_chat_template") and not c.settings.get("data.input_template")
         and c.settings.has("data.prompt_dataset"),
         "apply_chat_template is off (the default) and there is no input_template: a chat model sees no turn and often writes no end token.",
         "data.apply_chat_template", "CoursIA PR#11304; OpenRLHF train_ppo_ray"),
    Trap(19, "group_of_one", ("openrlhf",), lambda c: _estimator(c) in ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")
         and c.settings.number("rollout.n_samples_per_prompt", 1) == 1,
         "One answer per prompt has no group; OpenRLHF 0.11 stops with an error, older versions trained on zeros.",
         "rollout.n_samples_per_prompt 8", "OpenRLHF train_ppo_ray", "mistake"),
    Trap(22, "gamma_and_lambda_are_one", ("openrlhf",), lambda c: _estimator(c) == "gae" and not c.settings.has("algo.advantage.lambd"),
         "gamma = lambd = 1 by default: advantages are the whole return minus the value, with its whole variance.",
         "algo.advantage.lambd 0.95 where the critic is good", "OpenRLHF train_ppo_ray", "note", meant=lambda c: replace(c.row, lam=0.95)),
    Trap(27, "last_mini_batch_is_smaller", ("sb3",), lambda c: c.words.numbers["answers_per_generation"] % c.settings.number("batch_size") != 0,
         "batch_size does not divide n_steps * n_envs: the last mini-batch of every epoch is smaller, and standardises its few advantages alone.",
         "a batch_size that divides n_steps * n_envs", "stable-baselines3 ppo.py", number_made=_last_minibatch),
    Trap(27, "no_target_kl", ("sb3",), lambda c: c.settings.get("target_kl") is None,
         "target_kl is empty: all epochs run, however far the policy has moved.", "target_kl=0.02 if approx_kl grows", "stable-baselines3 ppo.py", "note"),
    Trap(27, "standardised_per_mini_batch", ("sb3",), lambda c: bool(c.settings.get("normalize_advantage")),
         "Advantages are standardised in each mini-batch, not over the rollout: what a transition counts depends on its neighbours.",
         "nothing; know it when two implementations are compared", "stable-baselines3 ppo.py", "note", number_made=_sb3_standardised),
    Trap(27, "vec_normalize_has_its_own_gamma", ("sb3", "a2c"), lambda c: c.settings.has("vec_normalize.gamma")
         and c.settings.number("vec_normalize.gamma") != c.settings.number("gamma"),
         "VecNormalize scales rewards by the std of returns at its own gamma, 0.99 whatever the algorithm has.",
         lambda c: f"VecNormalize(env, gamma={c.settings.number('gamma'):g})", "stable-baselines3 vec_normalize.py", "mistake", number_made=_gamma_number),
)  # fmt: skip
