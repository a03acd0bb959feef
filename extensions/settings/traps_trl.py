"""Traps of TRL 1.16.0."""

from __future__ import annotations

import math
from dataclasses import replace

from extensions.objectives import PREFERENCE_ROWS, evaluate
from extensions.settings.trap import Case, Trap, compared, cosine, evaluated, first_pass, silent_share, small, temperature_numbers

SUCCESS = 0.18  # share of right answers at which the silent groups are counted
NATS = 0.012  # gap between sampler and trainer per token that was reported for vLLM


def _loss(case: Case) -> object:
    return case.settings.get("loss_type")


def _is(case: Case, name: str) -> bool:
    return _loss(case) in (name, [name])


def _clip_keys(case: Case) -> list[str]:
    return [key for key in ("epsilon", "epsilon_high", "delta") if case.settings.has(key)]


def _corrected(case: Case) -> bool:
    return bool(case.settings.get("use_vllm") and case.settings.get("vllm_importance_sampling_correction", True))


def _kept_mass(case: Case) -> float | None:
    """Upper bound of the mass that the sampler kept; None where the settings do not bound it."""
    top_p = case.settings.number("top_p", 1.0)
    return top_p if top_p < 1 else None


def _truncated(case: Case) -> bool:
    s = case.settings
    return s.number("top_p", 1.0) < 1 or s.number("top_k", 0) > 0 or s.number("min_p", 0) > 0


def _truncation_number(case: Case) -> tuple[str, dict[str, float]]:
    kept = _kept_mass(case)
    if kept is None:
        return "top_k and min_p keep a share that differs from token to token", {}
    made = {"ratio_per_token": kept, "ratio_of_100_tokens": kept**100}
    return f"every kept token's ratio is {kept:g} where the whole top_p mass is kept; 100 tokens: {kept**100:.3g}", made


def _small_group_number(case: Case) -> tuple[str, dict[str, float]]:
    group = int(case.words.numbers["group_size"])
    share = silent_share(group, SUCCESS)
    text = f"{SUCCESS:g}^{group} + {1 - SUCCESS:g}^{group} = {share:.3f} of the groups are all right or all wrong at {SUCCESS:.0%} success"
    return text, {"silent_groups": share}


def _micro_batches(case: Case) -> tuple[str, dict[str, float]]:
    """The small batch in two micro-batches of three answers: mean of their means against the mean of all."""
    row = replace(case.row, kl="none", kl_coef=0.0, accumulation="none", entropy_coef=0.0)
    batch, _ = small()
    result = evaluate(row, batch)
    whole = result.dloss_dlogps
    weights = result.weights.clone()
    halves = whole.clone()
    for rows in (slice(0, 3), slice(3, 6)):
        counted = float(batch.mask[rows].sum())
        halves[rows] = whole[rows] * float(batch.mask.sum()) / counted / 2
        weights[rows] = weights[rows] * float(batch.mask.sum()) / counted / 2
    made = {"loss": float((weights * result.token_losses).sum()), "loss_meant": float(result.loss),
            "gradient_norm": float(halves.norm()), "gradient_norm_meant": float(whole.norm()), "cosine": cosine(halves, whole)}  # fmt: skip
    text = (
        f"in two micro-batches loss {made['loss']:.6f}, gradient norm {made['gradient_norm']:.6f}; in one "
        f"{made['loss_meant']:.6f}, {made['gradient_norm_meant']:.6f}; cosine {made['cosine']:.6f}"
    )
    return text, made


def _on_policy_number(case: Case) -> tuple[str, dict[str, float]]:
    """Gradient at ratio 1 with the clip as configured and with none at all."""
    batch = first_pass(small()[0])
    wide = replace(case.row, clip_low=1.0, clip_high=1e9) if case.row.surrogate != "cispo" else case.row
    text, made = compared(case.row, wide, batch)
    return "with every ratio 1, clip as configured and no clip at all: " + text, made


def _sequence_number(case: Case) -> tuple[str, dict[str, float]]:
    batch = first_pass(small()[0])
    text, made = compared(case.row, replace(case.row, ratio="token"), batch)
    return "with every ratio 1, against token ratios: " + text, made


