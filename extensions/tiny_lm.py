"""The lab's atoms on a real transformer: SFT, PPO, DPO, online DPO, GRPO and RLOO with a verifier, on a CPU.

What moving from a table of logits to a language model adds, all of it running here: autoregressive generation, response
masks, left padding, a verifiable reward, a frozen reference, cached old log-probabilities, groups, held-out evaluation.

    tiny_lm_task.py     prompts, right answers, held-out split, verifiers
    tiny_lm_model.py    the transformer, key-value cache, sampling, the two masks
    this file           settings, six trainings, measuring, files, command line

No objective is written here: the losses are atoms of rl_lab.py, reductions of token_objectives.py and rows of objectives.py.

Same as the papers: DPO on summed log-probabilities against a fixed reference; outcome GRPO with one advantage per answer;
RLOO with the KL in the reward; PPO for language models with a token-level critic, GAE over response tokens and the KL in the
reward. Simplified: float32, one batch per update (no minibatches), answers of at most 7 tokens, so that the token limit
belongs to the task and a truncated answer has ended (terminated, no bootstrap). Left out: entropy bonus, value clipping,
advantage standardisation in PPO.

Measured with the defaults on seeds 0, 7, 19. Sampled held-out accuracy 0.50-0.58 after SFT; 0.97-1.00 after every method,
greedy 0.99-1.00. What did not work, or does not show:
- Few preference pairs: with about 105 (--dpo-prompts 128) DPO ends at 0.17-0.23 while its pair accuracy reaches 1.0 and the
  chosen answers lose 2.2-3.6 nats; about 220 pairs give 0.29-0.48, 880 give 0.80-0.95, 3500 give 0.99-1.00.
- The critic explains nothing once answers are good: explained variance is about 0, then negative, as returns stop varying.
- Variants of the objective end within the spread of the seeds: answers are short and ratios stay near 1. What they change
  is shown exactly in objectives.py.
- The KL to the reference ends near the same number for every method: there is one right answer to each prompt, and a policy
  that always gives it is -log p_ref(answer) away.
- A weak verifier (sorted-only) is satisfied after 60 rounds of GRPO, reward 0.99-1.00, at accuracy 0.000-0.001 without KL
  and 0.00-0.02 with the default weight; at 0.05 the KL keeps 0.54-0.62 and the reward is 0.97-1.00 all the same. An exact
  verifier on 4, 16, 64 prompts: reward 0.98-1.00, accuracy 0.09-0.53, 0.57-0.67, 0.87-0.89.

Letters: N answers, R response positions, G answers to one prompt, V vocabulary. Tensors of this file are aligned to the
response: column t belongs to the t-th token that the policy wrote.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import statistics
import time
from pathlib import Path
from typing import Callable, Iterator, NamedTuple, Sequence

import torch
from torch import Tensor

from extensions.objectives import ROWS, Row, evaluate, gae_over_tokens, loss_to_backpropagate, make_batch
from extensions.tiny_lm_model import Decoder, Sequences, generate, join
from extensions.tiny_lm_task import (
    PAD,
    PROMPT_LENGTH,
    RESPONSE_LENGTH,
    VERIFIERS,
    VOCABULARY,
    Prompts,
    correct_responses,
    describe,
    draw_prompts,
    rewards,
    written,
)
from rl_lab import (
    Adam,
    FileProblem,
    LabParser,
    OnStep,
    Range,
    Settings,
    add_settings,
    categorical_kl,
    check_writable,
    chosen_settings,
    clip_fraction,
    clipped_policy_loss,
    csv_text,
    descend,
    dpo_loss,
    format_table,
    groups_without_spread,
    importance_ratio,
    json_text,
    progress_line,
    replace_files,
    response_token_logps,
    run_command,
    setting,
    software,
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
    """PPO for language models, by the row `ppo` of objectives.py with a KL in the reward -> advantages, returns [N, R].

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
    """GRPO's loop with the stage's row of objectives.py: groups of answers, one advantage each, several passes (RLOO: one).

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
"""The rows of objectives.py that need no critic."""


def own_steps(algorithm: str, verifier: str) -> int:
    """The rounds of a training that was not told how many; half as many satisfy a verifier that forgets something."""
    return METHODS[algorithm].steps // (1 if VERIFIERS[verifier] == VERIFIERS["exact"] else 2)


def columns_of(algorithm: str) -> tuple[str, ...]:
    return ("step", *EVALUATION_COLUMNS, "loss", "gradient_norm", *METHODS[algorithm].own_columns, *COST_COLUMNS)


def objective_row(algorithm: str, objective: str | None, kl: float | None) -> Row | None:
    """The row of objectives.py that a group method trains on, or None for the others.

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


