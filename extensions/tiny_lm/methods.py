"""The six trainings. A new training is a function of a Stage and an entry in METHODS."""

from __future__ import annotations

import dataclasses
import math
from typing import Callable, Iterator, NamedTuple

import torch
from torch import Tensor

from extensions.objectives import ROWS, Evaluation, Row, evaluate, gae_over_tokens, loss_to_backpropagate, make_batch
from extensions.tiny_lm.model import Decoder, Sequences, join
from extensions.tiny_lm.stage import Answers, Diagnostics, Scored, Stage, TinySettings
from extensions.tiny_lm.task import PROMPT_LENGTH, RESPONSE_LENGTH, VERIFIERS, correct_responses, draw_prompts
from rl_lab import Adam, clip_fraction, clipped_policy_loss, dpo_loss, groups_without_spread, importance_ratio
from token_objectives import mean_over_tokens

# ------------------------------------------------------------------------------------------ supervised start


def supervised(stage: Stage) -> Iterator[Diagnostics]:
    """SFT: minus the mean log-probability over the tokens of some right answers, EOS included; all in every update."""
    prompts = draw_prompts(stage.settings.demonstrations, stage.generator, held_out=False)
    demonstrations = join(prompts, correct_responses(prompts))
    optimizer = Adam(stage.policy.parameters(), 0.0)
    for step in stage.rounds(optimizer):
        scored = stage.score(stage.policy, demonstrations)
        loss = mean_over_tokens(-scored.logps, scored.counted)
        norm = stage.update(loss, optimizer, step)
        yield {"loss": loss.item(), "gradient_norm": norm}


# ------------------------------------------------------------------------------------------ PPO


def token_advantages(
    settings: TinySettings, answers: Answers, reference: Scored, values: Tensor
) -> tuple[Tensor, Tensor]:
    """PPO for language models, by the row `ppo` of objectives with a KL in the reward -> advantages, returns [N, R].

    Reward: -kl * (old_logp - ref_logp) at each token, the k1 estimate of KL(old || reference), and the answer's at its last
    one. GAE over the tokens, gamma 1; the last token ends the episode. values [N, R]: values[:, t] is the critic's estimate
    before token t is written. 0 where not counted. Gradient: none.
    """
    row = dataclasses.replace(ROWS["ppo"], kl="k1", kl_place="reward", kl_coef=settings.kl, lam=settings.gae_lambda)
    batch = make_batch(
        logps=answers.old_logps, ref_logps=reference.logps, mask=reference.counted, rewards=answers.rewards, values=values
    )
    return gae_over_tokens(row, batch)


