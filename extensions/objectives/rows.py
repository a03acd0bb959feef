"""The named rows: what papers and public trainers mean by a name, and what no row can say. A new row is an entry here."""

from __future__ import annotations

import math
from dataclasses import replace

from extensions.objectives.choices import Row
from extensions.objectives.rows_captured import CAPTURED_ROWS

INF = math.inf

# A constant that the source leaves open is chosen here and said so in `differs`. Rows named name@program are what that
# program computes under the name, with its defaults.

TRL = "TRL 1.16.0, GRPOTrainer"
VERL = "verl 0.9.1, core_algos"


def _table(*rows: Row) -> dict[str, Row]:
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
        "OpenRLHF 3c3be62, group_norm with token_level_loss; loss and advantages as recorded in 0.11.2",
        "from the paper: sample std + 1e-9, token mean; its clip of the baselined reward to +-10 (reward_clip) and the k1 KL"
        " that it then subtracts from each token (kl_place after_baseline) are not set here",
        scale="group_std", std_ddof=1, std_eps=1e-9, reduction="mean_over_window", rows_counted="nonempty",
        length_eps=1e-8),
)

LATER_ROWS = _table(
    replace(_GRPO, name="maxrl", source="maximum likelihood reinforcement learning, for rewards of 0 and 1",
        differs="from grpo: divided by the mean of the group instead of its std, so a rare success weighs more; no KL",
        scale="group_mean", kl="none", kl_coef=0.0),
    replace(_GRPO, name="topr", source="Le Roux et al. 2025, arXiv 2503.14286",
        differs="from cispo: good answers weigh 1, bad ones min(r, 1), r of whole answers; group mean as baseline here",
        ratio="sequence_product", surrogate="topr", scale="none", kl="none", kl_coef=0.0, reduction="sum_per_response"),
    replace(_GRPO, name="kl_cov", source="Cui et al. 2025, arXiv 2505.22617",
        differs="from grpo: no clip; |l - l0| on the few tokens whose advantage goes with their log-probability most",
        surrogate="plain", kl="abs", kl_anchor="old", kl_coef=1.0, kl_tokens="top_covariance", selected_share=0.0002,
        reduction="mean_over_tokens"),
    replace(_GRPO, name="clip_cov", source="Cui et al. 2025, arXiv 2505.22617",
        differs="from grpo: all tokens between two covariances have no gradient, where the paper draws a few of them",
        token_selection="outside_covariance", kl="none", kl_coef=0.0, reduction="mean_over_tokens"),
    replace(_GRPO, name="top_entropy", source="Wang et al. 2025, arXiv 2506.01939",
        differs="from dapo: the policy term on the fifth of the tokens with the largest entropy; every token is counted",
        token_selection="top_entropy", clip_high=0.28, kl="none", kl_coef=0.0, reduction="mean_over_tokens"),
    replace(_GRPO, name="tis", source="truncated importance sampling between an inference engine and a trainer",
        differs="from grpo: a token weighs old policy over sampler, at most 2; no KL",
        sampler_correction="token", sampler_bound="capped", kl="none", kl_coef=0.0, reduction="mean_over_tokens"),
    replace(_GRPO, name="mis", source="masked importance sampling between an inference engine and a trainer",
        differs="from tis: answers whose geometric mean ratio leaves [0.5, 2] are dropped instead of capped",
        sampler_correction="geometric", sampler_drop="ratio", sampler_drop_level="mean", sampler_drop_low=0.5,
        sampler_drop_high=2.0, kl="none", kl_coef=0.0, reduction="mean_over_tokens"),
    replace(_GRPO, name="nll_on_good", source="the imitation term of VAPO (2025), arXiv 2504.05118, beside grpo",
        differs="from grpo: + 0.1 * NLL of answers with R > 0, no KL",
        nll="positive_reward", kl="none", kl_coef=0.0, reduction="mean_over_tokens"),
    replace(_GRPO, name="overlong_filter", source="Yu et al. 2025 (DAPO), section 3.4, overlong filtering",
        differs="from grpo: answers that were cut off carry no loss, no KL",
        overlong="mask", kl="none", kl_coef=0.0, reduction="mean_over_tokens"),
)

ROWS: dict[str, Row] = PAPER_ROWS | TRL_ROWS | VERL_ROWS | OTHER_ROWS | LATER_ROWS | CAPTURED_ROWS
"""Every named row. A new one is an entry here and a test."""

# fmt: on
NOT_EXPRESSED: dict[str, str] = {
    "Clip-Cov's own draw (verl)": "it takes a random part of the tokens that outside_covariance names; pass what was drawn as "
    "selected_tokens, token_selection given",
    "adaptive KL controller (verl)": "a rule for kl_coef from step to step, not an objective on one batch",
    "V-trace (rlax)": "its targets weigh each later step by a product of clipped ratios; the table has GAE only",
    "an aligned WPO weight (TRL use_weighting)": "it reads the whole vocabulary at every token; pass it as pair_weights",
    "sampling of replacement groups (DAPO)": "the filter is here; drawing new prompts belongs to a trainer",
    "advantages of gamma < 1 that restart after a hole in the mask (verl reinforce_plus_plus)": "here a hole is skipped",
    "Beta Normalization Policy Optimization": "fits a Beta distribution to rewards; the name bnpo here is TRL's reduction",
    "a multi-turn sum of ratios (one sequence ratio per segment of a packed row)": "a row of the batch is one answer here",
}