# ------------------------------------------------------------------------------------------ measuring


@torch.no_grad()
def measure(policy: Decoder, old: Decoder, reference: Decoder, stage: Stage, held_out: Prompts) -> Diagnostics:
    """What a policy does, measured the same way for every method, with random draws that are the same at every call.

    sampled_accuracy, greedy_accuracy: exact match on held-out prompts, whatever the verifier. reward: what the verifier
    gives to 256 answers at training prompts. response_length with EOS and truncated_fraction, answers without EOS: on the
    sampled held-out answers. On the first 256 of these: both KLs, exact over the vocabulary at each prefix, summed over the
    tokens of an answer, averaged over answers; entropy, mean over tokens.
    """
    # Copies without the dropout that a mistake may have switched on.
    policy, old, reference = (copy.deepcopy(model).eval() for model in (policy, old, reference))
    generator = torch.Generator().manual_seed(stage.settings.seed + 1)
    answers, _ = generate(policy, held_out, generator)
    greedy, _ = generate(policy, held_out, None)
    rewarded = dataclasses.replace(stage, generator=generator).draw(256)
    first = slice(256)
    sequences = join(held_out.take(first), answers[first])
    wrote = sequences.response_mask[:, 1:]
    logits, old_logits, reference_logits = (
        model(sequences.input_ids, sequences.attention_mask)[:, :-1][wrote].double() for model in (policy, old, reference)
    )
    return {
        "sampled_accuracy": rewards("exact", held_out, answers).double().mean().item(),
        "greedy_accuracy": rewards("exact", held_out, greedy).double().mean().item(),
        "reward": rewards(stage.verifier, rewarded, generate(policy, rewarded, generator)[0]).double().mean().item(),
        "kl_current_reference": categorical_kl(logits, reference_logits).sum().item() / len(sequences.input_ids),
        "kl_old_current": categorical_kl(old_logits, logits).sum().item() / len(sequences.input_ids),
        "entropy": torch.special.entr(logits.softmax(dim=-1)).sum(dim=-1).mean().item(),
        "response_length": written(answers).sum(dim=1).double().mean().item(),
        "truncated_fraction": (~(answers == PAD).any(dim=1)).double().mean().item(),
    }


def sample_records(policy: Decoder, stage: Stage, held_out: Prompts, moment: str, count: int = 16) -> list[dict]:
    """Sampled answers to held-out and to training prompts with parse, reward parts and reasons for failure, for reading."""
    policy = copy.deepcopy(policy).eval()
    generator = torch.Generator().manual_seed(stage.settings.seed + 2)
    training = dataclasses.replace(stage, generator=generator).draw(count)
    records = []
    for split, prompts in (("held-out", held_out.take(slice(count))), ("training", training)):
        responses, logps = generate(policy, prompts, generator)
        for record, logp in zip(describe(stage.verifier, prompts, responses), logps.sum(dim=1).tolist()):
            records.append({"moment": moment, "split": split, **record, "logp": logp})
    return records


# ------------------------------------------------------------------------------------------ training


class TrainingRun(NamedTuple):
    """What a training leaves behind."""

    algorithm: str
    verifier: str
    mistake: str | None
    settings: TinySettings
    row: Row | None
    history: list[Diagnostics]
    samples: list[dict]
    policy: Decoder
    reference: Decoder


