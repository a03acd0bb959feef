"""Settings, well-known mistakes and the six trainings. A new training is a function of a Stage and an entry in METHODS."""

from __future__ import annotations

import dataclasses
import math
from typing import Callable, Iterator, NamedTuple

import torch
from torch import Tensor

from extensions.objectives import ROWS, Row, evaluate, gae_over_tokens, loss_to_backpropagate, make_batch
from extensions.tiny_lm.model import Decoder, Sequences, generate, join
from extensions.tiny_lm.task import (
    PAD,
    PROMPT_LENGTH,
    RESPONSE_LENGTH,
    VERIFIERS,
    Prompts,
    correct_responses,
    draw_prompts,
    rewards,
    written,
)
from rl_lab import (
    Adam,
    Range,
    Settings,
    clip_fraction,
    clipped_policy_loss,
    descend,
    dpo_loss,
    groups_without_spread,
    importance_ratio,
    response_token_logps,
    setting,
)
from token_objectives import mean_over_tokens
# ------------------------------------------------------------------------------------------ settings


@dataclasses.dataclass(frozen=True)
class TinySettings(Settings):
    """Every number of the six trainings. Defaults are the reference run."""

    seed: int = setting(7, Range(int, 0, 2**63 - 2), "seed of every random draw", "run")
    steps: int = setting(
        0,
        Range(int, 0, 100_000),
        "training rounds; 0: the algorithm's own (sft 55, ppo and grpo 120, online-dpo and rloo 150, dpo 200), half as many "
        "with a verifier that forgets something. The supervised start before them keeps its 55",
        "run",
    )
    evaluate_every: int = setting(20, Range(int, 1, 100_000), "rounds between two rows of the CSV", "run")
    evaluation_prompts: int = setting(1000, Range(int, 2, 20_000), "held-out prompts that accuracy is measured on", "run")
    learning_rate: float = setting(
        0.0,
        Range(float, 0, 100),
        "Adam learning rate at the start; 0: the algorithm's own (sft 3e-3, ppo and rloo 1.5e-3, others 1e-3)",
        "update",
    )
    max_gradient_norm: float = setting(1.0, Range(float, 0, 1e6, above=True), "gradient norm is clipped to this", "update")
    clip_epsilon: float = setting(0.2, Range(float, 0, 1, above=True), "PPO: half width of the ratio band", "update")
    passes: int = setting(2, Range(int, 1, 100), "PPO, GRPO: updates on one batch of answers", "update")
    kl: float = setting(0.005, Range(float, 0, 1e6), "PPO, GRPO, RLOO: weight of the KL to the reference", "update")
    demonstrations: int = setting(64, Range(int, 1, 100_000), "right answers that the supervised start learns from", "SFT")
    ppo_prompts: int = setting(64, Range(int, 1, 4096), "prompts per round, one answer each", "PPO")
    gae_lambda: float = setting(0.95, Range(float, 0, 1), "lambda of GAE over the response tokens (gamma is 1)", "PPO")
    critic_rounds: int = setting(10, Range(int, 0, 100_000), "first rounds in which only the critic learns", "PPO")
    dpo_beta: float = setting(0.2, Range(float, 0, 1e6, above=True), "scale of the preference margin", "DPO")
    dpo_prompts: int = setting(4096, Range(int, 1, 100_000), "prompts that offline pairs are sampled for", "DPO")
    dpo_batch: int = setting(64, Range(int, 1, 4096), "offline pairs per update", "DPO")
    online_prompts: int = setting(32, Range(int, 1, 4096), "online DPO: prompts per round, a group of answers each", "DPO")
    group_size: int = setting(8, Range(int, 2, 4096), "answers per prompt: GRPO, RLOO, both kinds of DPO", "groups")
    group_prompts: int = setting(16, Range(int, 1, 4096), "GRPO, RLOO: prompts per round", "groups")
    public_tests: int = setting(16, Range(int, 1, 100_000), "--verifier public-tests: prompts with a reward", "groups")