def ppo(stage: Stage) -> Iterator[Diagnostics]:
    """PPO-Clip with a token-level critic, a second transformer that starts from the policy's body with a zero output."""
    settings, policy = stage.settings, stage.policy
    critic = Decoder(1, stage.generator).to(policy.output.weight.dtype)
    body = {name: weight for name, weight in policy.state_dict().items() if not name.startswith("output.")}
    critic.load_state_dict(body, strict=False)
    torch.nn.init.zeros_(critic.output.weight)

    def of_rows(sequences: Sequences) -> tuple[Tensor]:
        return (critic(sequences.input_ids, stage.masks(sequences)[0])[:, PROMPT_LENGTH - 1 : -1, 0],)

    def values_of(sequences: Sequences) -> Tensor:
        return stage.over_ranks(of_rows, sequences)[0]

    actor_optimizer, critic_optimizer = Adam(policy.parameters(), 0.0), Adam(critic.parameters(), 0.0)
    for step in stage.rounds(actor_optimizer, critic_optimizer):
        answers = stage.answer(settings.ppo_prompts, 1)
        with torch.no_grad():
            reference = stage.score(stage.reference, answers.sequences)
            counted = reference.counted
            old_values = values_of(answers.sequences)
        advantages, returns = token_advantages(settings, answers, reference, old_values)
        report = {
            "batch_reward": answers.rewards.double().mean().item(),
            "explained_variance": explained_variance(old_values[counted], returns[counted]),
        }
        for number in range(settings.passes):
            value_loss = mean_over_tokens((values_of(answers.sequences) - returns).square(), counted)
            report["value_loss"] = value_loss.item()
            stage.update(value_loss, critic_optimizer, step)
            if step > settings.critic_rounds:
                scored = stage.score(policy, answers.sequences)
                old_logps = scored.logps.detach() if stage.mistake == "recompute-old" else answers.old_logps
                if number == 0:
                    report["first_pass_ratio_error"] = ratio_error(scored.logps, old_logps, counted)
                epsilon = settings.clip_epsilon
                loss = mean_over_tokens(clipped_policy_loss(scored.logps, old_logps, advantages, epsilon), counted)
                report["clip_fraction"] = clip_fraction(scored.logps[counted], old_logps[counted], epsilon).item()
                report["gradient_norm"] = stage.update(loss, actor_optimizer, step)
                report["loss"] = loss.item()
        yield report


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for a constant, negative for a harmful one.

    values, returns [M]. NaN where the returns do not vary.
    """
    variance = returns.var(correction=0)
    return (1 - (returns - values).var(correction=0) / variance).item() if variance > 0 else math.nan


def ratio_error(logps: Tensor, old_logps: Tensor, counted: Tensor) -> float:
    """Mean |rho - 1| over counted tokens. On the first pass it is 0 up to rounding, or sampler and loss disagree."""
    return (importance_ratio(logps.detach(), old_logps) - 1)[counted].abs().mean().item()


# ------------------------------------------------------------------------------------------ GRPO, RLOO, any row


GIVEN = (
    "old_logps", "ref_logps", "logits", "ref_logits", "rewards", "group_ids", "rewards_per_func", "reward_weights", "budget",
    "reward_baselines", "entropies", "sampler_logps",
)  # fmt: skip
"""What the loop of group_policy_gradient can give to a row."""


def row_loss(
    stage: Stage, answers: Answers, scored: Scored, old_logps: Tensor, reference: Scored | None, greedy: Tensor | None
) -> tuple[Evaluation, Tensor]:
    """The stage's row on a batch of answers, and its loss with the gradient in closed form at each log-probability.

    The tokens were drawn by the policy that old_logps belong to, unless a mistake took these anew.
    """
    entropies = None
    if "entropies" in stage.row.needs:
        logps = scored.logits.log_softmax(dim=-1)
        entropies = torch.where(scored.counted, -(logps.exp() * logps).sum(dim=-1), 0.0)
    batch = make_batch(
        logps=scored.logps.detach(),
        old_logps=old_logps,
        sampler_logps=answers.old_logps,
        ref_logps=None if reference is None else reference.logps,
        mask=scored.counted,
        rewards=answers.rewards,
        rewards_per_func=answers.rewards.unsqueeze(1),
        reward_weights=torch.ones(1),  # the verifier is the only reward function
        reward_baselines=greedy,
        group_ids=answers.group_ids,
        logits=scored.logits.detach(),
        ref_logits=None if reference is None else reference.logits,
        entropies=entropies,
        budget=RESPONSE_LENGTH,
    )
    result = evaluate(stage.row, batch)
    return result, loss_to_backpropagate(result, scored.logps, logits=scored.logits, entropies=entropies)


def group_policy_gradient(stage: Stage) -> Iterator[Diagnostics]:
    """GRPO's loop with the stage's row of extensions/objectives: groups of answers, one advantage each, several passes.

    The row says what the loss is and hands back its gradient in closed form with respect to each log-probability; the
    transformer's backward pass takes it from there. RLOO makes one pass.
    """
    settings, row = stage.settings, stage.row
    passes = 1 if stage.algorithm == "rloo" else settings.passes
    optimizer = Adam(stage.policy.parameters(), 0.0)
    for step in stage.rounds(optimizer):
        answers = stage.answer(settings.group_prompts, settings.group_size)
        reference = None
        if {"ref_logps", "ref_logits"} & set(row.needs):
            with torch.no_grad():
                reference = stage.score(stage.reference, answers.sequences)
        greedy_rewards = stage.greedy_rewards(answers) if "reward_baselines" in row.needs else None
        spread = ~groups_without_spread(answers.rewards.view(-1, settings.group_size))
        report = {
            "batch_reward": answers.rewards.double().mean().item(),
            "zero_group_fraction": 1 - spread.double().mean().item(),
        }
        nothing_left = row.group_filter == "spread" and not spread.any()  # a trainer would sample other groups
        for number in range(0 if nothing_left else passes):
            scored = stage.score(stage.policy, answers.sequences)
            old_logps = scored.logps.detach() if stage.mistake == "recompute-old" else answers.old_logps
            if number == 0:
                report["first_pass_ratio_error"] = ratio_error(scored.logps, old_logps, scored.counted)
            result, loss = row_loss(stage, answers, scored, old_logps, reference, greedy_rewards)
            if row.ratio != "none":
                report["clip_fraction"] = result.ratio_outside_fraction
            report["gradient_norm"] = stage.update(loss, optimizer, step)
            report["loss"] = loss.item()
        yield report


# ------------------------------------------------------------------------------------------ DPO


class AnswerPairs(NamedTuple):
    """P preferred and P dispreferred answers to the same prompts, with the reference's log-probabilities."""

    chosen: Sequences
    rejected: Sequences
    ref_chosen: Tensor  # [P]
    ref_rejected: Tensor  # [P]

    def take(self, rows: Tensor) -> AnswerPairs:
        return AnswerPairs(self.chosen.take(rows), self.rejected.take(rows), self.ref_chosen[rows], self.ref_rejected[rows])


