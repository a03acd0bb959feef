"""Named rows of further programs, each proved by a recorded batch of it (test_captured.py). A new row is an entry."""

from __future__ import annotations

from dataclasses import replace

from extensions.objectives.choices import Row


def _table(*rows: Row) -> dict[str, Row]:
    return {row.name: row for row in rows}


AREAL = "AReaL 1.0.4, ppo_actor_loss_fn"
OPENRLHF = "OpenRLHF 0.11.2, PolicyLoss"
SLIME = "slime 624b824, policy_loss_function"
CLEANRL = "CleanRL fe8d8a0, ppo.py"

# fmt: off
_AREAL = Row("grpo@areal-1.0.4", AREAL,
    "from the paper: sample std + 1e-6, token mean, no KL; with c_clip the dual clip",
    scale="group_std", std_ddof=1, std_eps=1e-6, reduction="mean_over_tokens")
_OPENRLHF = Row("gspo@openrlhf-0.11.2", OPENRLHF + ' (policy_loss_type "gspo"), estimator rloo',
    "from the paper: any estimator of the advantage, leave-one-out here; its clip widths are those of the token form unless"
    " set",
    baseline="leave_one_out", ratio="sequence_mean")
_SLIME = Row("grpo@slime-624b824", SLIME + ', estimator grpo, kl_loss_type "low_var_kl"',
    "from the paper: sample std + 1e-6, k3 kept within 10, entropy as a mean per answer",
    scale="group_std", std_ddof=1, std_eps=1e-6, clip_high=0.28, kl="k3", kl_coef=0.02, kl_limit=10.0, entropy_coef=0.01,
    entropy_reduction="same")
_CONTROL = Row("ppo@cleanrl-fe8d8a0", CLEANRL,
    "from the paper: advantages standardised per minibatch (sample std + 1e-8), half of the larger squared error, entropy"
    " 0.01, gamma 0.99",
    baseline="gae", gamma=0.99, scale="token_std", std_ddof=1, reduction="mean_over_tokens", value_loss="clip_max",
    value_coef=0.25, entropy_coef=0.01)

CAPTURED_ROWS = _table(
    _AREAL,
    replace(_AREAL, name="dual_clip@areal-1.0.4", source=AREAL + " with c_clip 1.7",
        differs="from grpo@areal-1.0.4: with A < 0 the ratio also stops at c",
        surrogate="dual_clip", ratio_cap=1.7),
    replace(_AREAL, name="sapo@areal-1.0.4", source="AReaL 1.0.4, sapo_loss_fn",
        differs="from sapo: token mean",
        surrogate="sapo"),
    replace(_AREAL, name="rejection@areal-1.0.4", source=AREAL + " with apply_rejection_sampling (token, mask, ratio)",
        differs="from grpo@areal-1.0.4: weighs a token by old policy over sampler and drops it outside a band; what is"
                " dropped still counts",
        sampler_correction="token", sampler_drop="ratio", sampler_drop_low=0.8, sampler_drop_high=1.25),
    _OPENRLHF,
    replace(_OPENRLHF, name="tis@openrlhf-0.11.2", source=OPENRLHF + " with token importance sampling, mode clip",
        differs="from the paper: a token weighs old policy over sampler, held within [0.8, 1.25]; token mean",
        ratio="token", reduction="mean_over_tokens", sampler_correction="token", sampler_bound="banded", sampler_low=0.8,
        sampler_high=1.25),
    Row("ppo@openrlhf-0.11.2", OPENRLHF + ", estimator gae, ValueLoss",
        "from the paper: KL in the reward, advantages whitened over tokens (population variance, floor 1e-8), half of the"
        " larger squared error",
        baseline="gae", lam=0.95, gamma=0.99, scale="token_std", std_guard="floor_variance", reduction="mean_over_tokens",
        kl="k1", kl_place="reward", kl_coef=0.05, value_loss="clip_max", value_coef=0.5),
    Row("dapo@open-instruct-e6c3044", "open-instruct e6c3044, compute_grpo_loss, kl_estimator 3",
        "from the paper: sample std + 1e-8, divided by the tokens of the accumulation window, k1 times the ratio",
        scale="group_std", std_ddof=1, clip_high=0.272, kl="k1", kl_coef=0.05, kl_weight="ratio",
        reduction="mean_over_window"),
    Row("dppo@prime-rl-559b447", "prime-rl 559b447, default_loss_fn",
        "from dppo_tv@verl-0.9.1: no cap, gradient through the ratio; beside it a squared pull to the policy that sampled,"
        " (l - l0)^2 * 0.001",
        surrogate="region_tv", kl="k2", kl_anchor="old", kl_coef=0.002, reduction="mean_over_tokens"),
    Row("dapo@liger-0.8.5", "Liger-Kernel 0.8.5, LigerFusedLinearGRPOFunction with vllm_is_ratio",
        "from the paper: a weight of each token against the sampler is handed in and multiplies the clipped loss, not the"
        " KL",
        baseline="given", clip_high=0.28, kl="k3", kl_coef=0.04, reduction="mean_over_tokens", sampler_correction="given"),
    _SLIME,
    replace(_SLIME, name="gspo@slime-624b824", source=SLIME + ", estimator gspo with compute_opsm_mask",
        differs="from gspo: answers with A < 0 that have drifted too far are dropped",
        ratio="sequence_mean", clip_low=0.05, clip_high=0.06, kl="none", kl_coef=0.0, kl_limit=_CONTROL.kl_limit,
        entropy_coef=0.0, off_policy_rows="drop", off_policy_threshold=0.02),
    replace(_SLIME, name="reinforce_pp@slime-624b824", source="slime 624b824, estimator reinforce_plus_plus",
        differs="from the paper: sample variance over tokens with 1e-8 inside the root, gamma 0.98 here",
        baseline="none", credit="reward_to_go", gamma=0.98, scale="token_std", std_eps=1e-8, std_guard="inside", kl="k1",
        kl_place="reward", kl_coef=0.05, kl_limit=_CONTROL.kl_limit, entropy_coef=0.0),
    Row("grpo@tiny-grpo-eafedd7", "tiny-grpo eafedd7, GRPOLoss, group_advantages",
        "from the paper: sample std + 1e-8, KL coefficient 0.01",
        scale="group_std", std_ddof=1, kl="k3", kl_coef=0.01),
    Row("ppo@trlx-3340c2f", "trlx 3340c2f, PPOConfig.loss, get_advantages_and_returns",
        "from the paper: advantages whitened over every slot, padding included (sample variance + 1e-8 inside the root);"
        " half of the larger squared error",
        baseline="gae", gamma=0.99, scale="token_std", whiten_over="slots", std_ddof=1, std_guard="inside",
        reduction="mean_over_tokens", value_loss="clip_max", value_coef=0.5),
    _CONTROL,
    replace(_CONTROL, name="ppo@rl_games-1.6.5", source="rl_games 1.6.5, A2CAgent.calc_losses",
        differs="from ppo@cleanrl-fe8d8a0: the critic weighs four times as much; one flag cuts bootstrap and recursion",
        value_coef=1.0),
)
# fmt: on