# ------------------------------------------------------------------------------------------ what a training is given


class Mistake(NamedTuple):
    """A well-known bug that can be switched on."""

    algorithms: tuple[str, ...]  # where it makes a difference
    what: str
    watch: str


SAMPLING = ("ppo", "online-dpo", "grpo", "rloo")
MISTAKES = {
    "pad-mask": Mistake(
        ("sft", "dpo", *SAMPLING),
        "the loss counts `ids != PAD`; EOS shares PAD's id, so stopping is never trained",
        "truncated_fraction (0.96 in sft); sampled_accuracy of dpo (0.81-0.97, not 0.99); elsewhere the start hides it",
    ),
    "ignore-left-padding": Mistake(
        ("sft", "dpo", *SAMPLING),
        "the training pass reads the padding and counts positions from it; generation does not",
        "first_pass_ratio_error (0.1 in the first row, not 1e-7); sampled_accuracy of sft and dpo (0.12 and 0.02-0.16 lost)",
    ),
    "recompute-old": Mistake(
        ("ppo", "grpo"),
        "old log-probabilities are taken anew in every pass: every ratio is 1 and nothing is clipped",
        "clip_fraction (exactly 0); two passes are too few to cost accuracy here",
    ),
    "sample-cold": Mistake(
        SAMPLING,
        "answers are sampled at temperature 0.5, the loss takes them for samples at temperature 1",
        "batch_reward, far above sampled_accuracy, which ends at 0.75-0.84; no ratio shows it",
    ),
    "dropout": Mistake(
        ("dpo", *SAMPLING),
        "dropout 0.1 stays on, so that scoring an answer twice gives two numbers",
        "first_pass_ratio_error (0.1 in the first row, not 1e-7); loss of dpo with --steps 1, above log 2",
    ),
}


class Scored(NamedTuple):
    """A forward pass over sequences, aligned to the response."""

    logits: Tensor  # [N, R, V] that predicted each response token
    logps: Tensor  # [N, R], 0 where not counted
    counted: Tensor  # [N, R] bool


class Answers(NamedTuple):
    """Sampled answers with everything that stays fixed while they are reused."""

    sequences: Sequences
    old_logps: Tensor  # [N, R] cached when the tokens were sampled
    rewards: Tensor  # [N]
    group_ids: Tensor  # [N] equal for answers to one prompt