def _temperature(case: Case) -> tuple[str, dict[str, float]]:
    kl, variance = temperature_numbers(case.settings.number("temperature", case.settings.number("rollout.temperature", 1.0)))
    text = f"on p = (.5, .25, .15, .1) a sampler at this temperature is KL {kl:.4f} away; Var of the raw ratio {variance:.4f} a token"
    return text, {"kl_sampler_policy": kl, "ratio_variance": variance}


def _mask_number(case: Case) -> tuple[str, dict[str, float]]:
    cap = case.settings.number("vllm_importance_sampling_clip_max", math.inf)
    tokens = math.log(cap) / NATS if 0 < cap < math.inf else math.inf
    text = f"a gap of {NATS} nats a token passes the cap {cap:g} after ln {cap:g} / {NATS} = {tokens:.0f} tokens"
    return text, {"tokens_to_the_cap": tokens}


def _mask_truncated_meant(case: Case):
    return replace(case.row, rows_counted="nonempty")


def _beta_number(case: Case) -> tuple[str, dict[str, float]]:
    beta, standard = case.row.beta, 0.1
    loss, gradient = evaluated(case.row)
    loss_standard, gradient_standard = evaluated(replace(case.row, beta=standard))
    made = {"loss": loss, "loss_at_0.1": loss_standard, "gradient_norm": float(gradient.norm()),
            "gradient_norm_at_0.1": float(gradient_standard.norm())}  # fmt: skip
    text = (
        f"at beta {beta:g} loss {loss:.6f}, gradient norm {made['gradient_norm']:.6f}; at 0.1 {loss_standard:.6f}, "
        f"{made['gradient_norm_at_0.1']:.6f}"
    )
    return text, made


def _ipo_sums(case: Case):
    return replace(PREFERENCE_ROWS["ipo"], beta=case.row.beta)


def _cdpo(case: Case):
    return replace(PREFERENCE_ROWS["cdpo"], beta=case.row.beta, label_smoothing=case.settings.number("label_smoothing"))


