"""The one table of array names: what a recorded batch may hold, what else trainers call it, its shape, its range.

A new name is an entry of FIELDS, or an alias in one. The audit's checks and --help, and the reader of
`extensions.objectives --batch`, are made from this table; nothing is typed a second time.

Letters: N rows (answers), T padded width, M rows of the generation batch that a micro-batch was cut from, P pairs, F reward
functions, V vocabulary, E environments, G parameters.
"""

from __future__ import annotations

import difflib
import math
from typing import Iterable, NamedTuple

INF = math.inf


class Field(NamedTuple):
    """One role of an array. kind: real, flag (0 and 1), whole, ids (whole numbers or strings), setting or reported (one number).

    shape: letters as above; "N T+" has at least T columns. low, high: the range of a setting.
    """

    name: str
    aliases: tuple[str, ...]
    kind: str
    shape: str
    meaning: str
    low: float = -INF
    high: float = INF
    may_be_infinite: bool = False


def _real(name: str, aliases: str, shape: str, meaning: str) -> Field:
    return Field(name, tuple(aliases.split()), "real", shape, meaning)


def _flag(name: str, aliases: str, shape: str, meaning: str) -> Field:
    return Field(name, tuple(aliases.split()), "flag", shape, meaning)


def _whole(name: str, aliases: str, shape: str, meaning: str, kind: str = "whole") -> Field:
    return Field(name, tuple(aliases.split()), kind, shape, meaning)


def _setting(name: str, aliases: str, meaning: str, low: float = -INF, high: float = INF, infinite: bool = False) -> Field:
    return Field(name, tuple(aliases.split()), "setting", "1", meaning, low, high, infinite)


def _reported(name: str, aliases: str, meaning: str, shape: str = "1") -> Field:
    return Field(name, tuple(aliases.split()), "reported", shape, meaning)


