"""What the tests share: small policies, prompts by hand, one supervised start for all."""

from __future__ import annotations

import copy
from functools import lru_cache

import torch

from extensions import tiny_lm
from extensions.tiny_lm import METHODS, Stage, TinySettings, train
from extensions.tiny_lm.model import Decoder
from extensions.tiny_lm.task import PAD, PROMPT_LENGTH, RESPONSE_LENGTH, SEPARATOR, VOCABULARY, Prompts

SMALL = dict(
    evaluate_every=1000, evaluation_prompts=32, group_size=4, group_prompts=4, ppo_prompts=8, online_prompts=8,
    dpo_prompts=16, dpo_batch=8, critic_rounds=0,
)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_policy(seed: int = 0, outputs: int = VOCABULARY) -> Decoder:
    """A float64 policy that is far from uniform, so that a wrong mask shows."""
    policy = Decoder(outputs, seeded(seed)).double()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(5 if parameter.dim() == 2 else 1)
    return policy


@lru_cache
def supervised(seed: int) -> tiny_lm.TrainingRun:
    return train("sft", seed=seed, evaluate_every=1000, evaluation_prompts=400)


SEEDS = (7, 0, 19)


def start_and_rise(seed: int) -> tuple[dict, dict, dict]:
    """After the supervised start; before and after some rounds of GRPO from there."""
    start = supervised(seed)
    run = train("grpo", start.policy, seed=seed, steps=15, evaluate_every=15, evaluation_prompts=300)
    return start.history[-1], run.history[0], run.history[-1]


def prompts_of(*rows: list[int]) -> Prompts:
    """Prompts written out by hand, for example [3, 1, 3]."""
    ids = [[PAD] * (PROMPT_LENGTH - 1 - len(row)) + row + [SEPARATOR] for row in rows]
    masks = [[False] * (PROMPT_LENGTH - 1 - len(row)) + [True] * (len(row) + 1) for row in rows]
    return Prompts(torch.tensor(ids), torch.tensor(masks))


def responses_of(*rows: list[int]) -> torch.Tensor:
    return torch.tensor([row + [PAD] * (RESPONSE_LENGTH - len(row)) for row in rows])


def stage_of(algorithm: str, policy: Decoder, mistake: str | None = None, **settings: float) -> Stage:
    reference = copy.deepcopy(policy).requires_grad_(False)
    chosen = TinySettings(**{**SMALL, **settings})
    counts = dict.fromkeys(("optimizer_steps", "samples", "tokens", "pair_presentations"), 0)
    row = tiny_lm.objective_row(algorithm, None, chosen.kl)
    final_rate = METHODS[algorithm].final_rate
    return Stage(algorithm, chosen, policy, reference, seeded(chosen.seed), "exact", None, row, mistake, counts, final_rate)


def rounds_of(algorithm: str, mistake: str | None = None, row=None, **settings: float) -> tuple[list[dict], Stage]:
    """The reports of a few rounds from the supervised policy, without the measuring that train adds."""
    stage = stage_of(algorithm, copy.deepcopy(supervised(7).policy), mistake, learning_rate=1e-3, **settings)
    stage.row = row or stage.row
    with torch.random.fork_rng(devices=[]):
        return list(METHODS[algorithm].run(stage)), stage