def train(
    algorithm: str,
    start: Decoder | None = None,
    *,
    verifier: str = "exact",
    objective: str | None = None,
    mistake: str | None = None,
    on_step: OnStep | None = None,
    **settings: float,
) -> TrainingRun:
    """Train a copy of `start`; `start` itself, frozen, is the reference. SFT without `start` begins with random weights.

    The history has a row before training, one every `evaluate_every` rounds and one at the end. EVALUATION_COLUMNS are
    measured after the row's update; loss, gradient norm and the method's own columns are averages over the rounds since the
    row before (each round reports its last pass) and NaN where there is nothing to average; counts are cumulative; `seconds`
    is the only column that differs between equal runs.

    settings: fields of TinySettings. Global random state, default dtype and thread count stay as they were.
    Raises ValueError for unknown names, settings out of range, a mistake without effect on this algorithm, or a DPO without
    pairs; FloatingPointError when a loss or gradient is not finite.
    """
    check_names(algorithm, verifier, objective, mistake)
    kl = settings.get("kl", None if objective else TinySettings.kl)
    row = objective_row(algorithm, objective, kl)
    settings = TinySettings(**settings)
    method = METHODS[algorithm]
    settings = dataclasses.replace(
        settings,
        steps=settings.steps or own_steps(algorithm, verifier),
        learning_rate=settings.learning_rate or method.learning_rate,
        kl=settings.kl if row is None else row.kl_coef,
    )
    generator = torch.Generator().manual_seed(settings.seed)
    if start is None and algorithm != "sft":
        raise ValueError(f"start: {algorithm} needs a supervised policy to start from; train('sft').policy is one")
    reference = copy.deepcopy(start) if start is not None else Decoder(VOCABULARY, generator)
    reference.requires_grad_(False).eval()
    policy = copy.deepcopy(reference).requires_grad_(True)
    held_out = draw_prompts(settings.evaluation_prompts, torch.Generator().manual_seed(settings.seed + 1), held_out=True)
    public = draw_prompts(settings.public_tests, generator, held_out=False) if verifier == "public-tests" else None
    counts = dict.fromkeys(("optimizer_steps", "samples", "tokens", "pair_presentations"), 0)
    stage = Stage(algorithm, settings, policy, reference, generator, verifier, public, row, mistake, counts)

    history: list[Diagnostics] = []
    began = time.perf_counter()

    def record(step: int, old: Decoder, reports: list[Diagnostics]) -> None:
        averages = {}
        for name in ("loss", "gradient_norm", *method.own_columns):
            reported = [report[name] for report in reports if name in report]
            averages[name] = statistics.fmean(reported) if reported else math.nan
        seconds = round(time.perf_counter() - began, 3)
        measured = measure(policy, old, reference, stage, held_out)
        row = {"step": step, **measured, **averages, **counts, "seconds": seconds}
        history.append({name: row[name] for name in columns_of(algorithm)})
        if on_step:
            on_step(history[-1])

    old = copy.deepcopy(policy)
    record(0, old, [])
    samples = sample_records(policy, stage, held_out, "before")
    reports = []
    # Dropout, when a mistake switches it on, can only draw from the global generator: it is lent and given back.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(settings.seed)
        for step, report in enumerate(method.run(stage), start=1):
            reports.append(report)
            if step % settings.evaluate_every == 0 or step == settings.steps:
                record(step, old, reports)
                reports = []
            old.load_state_dict(policy.state_dict())
    samples += sample_records(policy, stage, held_out, "after")
    return TrainingRun(algorithm, verifier, mistake, settings, row, history, samples, policy, reference)