@dataclasses.dataclass
class Stage:
    """One training: the policy that moves, the reference that does not, and where prompts and rewards come from."""

    algorithm: str
    settings: TinySettings
    policy: Decoder
    reference: Decoder
    generator: torch.Generator
    verifier: str
    public: Prompts | None  # the only prompts with a reward, or None
    row: Row | None  # GRPO, RLOO: the objective
    mistake: str | None
    counts: dict[str, int]

    def __post_init__(self) -> None:
        if self.mistake == "dropout":
            self.policy.dropout = 0.1
            self.policy.train()

    def rounds(self, *optimizers: Adam) -> Iterator[int]:
        """The rounds 1..steps; the learning rate falls linearly to the method's share of its start."""
        steps, final = self.settings.steps, METHODS[self.algorithm].final_rate
        for step in range(1, steps + 1):
            for optimizer in optimizers:
                optimizer.lr = self.settings.learning_rate * (1 - (1 - final) * (step - 1) / steps)
            yield step

    def update(self, loss: Tensor, optimizer: Adam, step: int) -> float:
        """One optimizer step; returns the gradient norm before clipping."""
        self.counts["optimizer_steps"] += 1
        return descend(loss, optimizer, self.settings.max_gradient_norm, f"{self.algorithm}, round {step}")

    def draw(self, count: int) -> Prompts:
        """Training prompts: fresh ones, or from the public ones with replacement."""
        if self.public is None:
            return draw_prompts(count, self.generator, held_out=False)
        return self.public.take(torch.randint(len(self.public.ids), (count,), generator=self.generator))

    def answer(self, count: int, group_size: int) -> Answers:
        """Draw prompts and let the current policy answer each `group_size` times."""
        prompts = self.draw(count).repeat(group_size)
        temperature = 0.5 if self.mistake == "sample-cold" else 1.0
        parts = [prompts.take(slice(first, first + 1024)) for first in range(0, len(prompts.ids), 1024)]  # bounds the memory
        generated = [generate(self.policy, part, self.generator, temperature) for part in parts]
        responses, old_logps = (torch.cat(column) for column in zip(*generated))
        self.counts["samples"] += len(responses)
        self.counts["tokens"] += int(written(responses).sum())
        group_ids = torch.arange(count).repeat_interleave(group_size)
        return Answers(join(prompts, responses), old_logps, rewards(self.verifier, prompts, responses), group_ids)

    def greedy_rewards(self, answers: Answers) -> Tensor:
        """What the policy's likeliest answer to each row's prompt earns: ReMax's baseline. -> [N]."""
        prompts = Prompts(*(column[:, :PROMPT_LENGTH] for column in answers.sequences[:2]))
        return rewards(self.verifier, prompts, generate(self.policy, prompts, None)[0])

    def score(self, model: Decoder, sequences: Sequences) -> Scored:
        """The training pass: log-probability of every token that the policy wrote. Gradient: to the model."""
        attention_mask, response_mask = self.masks(sequences)
        logits = model(sequences.input_ids, attention_mask)
        logps, counted = response_token_logps(logits, sequences.input_ids, response_mask)
        first = PROMPT_LENGTH - 1  # the separator's position predicts the first response token
        return Scored(logits[:, first:-1], logps[:, first:], counted[:, first:])

    def masks(self, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """What the training pass reads and what it counts."""
        attention_mask, response_mask = sequences.attention_mask, sequences.response_mask
        if self.mistake == "ignore-left-padding":
            attention_mask = torch.ones_like(attention_mask)
        if self.mistake == "pad-mask":
            without_eos = response_mask & (sequences.input_ids != PAD)
            # An answer that is nothing but EOS would be left without a token, which the atoms refuse.
            response_mask = torch.where(without_eos.any(dim=1, keepdim=True), without_eos, response_mask)
        return attention_mask, response_mask


Diagnostics = dict[str, float]


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
    """PPO for language models, by the row `ppo` of extensions/objectives with a KL in the reward -> advantages, returns [N, R].

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
    critic = Decoder(1, stage.generator)
    body = {name: weight for name, weight in policy.state_dict().items() if not name.startswith("output.")}
    critic.load_state_dict(body, strict=False)
    torch.nn.init.zeros_(critic.output.weight)

    def values_of(sequences: Sequences) -> Tensor:
        return critic(sequences.input_ids, stage.masks(sequences)[0])[:, PROMPT_LENGTH - 1 : -1, 0]

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


def group_policy_gradient(stage: Stage) -> Iterator[Diagnostics]:
    """GRPO's loop with the stage's row of extensions/objectives: groups of answers, one advantage each, several passes (RLOO: one).

    The row says what the loss is and hands back its gradient in closed form with respect to each log-probability; the
    transformer's backward pass takes it from there.
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
            result = evaluate(
                row,
                make_batch(
                    logps=scored.logps.detach(),
                    old_logps=old_logps,
                    ref_logps=None if reference is None else reference.logps,
                    mask=scored.counted,
                    rewards=answers.rewards,
                    rewards_per_func=answers.rewards.unsqueeze(1),
                    reward_weights=torch.ones(1),  # the verifier is the only reward function
                    reward_baselines=greedy_rewards,
                    group_ids=answers.group_ids,
                    logits=scored.logits.detach(),
                    ref_logits=None if reference is None else reference.logits,
                    budget=RESPONSE_LENGTH,
                ),
            )
            loss = loss_to_backpropagate(result, scored.logps, logits=scored.logits)
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


TRAINABLE_ROWS = tuple(name for name, row in ROWS.items() if not {"values", "vpreds", "advantages"} & set(row.needs))
"""The rows of extensions/objectives that need no critic."""


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
