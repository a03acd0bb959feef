"""Settings, well-known mistakes, and what a training is given: models, prompts, a verifier. A mistake is an entry."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Callable, Iterator, NamedTuple, Sequence

import torch
from torch import Tensor

from extensions.distributed import rules
from extensions.objectives import Row
from extensions.tiny_lm.model import Decoder, Sequences, Split, generate, join
from extensions.tiny_lm.task import PAD, PROMPT_LENGTH, Prompts, draw_prompts, rewards, written
from rl_lab import Adam, Range, Settings, descend, response_token_logps, setting

if TYPE_CHECKING:
    from extensions.distributed.ranks import Rank

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
    final_rate: float = 0.0  # share of the learning rate that is left at the end
    rank: Rank | None = None  # of several that train together, each on its rows; None: one process

    def __post_init__(self) -> None:
        if self.mistake == "dropout":
            self.policy.dropout = 0.1
            self.policy.train()

    def rounds(self, *optimizers: Adam) -> Iterator[int]:
        """The rounds 1..steps; the learning rate falls linearly to the method's share of its start."""
        steps, final = self.settings.steps, self.final_rate
        for step in range(1, steps + 1):
            if self.rank is not None:
                self.rank.watch.meet(f"{self.algorithm}, round {step}")
            for optimizer in optimizers:
                optimizer.lr = self.settings.learning_rate * (1 - (1 - final) * (step - 1) / steps)
            yield step

    def update(self, loss: Tensor, optimizer: Adam, step: int) -> float:
        """One optimizer step; returns the gradient norm before clipping."""
        self.counts["optimizer_steps"] += 1
        if self.rank is not None:
            loss = summed_over_ranks(loss, optimizer.parameters, self.rank.group)
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
        split = None if self.rank is None else Split(self.rank.group, group_size)
        generated = [generate(self.policy, part, self.generator, temperature, split) for part in parts]
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
        """The training pass: log-probability of every token that the policy wrote. Gradient: to the model.

        Of several ranks each computes its own rows and hands them to the others: what follows sees the whole batch, so that
        no denominator or statistic depends on the split, and the gradient goes through the own rows.
        """
        return Scored(*self.over_ranks(lambda rows: self._score(model, rows), sequences))

    def over_ranks(self, compute: Callable[[Sequences], tuple[Tensor, ...]], sequences: Sequences) -> tuple[Tensor, ...]:
        """compute(sequences), row by row; on several ranks each computes its part."""
        if self.rank is None:
            return compute(sequences)
        grouped = self.row is not None  # an answer's group is its neighbours
        split = Split(self.rank.group, self.settings.group_size if grouped else 1)
        return tuple(split.join(part) for part in compute(sequences.take(split.own(len(sequences.input_ids)))))

    def _score(self, model: Decoder, sequences: Sequences) -> Scored:
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


def summed_over_ranks(loss: Tensor, parameters: Sequence[Tensor], group: object) -> Tensor:
    """A loss of the same value whose gradient is the SUM over ranks of this one's.

    The loss of every rank is that of the whole batch, its gradient goes through the rank's own rows alone: so the sum is the
    gradient of one process, and nothing is divided. loss + sum g (p - sg[p]), g the reduced gradient.
    """
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    reduced = [torch.zeros_like(parameter, requires_grad=True) for parameter in parameters]
    for parameter, gradient in zip(reduced, gradients):
        parameter.grad = gradient.contiguous()
    rules.reduce_gradients(reduced, group)
    return loss.detach() + sum((p.grad * (q - q.detach())).sum() for p, q in zip(reduced, parameters))


Diagnostics = dict[str, float]