_RL = ("grpo", "rloo")
TRL_TRAPS: tuple[Trap, ...] = (
    Trap(1, "dr_grpo_keeps_std", ("grpo",), lambda c: _loss(c) == "dr_grpo" and c.row.scale != "none",
         'loss_type "dr_grpo" changes the reduction alone. The advantages are still divided by a std, which Dr. GRPO leaves out: half a Dr. GRPO.',
         'scale_rewards="none"', "arXiv 2503.20783 section 3.2; TRL GRPOConfig.scale_rewards; TRL docs paper_index", "mistake",
         meant=lambda c: replace(c.row, scale="none")),
    Trap(2, "dapo_is_only_a_denominator", ("grpo",), lambda c: _loss(c) == "dapo" and not c.settings.has("epsilon_high"),
         'loss_type "dapo" is the token mean alone. The upper clip stays 0.2 (the paper: 0.28), groups without spread stay, no length penalty.',
         "epsilon_high=0.28, and get_soft_overlong_punishment as a reward function; dynamic sampling is not in TRL",
         "arXiv 2503.14476 section 3; trl#4764, trl#3708",
         lambda c: "warning" if c.settings.has("loss_type") and not c.on_policy else "note",
         meant=lambda c: replace(c.row, clip_high=0.28, group_filter="spread")),
    Trap(3, "cispo_cap_below_one", ("grpo",), lambda c: _loss(c) == "cispo" and c.row.clip_high < 0,
         lambda c: f"TRL's CISPO weight is min(ratio, epsilon_high), without 1 +. With epsilon_high {1 + c.row.clip_high:g} every token's "
         f"weight is {1 + c.row.clip_high:g} at most, on-policy exactly that instead of 1.",
         "epsilon_high=5.0", "arXiv 2506.13585; TRL GRPOConfig.epsilon_high", "mistake",
         meant=lambda c: replace(c.row, clip_high=4.0)),
    Trap(4, "clip_without_effect", _RL, lambda c: c.on_policy,
         lambda c: "One update per generation batch: every ratio is 1, so "
         + (", ".join(_clip_keys(c)) or "epsilon") + " does nothing, and clip_ratio 0 is right.",
         "num_iterations=2 or steps_per_generation above gradient_accumulation_steps, if reuse is wanted; else nothing",
         "trl#3120, verl#1477, minimind#775", lambda c: "warning" if _clip_keys(c) and _loss(c) != "cispo" else "note",
         number_made=_on_policy_number),
    Trap(5, "sequence_ratio_on_policy", ("grpo",), lambda c: c.on_policy and c.row.ratio == "sequence_mean",
         "GSPO's ratio of whole answers is 1 when every batch is used once: value and gradient are those of token ratios.",
         "steps_per_generation=4 (as GSPO's recipe) or num_iterations=2", "arXiv 2507.18071; TRL docs paper_index",
         number_made=_sequence_number),
    Trap(6, "no_reference", ("grpo",), lambda c: not c.row.kl_coef,
         "beta is 0 (the default): no KL term, no reference model in memory, and no `kl` in the log.",
         "beta=0.04 for DeepSeekMath's GRPO, or nothing: DAPO and Dr. GRPO have none", "TRL GRPOConfig.beta", "note",
         meant=lambda c: replace(c.row, kl_coef=0.04)),
    Trap(6, "kl_times_ratio", ("grpo",), lambda c: c.row.kl_coef > 0 and c.row.kl_weight == "ratio" and not c.settings.has("use_bias_correction_kl"),
         "The KL term is k3 * ratio, with gradient through the ratio (use_bias_correction_kl, default True): its mean gradient is that of "
         "KL(policy || reference). The paper's k3 alone gives that of KL(reference || policy).",
         "use_bias_correction_kl=False for the paper's form; nothing for the unbiased one", "trl PR#6503", "note",
         meant=lambda c: replace(c.row, kl_weight="none")),
    Trap(7, "truncated_sampling_with_correction", _RL, lambda c: _truncated(c) and _corrected(c),
         "Tokens come from a truncated distribution (top_p, top_k, min_p), the trainer's log-probabilities from the whole one: the "
         "sampler correction carries the kept mass, token by token.",
         "top_p=1.0, top_k=0, min_p=None; or vllm_importance_sampling_correction=False", "trl#6789, PR#7269", "mistake",
         number_made=_truncation_number),
    Trap(8, "temperature_not_one", _RL, lambda c: c.settings.number("temperature", 1.0) not in (0.0, 1.0),
         "The sampler's distribution is softmax(logits / T). TRL 1.16 divides its logits by T too, so the policy that is trained is the one "
         "at T; a log-probability computed elsewhere at T = 1 gives a first ratio that is not 1.",
         "temperature=1.0, or divide by T everywhere, evaluation and logged KL included", "trl#4159", "note",
         number_made=_temperature),
    Trap(9, "long_answers_are_dropped", ("grpo",), lambda c: _corrected(c) and str(c.settings.get("vllm_importance_sampling_mode")).startswith("sequence_mask")
         and c.settings.number("max_completion_length", math.inf) > _mask_number(c)[1]["tokens_to_the_cap"],
         "The sampler correction is of whole answers: above the cap the answer's loss is 0. A small gap per token adds up over a long answer.",
         'vllm_importance_sampling_mode="token_truncate", or a lower gap (same precision on both sides); watch sampling/importance_sampling_ratio',
         "trl#4772; TRL GRPOConfig.vllm_importance_sampling_mode", number_made=_mask_number),
    Trap(10, "depends_on_micro_batches", ("grpo",), lambda c: _loss(c) == "bnpo" and c.settings.whole("gradient_accumulation_steps", 1) > 1,
         "bnpo divides by the tokens of each micro-batch, then by the number of micro-batches: the gradient depends on how answers fall into them.",
         'loss_type="dapo", whose denominator is that of the whole step', "TRL GRPOTrainer._compute_loss", number_made=_micro_batches),
    Trap(11, "small_group", _RL, lambda c: c.words.numbers["group_size"] <= 3,
         "In small groups most are all right or all wrong: no advantage, no gradient.",
         "num_generations=8 or more, or prompts nearer to 50 % success", "CoursIA#10603; guide 1, section 6.3",
         lambda c: "warning" if c.settings.has("num_generations") else "note", number_made=_small_group_number),
    Trap(13, "dropped_rows_still_count", _RL, lambda c: bool(c.settings.get("mask_truncated_completions")),
         lambda c: "Answers that were cut off lose their tokens, but their rewards stay in the group's mean and std"
         + (", and their rows stay in the number of answers that the loss is divided by." if c.settings.get("loss_type") not in ("dapo", "cispo", "vespo") else "."),
         "look at completions/clipped_ratio; where it is large raise max_completion_length instead", "TRL GRPOTrainer._compute_loss; the audit's dropped_rows_in_denominator",
         meant=_mask_truncated_meant),
    Trap(14, "prompt_without_template", ("grpo", "rloo"), lambda c: c.settings.get("prompt_form") == "text",
         "The prompt is a text, so no chat template is applied: a chat model sees no turn and often writes no end token. clipped_ratio near 1.",
         'give the prompt as messages: [{"role": "user", "content": question}]', "CoursIA PR#11304"),
    Trap(24, "label_smoothing_ignored", ("pairs",), lambda c: c.settings.trainer.name == "trl.DPOConfig" and c.settings.number("label_smoothing") > 0
         and _is(c, "sigmoid"),
         "DPOTrainer's sigmoid loss does not read label_smoothing: this is plain DPO.",
         'loss_type="robust" (unbiased) for flipped labels, or drop the setting', "TRL DPOTrainer._compute_loss", "mistake", meant=_cdpo),
    Trap(24, "ipo_of_means", ("pairs",), lambda c: c.settings.trainer.name == "trl.DPOConfig" and _is(c, "ipo"),
         "TRL's IPO takes per-token means; the paper's margin is one of whole answers. The same beta means another target.",
         "choose beta for means of tokens: the target 1 / (2 beta) is a margin per token", "arXiv 2310.12036 equation 17; TRL DPOTrainer._compute_loss",
         meant=_ipo_sums),
    Trap(25, "simpo_adds_nll", ("pairs",), lambda c: c.settings.trainer.name == "trl.CPOConfig" and _loss(c) == "simpo" and c.row.sft_coef > 0,
         "SimPO has no likelihood term. CPOTrainer adds cpo_alpha * NLL of the chosen answers, and cpo_alpha is 1 by default.",
         "cpo_alpha=0.0", "arXiv 2405.14734; TRL CPOConfig", lambda c: "note" if c.settings.has("cpo_alpha") else "mistake",
         meant=lambda c: replace(c.row, sft_coef=0.0)),
    Trap(26, "beta_and_loss", ("pairs",), lambda c: c.row.loss in ("sigmoid", "cdpo", "robust") and c.settings.has("beta") and c.row.beta != 0.1,
         "beta sets how far the optimum lies from the reference: larger beta, closer. It also scales the margin inside the loss, so a smaller "
         "loss at a larger beta is no better fit. Never compare losses across beta.",
         "compare accuracy of pairs, or KL and reward, not the loss", "ms-swift#7285, LLMs-from-scratch PR#818, smol-course PR#307", "note",
         number_made=_beta_number),
    Trap(0, "luspo_without_sequence_ratio", ("grpo",), lambda c: _loss(c) == "luspo" and c.row.ratio == "token",
         "LUSPO is made for ratios of whole answers; with token ratios this is a sum over tokens per answer, clipped token by token.",
         'importance_sampling_level="sequence"', "TRL GRPOConfig.loss_type", meant=lambda c: replace(c.row, ratio="sequence_mean")),
    Trap(0, "sequence_ratio_with_token_mean", ("grpo",), lambda c: c.row.ratio == "sequence_mean" and _loss(c) in ("dapo", "bnpo", "dr_grpo", "cispo"),
         "GSPO's ratio of whole answers is made for the mean per answer. With this loss_type a long answer weighs more; TRL warns as well.",
         'loss_type="grpo"', "arXiv 2507.18071; TRL GRPOTrainer", meant=lambda c: replace(c.row, reduction="mean_per_response")),
)  # fmt: skip