def check_names(algorithm: str, verifier: str, objective: str | None, mistake: str | None) -> None:
    """Raises ValueError, naming the argument, for an unknown name or for two that do not go together."""
    known = {"algorithm": (algorithm, METHODS), "verifier": (verifier, VERIFIERS)}
    if objective is not None:
        known["objective"] = (objective, TRAINABLE_ROWS)
    if mistake is not None:
        known["mistake"] = (mistake, MISTAKES)
    for argument, (value, names) in known.items():
        if value not in names:
            raise ValueError(f"{argument}: got {value!r}, wanted one of {', '.join(names)}")
    if objective is not None and algorithm != "grpo":
        raise ValueError(f"objective: {objective} trains in the loop of grpo, not of {algorithm}")
    if mistake is not None and algorithm not in MISTAKES[mistake].algorithms:
        raise ValueError(
            f"mistake: {mistake} makes no difference to {algorithm}; wanted one of {', '.join(MISTAKES[mistake].algorithms)}"
        )
    if verifier != "exact" and algorithm == "sft":
        raise ValueError(f"verifier: sft learns from right answers and asks no verifier, so {verifier} makes no difference")




# ------------------------------------------------------------------------------------------ files


def without_nan(metrics: Diagnostics) -> dict:
    """A row of the history for JSON, which has no NaN. Seconds stay in the CSV, so that equal runs write equal JSON."""
    return {name: None if math.isnan(value) else value for name, value in metrics.items() if name != "seconds"}


def without_infinity(fields: dict) -> dict:
    """A row's fields for JSON, which has no infinity: a limit that is not there becomes "inf" or "-inf"."""
    return {name: str(value) if value in (math.inf, -math.inf) else value for name, value in fields.items()}


def run_document(run: TrainingRun, start: TrainingRun) -> dict:
    """What OUTPUT/ALGORITHM.json holds: everything needed to run it again, and how it began and ended."""
    parameters = sum(parameter.numel() for parameter in run.policy.parameters())
    return {
        "algorithm": run.algorithm,
        "verifier": run.verifier,
        "mistake": run.mistake,
        "objective": None if run.row is None else without_infinity(dataclasses.asdict(run.row)),
        "config": dataclasses.asdict(run.settings),
        "supervised_start": {"mistake": start.mistake, "config": dataclasses.asdict(start.settings)},
        "model": {"parameters": parameters, "dtype": str(run.policy.output.weight.dtype), "vocabulary": VOCABULARY},
        "software": {**software(), "threads": torch.get_num_threads()},
        "supervised_metrics": without_nan(start.history[-1]),
        "initial_metrics": without_nan(run.history[0]),
        "final_metrics": without_nan(run.history[-1]),
    }


def paths_of(folder: Path, algorithm: str) -> dict[str, Path]:
    """The three files of one training."""
    return {
        "history": folder / f"{algorithm}.csv",
        "document": folder / f"{algorithm}.json",
        "samples": folder / f"{algorithm}-samples.jsonl",
    }


def save(folder: Path, run: TrainingRun, start: TrainingRun) -> None:
    """Write the three files of a training, all or none."""
    paths = paths_of(folder, run.algorithm)
    replace_files(
        {
            paths["history"]: csv_text(run.history),
            paths["document"]: json_text(run_document(run, start)),
            paths["samples"]: "".join(json.dumps(record, allow_nan=False) + "\n" for record in run.samples),
        }
    )


# ------------------------------------------------------------------------------------------ command line

DESCRIPTION = """\
Train a transformer of 100,000 parameters to write the distinct digits of a prompt in ascending order.
Every run begins with a supervised start from 64 demonstrations (about half of its samples are right);
then PPO, DPO, online DPO, GRPO or RLOO learn from a rule that checks answers. CPU, float32, seconds.
Writes OUTPUT/ALGORITHM.csv (metrics), .json (settings) and -samples.jsonl (answers before and after)."""