def make_pairs(stage: Stage, prompts: int) -> tuple[AnswerPairs, Diagnostics]:
    """Sample a group of answers per prompt; where rewards differ, pair one of the best with one of the worst at random."""
    size = stage.settings.group_size
    answers = stage.answer(prompts, size)
    reward = answers.rewards.view(-1, size)
    # Noise below the smallest gap between rewards (0 and 1) picks at random among equals.
    noise = torch.rand(reward.shape, generator=stage.generator) / 2
    first = torch.arange(0, reward.numel(), size)
    differ = ~groups_without_spread(reward)
    chosen = (first + (reward + noise).argmax(dim=1))[differ]
    rejected = (first + (reward - noise).argmin(dim=1))[differ]
    chosen, rejected = answers.sequences.take(chosen), answers.sequences.take(rejected)
    report = {"batch_reward": reward.double().mean().item(), "zero_group_fraction": 1 - differ.double().mean().item()}
    if not differ.any():
        nothing = torch.zeros(0)
        return AnswerPairs(chosen, rejected, nothing, nothing), report
    with torch.no_grad():
        return AnswerPairs(chosen, rejected, *pair_logps(stage, stage.reference, chosen, rejected)), report


def pair_logps(stage: Stage, model: Decoder, chosen: Sequences, rejected: Sequences) -> tuple[Tensor, Tensor]:
    """Summed log-probabilities of both answers of P pairs, in one forward pass -> [P], [P]. Gradient: to the model."""
    both = Sequences(*(torch.cat(columns) for columns in zip(chosen, rejected)))
    return tuple(stage.score(model, both).logps.sum(dim=1).chunk(2))


def dpo_update(stage: Stage, pairs: AnswerPairs, optimizer: Adam, step: int) -> Diagnostics:
    """One DPO step, mean over the pairs."""
    chosen, rejected = pair_logps(stage, stage.policy, pairs.chosen, pairs.rejected)
    loss = dpo_loss(chosen, rejected, pairs.ref_chosen, pairs.ref_rejected, stage.settings.dpo_beta).mean()
    norm = stage.update(loss, optimizer, step)
    stage.counts["pair_presentations"] += len(chosen)
    log_ratio_chosen, log_ratio_rejected = chosen.detach() - pairs.ref_chosen, rejected.detach() - pairs.ref_rejected
    return {
        "loss": loss.item(),
        "gradient_norm": norm,
        "chosen_logp": chosen.mean().item(),
        "rejected_logp": rejected.mean().item(),
        "chosen_log_ratio": log_ratio_chosen.mean().item(),
        "rejected_log_ratio": log_ratio_rejected.mean().item(),
        "pair_accuracy": (log_ratio_chosen > log_ratio_rejected).double().mean().item(),
    }


def dpo(stage: Stage) -> Iterator[Diagnostics]:
    """Offline DPO: all pairs are sampled from the supervised policy before the first update and never again."""
    pairs, _ = make_pairs(stage, stage.settings.dpo_prompts)
    available = len(pairs.ref_chosen)
    if not available:
        prompts = stage.settings.dpo_prompts
        raise ValueError(f"none of {prompts} prompts got answers of different reward; raise --dpo-prompts")
    optimizer = Adam(stage.policy.parameters(), 0.0)
    order = torch.empty(0, dtype=torch.long)
    for step in stage.rounds(optimizer):
        while len(order) < stage.settings.dpo_batch:  # epochs in a fresh order each, joined end to end
            order = torch.cat([order, torch.randperm(available, generator=stage.generator)])
        rows, order = order[: stage.settings.dpo_batch], order[stage.settings.dpo_batch :]
        yield {"pairs": available, **dpo_update(stage, pairs.take(rows), optimizer, step)}