_TOKEN = (
    _real(
        "logps",
        "per_token_logps log_prob log_probs logprobs action_log_probs token_logps new_logps new_logprobs newlogprob new_log_prob "
        "new_log_probs curr_logprobs current_logps pi_logprobs policy_logprobs trainer_logprobs policy_logps actions_log_prob",
        "N T",
        "log-probability of each token under the policy being updated",
    ),
    _real(
        "old_logps",
        "old_per_token_logps old_log_probs old_log_prob old_logprobs old_logp old_action_log_probs logprobs_old prev_logprobs "
        "prox_logp proximal_logprobs pi_old_logprobs old_actions_log_prob old_actions_log_probs logp_old b_logprobs",
        "N T",
        "the same under the policy that the ratio is taken against",
    ),
    _real(
        "ref_logps",
        "ref_per_token_logps ref_log_prob ref_log_probs ref_logprobs ref_logp base_action_log_probs base_log_probs "
        "reference_policy_logprobs reference_logprobs reference_logps",
        "N T",
        "the same under the reference policy",
    ),
    _real(
        "sampler_logps",
        "rollout_logps sampling_per_token_logps rollout_per_token_logps rollout_log_probs rollout_log_prob rollout_logprobs vllm_logprobs "
        "vllm_log_probs generation_logprobs inference_logprobs infer_logprobs infer_log_probs behave_logprobs "
        "behavior_logprobs behav_logp",
        "N T",
        "the same as the sampler (an inference engine) reported it",
    ),
    _real(
        "sampler_weights",
        "importance_sampling_ratio rollout_is_weights vllm_is_ratio is_weights tis_weights tis_imp_ratio sampler_ratio",
        "N, N 1 or N T",
        "weight that corrects the sampler's log-probabilities to the trainer's",
    ),
    _flag(
        "mask",
        "completion_mask response_mask response_masks final_response_mask action_mask loss_mask loss_masks token_mask",
        "N T",
        "tokens that count in the loss, the real EOS included",
    ),
    _flag("attention_mask", "", "N T+", "tokens that are no padding; prompt and answer, or the answer alone"),
    _flag("tool_mask", "", "N T", "1 on tokens that the model wrote, 0 on a tool's"),
    _whole("completion_ids", "responses response_ids response_tokens response_tensors", "N T", "token ids of the answers"),
    _whole("input_ids", "", "N T+", "token ids of prompt and answer"),
    _flag("selected_tokens", "", "N T", "tokens that a selection kept in the loss"),
    _whole("segment_ids", "packed_ids sequence_ids", "N T", "which answer a token of a packed row belongs to"),
    _whole("position_ids", "", "N T", "position of a token in its own sequence"),
    _real("token_level_rewards", "per_token_rewards", "N T", "reward of each token as the advantages read it"),
    _real("token_level_scores", "", "N T", "the same before a KL is taken off"),
    _real("values", "old_values b_values pi_values phi_old_values", "N T", "critic when the batch was sampled"),
    _real("vpreds", "value_preds new_values newvalue phi_values", "N T", "critic being updated"),
    _real("returns", "value_targets target_values b_returns", "N T", "targets of the critic"),
    _real("entropies", "entropy token_entropies per_token_entropies", "N T", "entropy of the policy at each token"),
    _real("loss_mat", "per_token_loss token_losses", "N T", "loss of each token before any mean"),
    _real("dloss_dlogps", "grad_logps logps_grad", "N T", "gradient of the loss with respect to logps: decides the most"),
    _real("dloss_dvpreds", "", "N T", "gradient of the loss with respect to vpreds"),
    _real("dloss_dentropies", "", "N T", "gradient of the loss with respect to entropies"),
    _real("dloss_dloss_mat", "", "N T", "gradient of the loss with respect to loss_mat"),
    _real("backward_dlogps", "", "N T", "gradient that backward() brought to logps, where that is another one"),
    _real("dkl_dlogps", "", "N T", "gradient of the KL term with respect to logps"),
    _real("logits", "", "N T V", "logits of the policy"),
    _real("ref_logits", "", "N T V", "logits of the reference"),
)
_ROW = (
    _real("advantages", "b_advantages advs", "N or N T", "as the loss used them"),
    _real("advantages_raw", "raw_advantages", "N or N T", "before they were standardised"),
    _real("rewards", "scores reward response_level_rewards", "N", "reward of each answer"),
    _real("rewards_per_func", "", "N F", "reward of each reward function"),
    _real("reward_weights", "", "F", "weight of each reward function"),
    _real("reward_baselines", "", "N", "reward of the greedy answer"),
    _whole("group_ids", "uid uids prompt_index index", "N", "equal for answers to the same prompt", "ids"),
    _whole("prompt_lengths", "prompt_lens", "N", "tokens of the prompt"),
    _whole("lengths", "completion_lengths response_lengths response_length", "N", "tokens of the answer"),
    _flag("row_truncated", "is_truncated", "N", "answers cut at the length limit"),
    _whole("micro_batch_ids", "microbatch_ids", "N", "micro-batch of each row"),
    _real("seq_logps", "sequence_logps", "N", "log-probability of the whole answer"),
    _real("ref_seq_logps", "", "N", "the same under the reference"),
    _real("gen_rewards", "", "M", "rewards of the generation batch"),
    _real("gen_rewards_per_func", "", "M F", "rewards per function of the generation batch"),
    _whole("gen_group_ids", "", "M", "groups of the generation batch", "ids"),
    _real("gen_advantages", "", "M", "advantages of the generation batch"),
    _whole("gen_lengths", "", "M", "lengths in the generation batch"),
    _real("gen_kl", "", "M", "sum over the answer of old - ref log-probability"),
    _whole("row_ids", "", "N", "row of the generation batch that each row is"),
)
_ENVIRONMENT = (
    _flag("terminated", "terminations", "T E", "the episode really ended: no bootstrap"),
    _flag("truncated", "truncations", "T E", "the episode was cut: bootstrap"),
    _flag("boundary", "done dones", "T E", "either: the recursion stops"),
    _real("next_values", "", "T E", "critic at the true next observation, before any reset"),
    _flag("episode_starts", "", "T E", "first step of an episode"),
    _real("last_values", "", "E", "critic after the last step"),
    _flag("last_dones", "", "E", "whether the last step ended an episode"),
    _real("terminal_values", "final_values", "T E", "critic at the final observation of a cut episode"),
    _real("env_rewards", "", "T E", "rewards as the environment gave them"),
    _real("discounts", "", "T E", "discount of each step"),
    _flag("reset_rows", "autoreset is_autoreset", "N", "rows that only reset an environment"),
    _real("ratio", "rho ratios", "N T", "ratios, where no log-probabilities were recorded"),
    _real("dloss_dratio", "", "N T", "gradient of the loss with respect to ratio"),
)
_PAIRS = (
    _real("chosen_logps", "policy_chosen_logps chosen_seq_logps", "P", "sum over the chosen answer, policy"),
    _real("rejected_logps", "policy_rejected_logps rejected_seq_logps", "P", "sum over the rejected answer, policy"),
    _real("ref_chosen_logps", "reference_chosen_logps", "P", "sum over the chosen answer, reference"),
    _real("ref_rejected_logps", "reference_rejected_logps", "P", "sum over the rejected answer, reference"),
    _whole("chosen_lengths", "", "P", "tokens of the chosen answer"),
    _whole("rejected_lengths", "", "P", "tokens of the rejected answer"),
    _real("dloss_dchosen_logps", "", "P", "gradient of the loss with respect to chosen_logps"),
    _real("dloss_drejected_logps", "", "P", "gradient of the loss with respect to rejected_logps"),
    _flag("labels", "", "N", "KTO: desirable answers"),
    _real("kl_seq_logps", "policy_KL_logps", "K", "KTO: sums of the mismatched pairs, policy"),
    _real("ref_kl_seq_logps", "reference_KL_logps", "K", "KTO: the same, reference"),
)
_NUMBERS = (
    _reported("accuracy", "rewards/accuracies accuracies", "logged share of positive margins"),
    _reported("margin", "rewards/margins margins", "logged mean margin"),
    _reported("loss", "pg_loss", "the value that backward() is called on"),
    _reported("kl", "approx_kl mean_kl", "reported KL", "1, N or N T"),
    _reported(
        "clip_fraction",
        "clip_ratio/region_mean clip_ratio actor/pg_clipfrac train/clip_fraction pg_clipfrac",
        "reported share of clipped tokens",
    ),
    _reported("reported_entropy_loss", "entropy_loss", "reported entropy loss"),
    _reported("logged_mean", "", "a logged mean over log_values"),
    _setting("beta", "kl_coef", "KL coefficient, or DPO's beta", 0),
    _setting("clip_low", "epsilon epsilon_low eps_clip clip_ratio_low clip_range", "1 - lower bound of the ratio", 0, INF, True),
    _setting("clip_high", "epsilon_high eps_clip_higher clip_ratio_high", "upper bound of the ratio - 1", -1, INF, True),
    _setting("ratio_cap", "delta c_clip clip_ratio_c", "cap of a dual or two-sided clip", 0, INF, True),
    _setting("value_clip", "clip_range_vf cliprange_value value_clip_range", "width of the critic's clip", 0, INF, True),
    _setting("value_coef", "vf_coef", "coefficient of the critic's loss", 0),
    _setting("entropy_coef", "ent_coef entropy_coeff", "coefficient of the entropy"),
    _setting("num_items_in_batch", "batch_num_tokens", "tokens of the optimiser step, over all ranks", 0),
    _setting("global_batch_size", "window_rows", "rows of the optimiser step, over all ranks", 0),
    _setting("window_tokens", "", "tokens of the optimiser step as this rank sees it", 0),
    _setting("accumulation_steps", "gradient_accumulation_steps current_gradient_accumulation_steps", "micro-batches a step", 1, 1e12),
    _setting("world_size", "num_processes dp_size", "ranks", 1, 1e12),
    _setting("rank", "process_index", "number of this rank, from 0", 0, 1e12),
    _setting("micro_batch", "", "number of this micro-batch within its optimiser step, from 0", 0, 1e12),
    _setting("step", "global_step", "optimiser steps before this one", 0, 1e15),
    _setting("steps_per_generation", "", "optimiser micro-steps per generation batch", 1, 1e12),
    _setting("budget", "max_completion_length loss_scale_factor", "constant that a sum is divided by", 1, 1e12),
    _setting("temperature", "", "sampling temperature", 0),
    _setting("top_k", "", "sampling top-k", 0),
    _setting("pad_id", "pad_token_id", "id of padding"),
    _setting("gamma", "", "discount", 0, 1),
    _setting("lam", "gae_lambda lmbda lambda_", "lambda of GAE", 0, 1),
    _setting("pass_index", "pass epoch_of_batch pass_over_generation", "passes over this batch before this one", 0),
    _setting("max_grad_norm", "", "norm that the gradient is clipped to", 0, INF, True),
    _real("rank_gradient", "", "G", "gradient of the parameters that this rank hands to the reduction, before any clip"),
    _real("step_gradient", "", "G", "gradient of the parameters that the optimiser took, the same on every rank"),
    _whole("eos_id", "eos_token_id", "1 or K", "id or ids that end an answer"),
)
_LOGS = (
    _whole("log_steps", "", "S", "steps of a log"),
    _real("log_values", "", "S", "logged values"),
    _whole("log_windows", "", "S", "optimiser step of each logged value"),
)
SECTIONS: dict[str, tuple[Field, ...]] = {
    "per token": _TOKEN,
    "per answer, and the generation batch": _ROW,
    "environments": _ENVIRONMENT,
    "pairs": _PAIRS,
    "numbers: reported values and settings": _NUMBERS,
    "logs": _LOGS,
}