EXAMPLES = """\
examples:
  python -m extensions.tiny_lm --algorithm all
  python -m extensions.tiny_lm --algorithm grpo --objective dr_grpo --output results-dr-grpo
  python plot_results.py --input results-tiny-lm --output tiny-lm.svg

a reward that can be cheated: full reward, accuracy 0; then the same held back by the KL to the reference
  python -m extensions.tiny_lm --algorithm grpo --verifier sorted-only --kl 0 --output results-hacked
  python -m extensions.tiny_lm --algorithm grpo --verifier sorted-only --kl 0.05 --output results-held

an exact checker on too few prompts (try 4, 16 and 64)
  python -m extensions.tiny_lm --algorithm grpo --verifier public-tests --public-tests 4 --kl 0 --output results-public4

too few preference pairs: pair accuracy 1.0, yet worse answers than before
  python -m extensions.tiny_lm --algorithm dpo --dpo-prompts 128 --output results-few-pairs

verifiers (what each forgets):
{verifiers}

mistakes, made in the named algorithm while the supervised start before it stays right:
{mistakes}

Ranges in this text were measured over seeds 0, 7 and 19, single numbers with seed 7."""


def examples() -> str:
    """The end of the help text, with what the tables of this file say about verifiers and mistakes."""
    verifiers = {
        name: "forgets " + ", ".join(part for part in VERIFIERS["exact"] if part not in parts)
        for name, parts in VERIFIERS.items()
        if parts != VERIFIERS["exact"]
    }
    verifiers = {"exact": "forgets nothing", **verifiers, "public-tests": "forgets nothing, but knows few prompts"}
    mistakes = {name: f"{mistake.what}\n{'':22}watch {mistake.watch}" for name, mistake in MISTAKES.items()}
    lines = ["\n".join(f"  {name:19} {text}" for name, text in explained.items()) for explained in (verifiers, mistakes)]
    return EXAMPLES.format(verifiers=lines[0], mistakes=lines[1])


def build_parser() -> LabParser:
    parser = LabParser(prog="python -m extensions.tiny_lm", description=DESCRIPTION, epilog=examples())
    parser.add_argument("--algorithm", choices=(*METHODS, "all"), default="all", help="what to train; default all")
    parser.add_argument(
        "--objective", metavar="ROW", help="grpo only: train on this row of extensions/objectives.py; any without a critic"
    )
    parser.add_argument("--verifier", choices=tuple(VERIFIERS), default="exact", help="what gives the reward; default exact")
    parser.add_argument("--mistake", choices=tuple(MISTAKES), help="switch on a well-known bug in the named algorithm")
    folder = Path("results-tiny-lm")
    parser.add_argument("--output", type=Path, default=folder, metavar="DIR", help=f"folder to write; default {folder}")
    add_settings(parser, TinySettings)
    # Whether these were given matters: a row of --objective has a KL weight of its own, and one verifier has public tests.
    parser.set_defaults(kl=None, public_tests=None)
    return parser


def summary(runs: Sequence[TrainingRun]) -> str:
    """Before and after, and what it cost."""
    header = ["", "sampled accuracy", "greedy accuracy", "reward", "KL to ref", "length", "updates", "samples", "seconds"]
    rows = []
    for run in runs:
        before, after = run.history[0], run.history[-1]
        changes = [f"{before[name]:.3f} -> {after[name]:.3f}" for name in ("sampled_accuracy", "greedy_accuracy", "reward")]
        rows.append(
            [run.algorithm, *changes, f"{after['kl_current_reference']:.2f}", f"{after['response_length']:.2f}"]
            + [f"{after[name]:.0f}" for name in ("optimizer_steps", "samples")]
            + [f"{after['seconds']:.1f}"]
        )
    return format_table(header, rows)