def online_dpo(stage: Stage) -> Iterator[Diagnostics]:
    """Online DPO: fresh pairs from the current policy for every update; the reference stays the supervised policy."""
    optimizer = Adam(stage.policy.parameters(), 0.0)
    for step in stage.rounds(optimizer):
        pairs, report = make_pairs(stage, stage.settings.online_prompts)
        if len(pairs.ref_chosen):
            report |= dpo_update(stage, pairs, optimizer, step)
        yield {"pairs": len(pairs.ref_chosen), **report}


# ------------------------------------------------------------------------------------------ methods


class Method(NamedTuple):
    """What tells one training from another."""

    run: Callable[[Stage], Iterator[Diagnostics]]
    steps: int
    learning_rate: float
    final_rate: float  # share of the learning rate that is left at the end
    own_columns: tuple[str, ...]


PAIR_COLUMNS = (
    "chosen_logp", "rejected_logp", "chosen_log_ratio", "rejected_log_ratio", "pair_accuracy", "pairs", "pair_presentations"
)
GROUP_COLUMNS = ("batch_reward", "zero_group_fraction", "clip_fraction", "first_pass_ratio_error")
METHODS = {
    "sft": Method(supervised, 55, 3e-3, 0.0, ()),
    "ppo": Method(
        ppo, 120, 1.5e-3, 0.1,
        ("batch_reward", "clip_fraction", "first_pass_ratio_error", "value_loss", "explained_variance"),
    ),
    "dpo": Method(dpo, 200, 1e-3, 0.0, PAIR_COLUMNS),
    "online-dpo": Method(online_dpo, 150, 1e-3, 0.1, ("batch_reward", "zero_group_fraction", *PAIR_COLUMNS)),
    "grpo": Method(group_policy_gradient, 120, 1e-3, 0.1, GROUP_COLUMNS),
    "rloo": Method(group_policy_gradient, 150, 1.5e-3, 0.1, tuple(c for c in GROUP_COLUMNS if c != "clip_fraction")),
}
EVALUATION_COLUMNS = (
    "sampled_accuracy", "greedy_accuracy", "reward", "kl_current_reference", "kl_old_current", "entropy", "response_length",
    "truncated_fraction",
)
COST_COLUMNS = ("optimizer_steps", "samples", "tokens", "seconds")


TRAINABLE_ROWS = tuple(name for name, row in ROWS.items() if set(row.needs) <= set(GIVEN))
"""The rows of extensions/objectives that need no critic and no array that this loop has not."""


def own_steps(algorithm: str, verifier: str) -> int:
    """The rounds of a training that was not told how many; half as many satisfy a verifier that forgets something."""
    return METHODS[algorithm].steps // (1 if VERIFIERS[verifier] == VERIFIERS["exact"] else 2)


def columns_of(algorithm: str) -> tuple[str, ...]:
    return ("step", *EVALUATION_COLUMNS, "loss", "gradient_norm", *METHODS[algorithm].own_columns, *COST_COLUMNS)


def objective_row(algorithm: str, objective: str | None, kl: float | None) -> Row | None:
    """The row of extensions/objectives that a group method trains on, or None for the others.

    GRPO: the table's `grpo` with the exact KL to the reference in the loss. RLOO: the table's `rloo`, k1 KL in the reward.
    `objective`: that row as it stands; `kl`, unless None, replaces the weight of its KL term. Raises ValueError where it has
    none.
    """
    if algorithm == "rloo":
        return dataclasses.replace(ROWS["rloo"], kl_coef=kl)
    if algorithm != "grpo":
        return None
    if objective is None:
        return dataclasses.replace(ROWS["grpo"], kl="exact" if kl else "none", kl_coef=kl)
    row = ROWS[objective]
    if kl is not None and row.kl == "none" and kl > 0:
        raise ValueError(f"kl: the objective {objective} has no KL term that {kl:g} could be the weight of")
    return row if kl is None or row.kl == "none" else dataclasses.replace(row, kl_coef=kl)
