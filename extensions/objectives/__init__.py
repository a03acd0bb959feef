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

A new choice is one entry in the table of its step: formula, function, numbers with their ranges, the arrays it needs.

    surrogates.py   RATIOS, SURROGATES (band, words)      sampler.py             sampler and trainer: weights, dropping
    kl.py           KLS, KL_GRADIENTS                     selection.py           which tokens a term is taken over
    advantages.py   BASELINES, GROUP_SCALES, GUARDS       reduction.py           REDUCTIONS
    critic.py       VALUE_LOSSES                          preference_losses.py   LOSSES
    batch.py        what a batch holds                    choices.py             fields of a row, put together from these
    engine.py       evaluate                              rows*.py               the named rows

Row's fields, CHOICES, NUMBERS, RANGES and STEPS are made from those tables. Stable for other extensions: ROWS and
PREFERENCE_ROWS (name -> row), Row and PreferenceRow (dataclasses.replace; needs, choices, reads, loss_extras,
advantage_extras), make_batch and make_preferences, evaluate, evaluate_preference, compute_advantages, reduction_weights,
explain, lacking, suited.

Letters: N rows (answers), T padded width, P groups or pairs, G answers to one prompt, V vocabulary; l, l0, lr, ls the
log-probability of a token under the current policy, the old one, the reference, and the program that sampled; r a ratio, A
an advantage, R a reward, T_i the counted tokens of an answer, sg[.] a value without gradient.

Same as the sources named in each row; where a paper leaves a constant open the row says which one stands here. Left out,
with the reason: `NOT_EXPRESSED`.
"""

from extensions.objectives.advantages import (
    BASELINES,
    GROUP_BASELINES,
    GROUP_SCALES,
    GUARDS,
    OTHER_SCALES,
    Answers,
    Groups,
    arrange_groups,
    best_minus_second,
    compute_advantages,
    divide_by_std,
    gae_over_tokens,
    group_mean,
    kept_rows,
    leave_one_out,
    length_weighted_mean,
    normalised_parts,
    outcome_advantages,
    reward_to_go,
    soft_overlong_penalty,
    standardise_over_tokens,
    token_rewards,
    variance_of,
)
from extensions.objectives.batch import GENERATION, PER_ROW, PER_TOKEN, PER_TOKEN_FLAGS, Batch, make_batch
from extensions.objectives.choices import CHOICES, FIELDS, NUMBERS, RANGES, STEPS, Row
from extensions.objectives.critic import VALUE_LOSSES, value_loss_and_slope
from extensions.objectives.engine import Evaluation, Weighing, evaluate, loss_to_backpropagate
from extensions.objectives.explain import (
    active_fields,
    compare,
    explain,
    explain_preference,
    family_table,
    lacking,
    suited,
    with_given_advantages,
)
from extensions.objectives.kl import KLS, KL_GRADIENTS, exact_kl, kl_estimate
from extensions.objectives.pairs import (
    PREFERENCE_CHOICES,
    PREFERENCE_FIELDS,
    PREFERENCE_LOSSES,
    PreferenceEvaluation,
    PreferenceRow,
    Preferences,
    evaluate_preference,
    make_preferences,
)
from extensions.objectives.preference_losses import (
    PreferenceLoss,
    aot,
    aot_unpaired_loss,
    bco_loss,
    exo_loss,
    hinge_loss,
    ipo_loss,
    kto,
    orpo_loss,
    robust_loss,
    sigmoid_loss,
    simpo_loss,
    smoothed_loss,
    sppo_hard_loss,
)
from extensions.objectives.reduction import REDUCTIONS, reduction_weights
from extensions.objectives.rows import LATER_ROWS, NOT_EXPRESSED, OTHER_ROWS, PAPER_ROWS, ROWS, TRL_ROWS, VERL_ROWS
from extensions.objectives.rows_captured import CAPTURED_ROWS
from extensions.objectives.rows_pairs import PREFERENCE_ROWS
from extensions.objectives.sampler import (
    SAMPLER_BOUNDS,
    SAMPLER_CORRECTIONS,
    SAMPLER_DROPS,
    SAMPLER_DROP_LEVELS,
    sampler_correction,
    sampler_weight,
)
from extensions.objectives.selection import SELECTIONS, covariance
from extensions.objectives.small import small_batch, small_preferences
from extensions.objectives.surrogates import (
    RATIOS,
    SURROGATES,
    Ratio,
    Surrogate,
    bounded,
    capped,
    capped_clip,
    choose,
    cispo,
    clip,
    compute_ratio,
    dppo_kl,
    dppo_tv,
    dual_clip,
    plain,
    region_kl,
    region_tv,
    sapo,
    topr,
    vespo,
)
from extensions.objectives.table import Choice, Number, SurrogateChoice
