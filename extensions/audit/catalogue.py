"""The catalogue of named mistakes: what each one does to a batch, and what to change.

A mistake here is an edit of a right computation: of the mask, of one term of the loss, of a denominator, of the group
statistics, of the flags in time, of the pairs. The edits themselves stand beside the search that tries them
(search/); this file holds their names and words, in the order of the guide's
own chapters. `python -m extensions.audit --list` prints it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

SEVERITIES = ("note", "warning", "mistake")


class Mistake(NamedTuple):
    what: str
    advice: str


@dataclass(frozen=True)
class Finding:
    """One thing the audit says: name (CATALOGUE or NOTES), severity, evidence in numbers, rows concerned, what to change."""

    name: str
    severity: str
    evidence: str
    rows: tuple[int, ...] = ()
    advice: str = ""

    def as_json(self) -> dict:
        return {
            "name": self.name,
            "severity": self.severity,
            "evidence": self.evidence,
            "rows": list(self.rows[:100]),
            "advice": self.advice,
        }


CATALOGUE: dict[str, Mistake] = {
    # ---- mask, shift, EOS, padding
    "mask_one_step_late": Mistake(
        "the mask that the loss used is one token later than the recorded one",
        "log-probabilities belong to the target token: slice the mask as the labels, mask[:, 1:], not mask[:, :-1]",
    ),
    "mask_one_step_early": Mistake(
        "the mask that the loss used is one token earlier than the recorded one",
        "slice the mask with the labels: position t of the shifted log-probabilities predicts token t + 1",
    ),
    "eos_dropped": Mistake(
        "the real end-of-sequence token is not counted",
        "build the mask from positions or lengths, not from ids: with pad id = EOS id, ids != pad drops the real EOS",
    ),
    "padding_counted": Mistake(
        "slots after the end of an answer take part",
        "select with the response mask before any sum; multiply nothing by a mask",
    ),
    "prompt_counted": Mistake(
        "prompt tokens take part: the attention mask was used as the loss mask",
        "use the response mask in the loss; the attention mask belongs to the model's forward pass",
    ),
    "tool_tokens_counted": Mistake(
        "tokens written by a tool or the environment take part",
        "take the tool mask out of the loss, the KL, the advantages and the denominators alike",
    ),
    "dropped_rows_in_denominator": Mistake(
        "tokens of dropped (truncated) answers are missing above the fraction bar and counted below it",
        "use one mask for the numerator and the denominator",
    ),
    "padding_in_denominator": Mistake(
        "the mean divides by all slots of the padded batch instead of the counted tokens",
        "divide by mask.sum(): (x * mask).mean() depends on how far the batch is padded",
    ),
    "nonfinite_in_masked_slots": Mistake(
        "an unused slot holds NaN or infinity",
        "select with torch.where before any arithmetic: 0 * NaN is NaN, in the loss and in its gradient",
    ),
    "positive_logps": Mistake(
        "a log-probability is above 0",
        "fill unused slots with 0 and leave them out by the mask; a positive fill value reaches every unmasked sum",
    ),
    "tool_tokens_in_gae": Mistake(
        "the recursion of GAE takes tokens that a tool or the environment wrote for steps of the policy",
        "carry the advantage and the next value over such tokens unchanged; a step in time is a token of the policy",
    ),
    "packed_border_counted": Mistake(
        "a packed row is shifted as one sequence: the last token of one answer predicts the first of the next",
        "leave the first token of each segment out of the mask, or shift inside each segment",
    ),
    "mask_not_contiguous": Mistake(
        "the counted tokens of an answer have holes",
        "right if a tool or the environment wrote the tokens in the hole; else build the mask from the answer's length",
    ),
    # ---- reduction and denominators
    "extra_division": Mistake(
        "the loss is divided once more by a whole number: accumulation steps, ranks or micro-batches",
        "a loss that is already normalised over the window must be summed over its micro-batches and ranks, not averaged",
    ),
    "generation_tokens_for_step": Mistake(
        "the loss of one optimiser step is divided by the tokens of the whole generation batch",
        "divide by the tokens that this step accumulates: sum them over its micro-batches and ranks before the first backward",
    ),
    "sum_for_mean": Mistake(
        "a sum stands where a mean belongs: the number of rows or tokens is not divided out",
        "divide by what the declared reduction divides by; else the step size grows with the batch",
    ),
    "loss_sign": Mistake(
        "the whole loss has the wrong sign: the objective is minimised",
        "loss = -objective; a trainer that minimises must be handed the negative surrogate",
    ),
    "reduction_differs": Mistake(
        "the loss is reduced in another way than declared",
        "set the reduction, or declare the one that is used: per-response and token means are different objectives",
    ),
    # ---- ratio and clipping
    "old_logps_recomputed": Mistake(
        "the ratio is exactly 1: old log-probabilities are recomputed with the policy being updated",
        "store old_logps once when the batch is sampled and pass them to every later pass",
    ),
    "old_logps_not_detached": Mistake(
        "the ratio carries no gradient: old log-probabilities are the current ones with their graph",
        "old_logps = logps.detach() on the first pass, stored numbers later",
    ),
    "ratio_detached": Mistake(
        "the value of the loss is right and the policy term has no gradient: the ratio is detached",
        "take detach() (or no_grad) off the current log-probabilities",
    ),
    "ratio_inverted": Mistake("the ratio is old / current instead of current / old", "ratio = exp(logps - old_logps)"),
    "clip_sides_swapped": Mistake(
        "the lower and the upper clip width are exchanged",
        "clip(ratio, 1 - low, 1 + high): the larger width is usually the upper one",
    ),
    "clip_one_sided": Mistake(
        "only one side of the ratio is clipped", "min(r A, clip(r, 1 - low, 1 + high) A) needs both bounds"
    ),
    "clip_lower_bound_wrong": Mistake(
        "the lower bound of the clip is epsilon, not 1 - epsilon", "clamp(ratio, 1 - epsilon, 1 + epsilon)"
    ),
    "clip_without_min": Mistake(
        "the clipped product is used alone, without the minimum of the two",
        "loss = -min(r A, clip(r) A): without the minimum a token pushed the wrong way gets no gradient back",
    ),
    "max_for_min": Mistake(
        "the larger of the two products is taken",
        "the objective takes the minimum; a loss that is already negated takes the maximum: negate once",
    ),
    "min_before_multiplying": Mistake(
        "the minimum is taken between ratio and clipped ratio, before multiplying by the advantage",
        "multiply first: min(r A, clip(r) A); with A < 0 the two orders differ",
    ),
    "advantages_mixed_in_products": Mistake(
        "the two products of the clip have different advantages: one raw, one standardised",
        "standardise the advantages once, before the first product",
    ),
    "clip_part_by_part": Mistake(
        "the clip acts on the ratio of each part of an action, not on their product",
        "sum the log-probabilities of all parts first; one action has one ratio",
    ),
    "dual_clip_on_positive": Mistake(
        "the dual clip's floor c A is used where A > 0 as well", "apply max(., c A) only where A < 0"
    ),
    "sequence_sum_for_mean": Mistake(
        "the ratio of an answer is the exponential of the summed log-ratios, not of their mean",
        "GSPO's ratio is exp(mean_t(l - l0)); the product belongs to RLOO and leaves the band on long answers",
    ),
    "cap_after_exp": Mistake(
        "a limit meant for the log-ratio is applied after the exponential",
        "clamp the log-ratio, then take exp: a large log-ratio overflows before a later clamp can act",
    ),
    "missing_stop_gradient": Mistake(
        "a weight that should be a constant carries gradient", "detach the clipped ratio that multiplies A l"
    ),
    "ratio_differs": Mistake(
        "the ratio is another one than declared", "set the ratio level, or declare the one that is used"
    ),
    "surrogate_differs": Mistake(
        "the surrogate is another one than declared", "set the loss type, or declare the one that is used"
    ),
    "clip_range_differs": Mistake(
        "the clip widths are others than declared",
        "check which option your trainer reads: several have two names for one width",
    ),
    "first_pass_ratio_not_one": Mistake(
        "on the first pass over a batch the ratios are not 1",
        "sampler and trainer disagree: apply the sampling temperature in the trainer, compare the full (not top-k or top-p "
        "renormalised) log-probabilities, keep both in float32",
    ),
    "old_logps_equal_logps": Mistake(
        "on a later pass the stored old log-probabilities equal the current ones exactly",
        "check that old_logps are stored at sampling and not recomputed",
    ),
    "stored_in_bf16": Mistake(
        "every stored log-probability lies on the bfloat16 grid",
        "keep log-probabilities in float32: at -12 a bfloat16 step is 0.0625, a ratio error of 6 %",
    ),
    "clip_widths_unusual": Mistake(
        "the declared clip widths are unusual",
        "check the order of the two widths: low first, high second; c of the dual clip above 1",
    ),
    # ---- KL
    "kl_sign": Mistake(
        "the KL term is subtracted from the loss: distance from the reference is rewarded", "loss = policy_loss + coef * kl"
    ),
    "kl_direction": Mistake(
        "the two policies are exchanged inside the KL estimator",
        "k3 = exp(ref_logps - logps) - (ref_logps - logps) - 1 on samples of the current policy",
    ),
    "kl_ratio_for_log_ratio": Mistake(
        "the ratio stands where the log-ratio belongs inside the KL estimator",
        "k3 takes d = logps - ref_logps: exp(-d) + d - 1",
    ),
    "kl_without_gradient": Mistake(
        "the KL term adds to the value and has no gradient",
        "logps in the KL term must keep their graph; only ref_logps are detached",
    ),
    "kl_estimator_gradient": Mistake(
        "k1 (logps - ref_logps) stands in the loss: its expected gradient is zero, so it restrains nothing",
        "use k2, k3 weighted by the ratio, or put k1 into the reward",
    ),
    "kl_differs": Mistake("the KL term is another one than declared", "set the estimator and its place, or declare them"),
    "beta_twice": Mistake("the coefficient is applied twice", "multiply by beta once, in the loss or in the logged reward"),
    "kl_coef_differs": Mistake(
        "the KL coefficient that reproduces the loss is not the recorded one", "check which option the trainer reads"
    ),
    # ---- group advantages
    "groups_pooled": Mistake(
        "the baseline is taken over the whole batch, not over the answers to each prompt",
        "group by prompt id: a pooled mean makes every answer to an easy prompt good",
    ),
    "groups_assumed_contiguous": Mistake(
        "rewards were cut into groups by position although answers to one prompt do not stand together",
        "group by id, or sort the batch before reshape(-1, G)",
    ),
    "sample_for_population_std": Mistake(
        "the standard deviation divides by G - 1 where G is declared",
        "torch.std has correction=1 by default; pass correction=0, or declare ddof 1",
    ),
    "population_for_sample_std": Mistake(
        "the standard deviation divides by G where G - 1 is declared", "pass correction=1 (numpy: ddof=1), or declare ddof 0"
    ),
    "std_eps_differs": Mistake("the guard added to the std is another one than declared", "set std_eps, or declare it"),
    "advantage_rule_differs": Mistake("advantages follow another rule than declared", "set the estimator, or declare it"),
    "roundoff_std": Mistake(
        "a group whose rewards are all equal has advantages that are not 0: rounding was divided by its own size",
        "treat a group whose rewards are equal as a group without spread; give it exactly 0",
    ),
    "missing_reward_counted": Mistake(
        "a missing reward (NaN) took part in the group's mean as 0",
        "leave the row out of mean and std, and give it advantage 0",
    ),
    "dropped_rows_in_baseline": Mistake(
        "answers without a counted token (empty or dropped as truncated) take part in the group's mean and std",
        "decide it on purpose: leaving them out changes every advantage of the group",
    ),
    "padding_in_whitening": Mistake(
        "the mean of the whitened advantages is taken over padding, their variance over counted tokens",
        "take both over the same mask: whitened advantages have mean 0 and variance 1 on counted tokens",
    ),
    "advantages_aligned_with_time": Mistake(
        "the advantage of answer i was used for position i of every answer: a missing unsqueeze(1)",
        "advantages.unsqueeze(1): shape (N, 1) against (N, T); with N = T the mistake raises no error",
    ),
    "advantage_sign": Mistake("advantages have the opposite sign of the rule", "A = R - baseline"),
    "advantages_of_other_rows": Mistake(
        "rows are trained with the advantage of another row",
        "keep log-probabilities and advantages in one order: shard, sort or permute them together",
    ),
    "advantages_not_used": Mistake(
        "the loss uses other recorded numbers in place of the advantages",
        "pass the advantages to every product of the loss",
    ),
    "std_of_others_is_zero": Mistake(
        "an advantage is divided by the std of the others of its group, which is 0, plus a small guard",
        "leave A = R - mean of the others unscaled where the others have no spread, or use the std of the whole group",
    ),
    "group_of_one": Mistake(
        "a prompt has one answer only: nothing to be compared with",
        "sample at least two answers a prompt, or say what one gets",
    ),
    # ---- time
    "one_flag_for_two": Mistake(
        "a time limit is treated as an end: the value of the last observation is not bootstrapped",
        "keep terminated (no bootstrap) apart from truncated (bootstrap, but cut the recursion)",
    ),
    "shifted_flags": Mistake(
        "the end-of-episode flags are read one step off",
        "flag t belongs to the transition that starts at t; a buffer that stores episode starts needs t + 1",
    ),
    "reset_value_used": Mistake(
        "at a time limit the bootstrap reads the value of the next episode's first observation",
        "keep the true final observation and evaluate the critic on it",
    ),
    "leak_across_episodes": Mistake(
        "the advantage recursion runs across the end of an episode",
        "multiply the carried advantage by 0 at every boundary, truncated ones included",
    ),
    "last_bootstrap_trimmed": Mistake(
        "the last step bootstraps from its own value instead of the value after it",
        "keep T + 1 values: the one after the last step is the last bootstrap",
    ),
    "rewards_one_slot_late": Mistake(
        "slot t holds the reward received before step t", "store the reward of the transition that starts at t"
    ),
    "reward_minus_value": Mistake(
        "the advantage is reward minus value, not return minus value",
        "subtract the value from the return (or use GAE): else only rewarded tokens get credit",
    ),
    "returns_standardised": Mistake(
        "the critic's targets are standardised, and the advantages are right",
        "right only if the critic's outputs are standardised by the same numbers; else targets = advantages + values",
    ),
    "returns_do_not_fit": Mistake(
        "the advantages are right, and the returns beside them are not advantages + values",
        "the critic's target is A + V before the advantages are standardised",
    ),
    "advantages_do_not_fit": Mistake(
        "the returns are right, and the advantages beside them are not returns - values",
        "A = returns - values, standardised afterwards or not at all",
    ),
    "bootstrap_beyond_time_limit": Mistake(
        "the rewards of environments that were not cut off hold a value of the final observation too",
        "add gamma V(final observation) where truncated and not terminated, environment by environment",
    ),
    "score_on_wrong_token": Mistake(
        "the score of the answer is not on its last counted token",
        "put it on the last counted token of each row, found through the mask: the last column is padding in short rows",
    ),
    "flags_missing": Mistake(
        "one end-of-episode flag for two questions",
        "record terminated and truncated, and the value of the true final observation",
    ),
    "reset_rows_counted": Mistake(
        "rows whose action the environment ignored (next-step autoreset) take part", "mask the row after each end"
    ),
    # ---- pairs
    "chosen_rejected_exchanged": Mistake(
        "chosen and rejected answers are exchanged", "check the column order of the data set and of the concatenated batch"
    ),
    "reference_missing": Mistake(
        "the reference log-probabilities are not in the margin",
        "subtract them, or declare a loss without a reference (SimPO, ORPO)",
    ),
    "reference_live": Mistake(
        "the reference equals the policy being trained: the margin is 0 at every step",
        "freeze a copy before training (with adapters: disable them for the reference pass)",
    ),
    "ipo_sum_or_mean": Mistake(
        "IPO on sums where means are declared, or the reverse",
        "the target 1 / (2 beta) means another thing for sums and means",
    ),
    "dpo_mean_for_sum": Mistake(
        "per-token means stand where sums are declared, or the reverse", "DPO's log pi(y | x) is the sum over the answer"
    ),
    "length_of_other_tokens": Mistake(
        "the sum of an answer's log-probabilities and the length it is divided by count different tokens",
        "take both from one mask: (logps * mask).sum() / mask.sum()",
    ),
    "odds_constant": Mistake(
        "the odds are p / (c - p) with a c other than 1: biased where the policy is sure of an answer",
        "odds = s - log(-expm1(s)) is exact up to s = 0, and needs no constant",
    ),
    "smoothing_variant": Mistake(
        "label smoothing follows another variant than declared", "cDPO mixes the flipped loss in, robust DPO subtracts it"
    ),
    "smoothing_reversed": Mistake(
        "the weights of label smoothing are exchanged: the flipped label gets 1 - e",
        "loss = -(1 - e) log s(z) - e log s(-z)",
    ),
    "preference_loss_differs": Mistake(
        "the loss is another type than declared: the option was not passed on",
        "check that loss_type reaches the loss function",
    ),
    "kl_pair_is_own_answer": Mistake(
        "a pair for KTO's KL holds the row's own answer instead of the answer to another prompt",
        "shift the answers by one row inside the batch; reversing an odd batch leaves the middle row with its own answer",
    ),
    "low_accuracy": Mistake(
        "fewer than half of the pairs have a positive margin", "right early on or on hard pairs; else check the column order"
    ),
    # ---- metrics, values, entropy, logs
    "entropy_sign": Mistake("the entropy bonus is added to the loss: entropy is pushed down", "loss = ... - coef * entropy"),
    "value_min_for_max": Mistake(
        "the smaller of the two squared errors is taken", "the clipped value loss takes the larger one"
    ),
    "clip_fraction_differs": Mistake(
        "the reported clip fraction follows another definition",
        "say which one is logged: ratio outside, clipped branch, or no gradient",
    ),
    "flat_log_mean": Mistake(
        "a logged mean weighs an optimiser step by its number of micro-batches",
        "average each window first, then the windows",
    ),
    "log_steps_not_increasing": Mistake(
        "the step column of the log repeats, skips or goes back", "log with the optimiser step as x, once a step"
    ),
    "gradient_value_disagree": Mistake(
        "the gradient fits and the value does not: something is added to or multiplied into what is reported",
        "record the value that backward() is called on, or the coefficient of the missing term",
    ),
    "value_decides_nothing": Mistake(
        "no usual hypothesis gives the reported value, and so many unusual ones do that none is evidence",
        "record dloss_dlogps, and the settings (beta, clip_low, clip_high, accumulation_steps)",
    ),
    "gradient_differs_in_rows": Mistake(
        "the gradient of some rows is not that of the objective which fits all the others",
        "look at these rows: what the trainer did with them is not in the recording",
    ),
    "unexplained_factor": Mistake(
        "the gradient is that of a known objective times a factor that no recorded count explains",
        "record num_items_in_batch, budget (max_completion_length), accumulation_steps, world_size, or the loss scale",
    ),
    "nothing_checked": Mistake(
        "nothing in this recording could be recomputed, so nothing was checked",
        "record what a check needs: logps, mask, advantages and loss with dloss_dlogps; --recipes prints how",
    ),
    "final_value_missing": Mistake(
        "an episode was cut inside the buffer, and the critic's value of its true final observation is not recorded",
        "record terminal_values (or next_values before any reset)",
    ),
    "not_reproduced": Mistake(
        "no hypothesis reproduces what was reported",
        "record what is listed as missing; an objective outside the table cannot be named (see NOT_EXPRESSED in objectives)",
    ),
    "declared_not_seen": Mistake(
        "what was declared does not reproduce what was reported", "compare the choices listed for the best match"
    ),
}

STEP_MISTAKES: dict[str, Mistake] = {
    "mean_of_means": Mistake(
        "each micro-batch is divided by its own count and the means are averaged: short ones weigh too much",
        "sum the counts of the whole step over ranks and micro-batches first (all_reduce), and divide by that",
    ),
    "local_count": Mistake(
        "each rank divides by its own count, not by the step's",
        "all_reduce the count before the first backward, and divide by it (times world_size under an average)",
    ),
    "forgot_world_size": Mistake(
        "the step's count is divided by, and the average over ranks divides by their number once more",
        "multiply the loss by world_size where gradients are averaged, or sum them",
    ),
    "double_division": Mistake(
        "the step's count is divided by, and the number of micro-batches as well",
        "take out one of the two: many frameworks divide by gradient_accumulation_steps themselves",
    ),
    "no_micro_division": Mistake(
        "means of micro-batches are added up, not averaged",
        "divide by the count of the step; a mean a micro-batch also needs 1 / accumulation_steps",
    ),
    "local_padded_width": Mistake(
        "a micro-batch's own padded width stands where one constant should",
        "divide by one constant (the generation budget), not by the width a micro-batch happens to be padded to",
    ),
    "local_group_statistics": Mistake(
        "advantages use the part of a group that lies on this rank or in this micro-batch, not the whole group",
        "gather (prompt id, reward) over the ranks and take mean and std of each whole group",
    ),
    "local_whitening": Mistake(
        "advantages are standardised over this rank's or micro-batch's rows, not over the step's",
        "combine count, mean and sum of squared deviations over the ranks, then standardise",
    ),
    "clip_before_reduce": Mistake(
        "each rank clips its own gradient, and the clipped ones are averaged",
        "reduce first, then clip the one gradient that the optimiser takes",
    ),
}
"""Mistakes of a whole step over ranks and micro-batches, that no file alone can show (step/denominators.py)."""

MISTAKES = {**CATALOGUE, **STEP_MISTAKES}

NOTES: dict[str, str] = {
    "loss_zero_healthy": "a loss of 0 with a gradient: centred advantages and ratios of 1 cancel in the value, not in the "
    "gradient",
    "no_signal": "no gradient because no group has a spread in its rewards: nothing to learn from, and nothing broken",
    "equal_groups": "groups with equal rewards have advantage 0: expected late in training, and early on hard prompts",
    "negative_k1": "a mean of k1 below 0 is noise of a small sample: k3 on the same tokens is positive",
    "prompt_cancels": "prompt log-probabilities cancel in a DPO margin when both answers share the prompt, so summing them "
    "changes nothing",
    "k3_gradient": "as in the paper, nothing to change: k3 in the loss without a ratio has the gradient of KL(ref || policy) on average; its value estimates "
    "KL(policy || ref)",
    "divided_by_whole_number": "the loss equals the row divided by a whole number: right if that is the number of "
    "accumulation steps",
    "unnamed_combination": "every choice is a known one, and no named row of the table combines them this way",
    "sampler_correction_absent": "the sampler's log-probabilities are recorded and the loss does not correct for them: right if "
    "that is meant, else one code path of the trainer leaves the correction out",
    "log_density_above_0": "log-probabilities above 0 are densities of real-valued actions: nothing is wrong",
}


def finding(name: str, severity: str, evidence: str, rows=(), advice: str | None = None) -> Finding:
    """A finding with the catalogue's words; `evidence` says it in this batch's numbers."""
    if advice is None:
        advice = MISTAKES[name].advice if name in MISTAKES else ""
    what = MISTAKES[name].what if name in MISTAKES else NOTES[name]
    return Finding(name, severity, f"{what}. {evidence}".strip(), tuple(int(row) for row in rows), advice)