FIELDS: dict[str, Field] = {field.name: field for section in SECTIONS.values() for field in section}
ALIASES: dict[str, tuple[str, ...]] = {field.name: field.aliases for field in FIELDS.values()}
CANONICAL: dict[str, str] = {other: field.name for field in FIELDS.values() for other in (field.name, *field.aliases)}
CANONICAL |= {
    f"dloss_d{alias}": f"dloss_d{name}"
    for name in list(FIELDS)
    if f"dloss_d{name}" in FIELDS
    for alias in FIELDS[name].aliases
}
SECOND_ROLE = {"logprobs": "old_logps", "log_probs": "old_logps", "values": "vpreds"}
"""Names that mean one thing in some trainers and another in others: the second where another array has the first role."""

NUMBERS = tuple(f.name for f in FIELDS.values() if f.kind in ("setting", "reported") and f.shape == "1")
SETTINGS = tuple(f.name for f in FIELDS.values() if f.kind == "setting")
FLAGS = tuple(f.name for f in FIELDS.values() if f.kind == "flag")
WHOLE = tuple(f.name for f in FIELDS.values() if f.kind in ("whole", "ids"))
MAY_BE_TEXT = tuple(f.name for f in FIELDS.values() if f.kind == "ids")
_OWN_SHAPE_CHECK = ("completion_ids", "segment_ids", "position_ids", "dloss_dratio", "ratio", "reset_rows", "labels")
TOKEN_ARRAYS = tuple(f.name for f in FIELDS.values() if f.shape == "N T" and f.name not in _OWN_SHAPE_CHECK)
ROW_ARRAYS = tuple(f.name for f in FIELDS.values() if f.shape == "N" and f.name not in _OWN_SHAPE_CHECK)
RANGES = {f.name: (f.low, f.high) for f in FIELDS.values() if f.kind == "setting" and (f.low, f.high) != (-INF, INF)}