def remarks(run: TrainingRun) -> Iterator[str]:
    """What a reader should not overlook in this run, from its own numbers."""
    before, after = run.history[0], run.history[-1]
    if run.mistake:
        mistake = MISTAKES[run.mistake]
        yield f"{run.algorithm}, mistake {run.mistake}: {mistake.what}. Watch {mistake.watch}."
        yield "Compare with the same command without --mistake and with another --output."
    gap_before, gap_after = (row["reward"] - row["sampled_accuracy"] for row in (before, after))
    if gap_after - gap_before > 0.2:
        yield (
            f"{run.algorithm}: the verifier {run.verifier} gives {after['reward']:.3f}, the exact accuracy is "
            f"{after['sampled_accuracy']:.3f}: the policy learned what is checked, which is not what was meant."
        )
    if run.algorithm == "ppo" and run.settings.steps <= run.settings.critic_rounds:
        yield f"ppo: the policy never moved: {run.settings.critic_rounds} rounds are the critic's (--critic-rounds)."
    pair_accuracy = after.get("pair_accuracy", 0)
    if pair_accuracy > 0.95 and after["greedy_accuracy"] < before["greedy_accuracy"]:
        yield (
            f"{run.algorithm}: pair accuracy {pair_accuracy:.3f}, yet greedy accuracy fell from "
            f"{before['greedy_accuracy']:.3f} to {after['greedy_accuracy']:.3f}: {after['pairs']:.0f} pairs learned by heart"
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    settings = {name: value for name, value in chosen_settings(arguments, TinySettings).items() if value is not None}
    named = arguments.algorithm
    if named == "all" and (arguments.mistake or arguments.objective):
        flag = "--mistake" if arguments.mistake else "--objective"
        parser.error(f"argument {flag}: name one --algorithm to use it in")
    if "public_tests" in settings and arguments.verifier != "public-tests":
        parser.error(f"argument --public-tests: the verifier {arguments.verifier} has none; add --verifier public-tests")
    algorithms = tuple(METHODS) if named == "all" else (named,)
    kl = settings.get("kl", None if arguments.objective else TinySettings.kl)
    try:
        for algorithm in algorithms:
            verifier = "exact" if named == "all" and algorithm == "sft" else arguments.verifier
            check_names(algorithm, verifier, arguments.objective, arguments.mistake)
            objective_row(algorithm, arguments.objective, kl)
    except ValueError as problem:
        parser.error(f"argument --{problem}")
    paths = [path for name in algorithms for path in paths_of(arguments.output, name).values()]
    check_writable(paths, expected_bytes=500_000)

    shared = {name: settings[name] for name in ("seed", "max_gradient_norm", "demonstrations", "evaluation_prompts")}
    if named in ("sft", "all"):
        own = settings if named == "sft" else {**shared, "evaluate_every": settings["evaluate_every"]}
        start = train(
            "sft", mistake=arguments.mistake if named == "sft" else None, on_step=progress("sft", own), **own
        )
        save(arguments.output, start, start)
        runs = [start]
    else:
        # The supervised start is always right: a mistake is made in the training that was named.
        start = train("sft", on_step=progress("sft", shared), **shared, evaluate_every=METHODS["sft"].steps)
        runs = []
    for algorithm in algorithms:
        if algorithm == "sft":
            continue
        try:
            run = train(
                algorithm,
                start.policy,
                verifier=arguments.verifier,
                objective=arguments.objective,
                mistake=arguments.mistake,
                on_step=progress(algorithm, settings, arguments.verifier),
                **settings,
            )
        except ValueError as problem:
            parser.error(f"{algorithm}: {problem}")
        save(arguments.output, run, start)
        runs.append(run)

    details = [f"seed {settings['seed']}", f"verifier {arguments.verifier}"]
    details += [f"objective {arguments.objective}"] if arguments.objective else []
    details += [f"mistake {arguments.mistake}"] if arguments.mistake else []
    print(", ".join(details) + f"; accuracy on {settings['evaluation_prompts']} held-out prompts\n")
    print(summary(runs))
    print()
    for run in runs:
        for remark in remarks(run):
            print(remark)
    if len(runs) > 1:
        print("The trainings differ in samples, updates and learning rates: this is a check of each, not a ranking.")
    tables = ", ".join(str(paths_of(arguments.output, run.algorithm)["history"]) for run in runs)
    print(f"Files: {tables}; beside each .json and -samples.jsonl")


def progress(algorithm: str, settings: dict[str, float], verifier: str = "exact") -> OnStep | None:
    return progress_line(f"{algorithm:10}", settings.get("steps") or own_steps(algorithm, verifier), "sampled_accuracy")


if __name__ == "__main__":
    run_command(main)