NOT_NEEDED = ("prompt_ids", "prompt_mask", "prompts", "actions", "old_seq_logps", "dloss_dseq_logps")
"""Names that recordings often hold and no check reads."""
NEGATIVE = ("neglogpacs", "neglogp", "old_neglogp", "old_neglogpacs", "neglogprobs")
"""Names of minus log-probabilities: never taken as log-probabilities, only pointed out."""


def roles(names: Iterable[str]) -> dict[str, list[str]]:
    """Canonical name -> the names in a file that claim it. A name of SECOND_ROLE gives way to one that is sure."""
    names = list(names)
    claimed: dict[str, list[str]] = {}
    for name in names:
        if name in CANONICAL and name not in SECOND_ROLE:
            claimed.setdefault(CANONICAL[name], []).append(name)
    for name in names:
        if name in SECOND_ROLE:
            first = CANONICAL[name]
            claimed.setdefault(SECOND_ROLE[name] if first in claimed else first, []).append(name)
    return claimed


def did_you_mean(name: str, taken: Iterable[str] = ()) -> str | None:
    """The role that an unknown name most likely has, among those that the file does not hold yet; None where nothing is near."""
    if name.lower() in NEGATIVE:
        return "old_logps (its negative: store -" + name + ")"
    words = set(name.lower().replace("/", "_").replace("-", "_").split("_"))
    best, found = 0.0, None
    for known, canonical in CANONICAL.items():
        if canonical in set(taken):
            continue
        own = set(known.lower().split("_"))
        likeness = difflib.SequenceMatcher(None, name.lower(), known.lower()).ratio()
        score = likeness + 0.5 * len(words & own) / max(len(words | own), 1)
        if score > best:
            best, found = score, canonical
    return found if best >= 0.7 else None


def table_text(width: int = 80) -> str:
    """The table for --help: name, shape, meaning, and the other names that are accepted."""
    import textwrap

    out = []
    for title, fields in SECTIONS.items():
        out.append(f"  {title}")
        for field in fields:
            bounds = "" if field.kind != "setting" or (field.low, field.high) == (-INF, INF) else _bounds(field)
            out.append(f"    {field.name}  ({field.shape})  {field.meaning}{bounds}")
            if field.aliases:
                out += textwrap.wrap(
                    "= " + ", ".join(field.aliases), width, initial_indent="        ", subsequent_indent="          "
                )
    return "\n".join(out)


def _bounds(field: Field) -> str:
    high = "" if field.high > 1e11 else f" to {field.high:g}"
    return f", from {field.low:g}{high}"
