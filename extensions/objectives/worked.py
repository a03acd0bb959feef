"""Worked examples: the overview guide's numbers, by the engine and by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

import rl_lab
from extensions.objectives.advantages import compute_advantages
from extensions.objectives.batch import make_batch
from extensions.objectives.choices import Row
from extensions.objectives.engine import Evaluation, evaluate
from extensions.objectives.pairs import PreferenceEvaluation, PreferenceRow, evaluate_preference, make_preferences
from extensions.objectives.rows import ROWS
from extensions.objectives.rows_pairs import PREFERENCE_ROWS

def worked_examples() -> list[rl_lab.WorkedExample]:
    """The overview guide's numbers, each by the engine beside its arithmetic."""

    def tensor(*numbers: float) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float64)

    examples: list[rl_lab.WorkedExample] = []

    def show(title: str, formula: str, inputs: str, result, expected: list[float], digits: int = 6) -> None:
        result = result.flatten().tolist() if isinstance(result, Tensor) else result
        examples.append(
            rl_lab.WorkedExample("", title, formula, inputs, [round(x, 12) + 0.0 for x in result], expected, digits)
        )

    def bandit(row: Row, logp: Tensor, old_logp: Tensor, A: Tensor) -> Evaluation:
        return evaluate(
            replace(row, baseline="given", scale="none"), make_batch(logps=logp, old_logps=old_logp, advantages=A)
        )

    clip_only = replace(ROWS["bnpo"], name="clip")

    # 1  a loss of 0 that still learns
    half = tensor(0.5, 0.5).log()
    first = bandit(clip_only, half, half, tensor(1, -1))
    slope = (first.dloss_dlogps.flatten() * tensor(0.5, -0.5)).sum().item()
    show(
        "a loss of 0 with gradient -0.5, and the step it makes",
        "L = 1 - 2 sigmoid(theta); dlogp/dtheta = 0.5, -0.5; theta = 0 - 0.2 * slope; p = sigmoid(theta)",
        "two answers of one token, p = 1/2 each, A = [1, -1], SGD lr 0.2",
        [first.loss.item(), slope, 1 / (1 + math.exp(0.2 * slope))],
        [0.0, -0.5, 0.525],
        3,
    )

    # 2  unequal lengths
    two_three = make_batch(
        logps=torch.zeros(2, 3, dtype=torch.float64) - 1,
        advantages=tensor(1, -1),
        mask=torch.tensor([[True, True, False], [True, True, True]]),
    )
    reductions = ("mean_per_response", "mean_over_tokens", "sum_per_response")
    by_reduction = [
        evaluate(replace(clip_only, baseline="given", scale="none", reduction=name), two_three) for name in reductions
    ]
    show(
        "unequal lengths: three reductions, three losses",
        "per response (-1 + 1)/2; per token (-2 + 3)/5; sum per response (-2 + 3)/2",
        "A = [1, -1], 2 and 3 tokens, every ratio 1",
        [result.loss.item() for result in by_reduction],
        [0.0, 0.2, 0.5],
    )

    # 3  logp - logp
    logp = tensor(0.5).log().requires_grad_()
    with torch.enable_grad():
        wrong = torch.autograd.grad(-(logp - logp).exp().sum(), logp)[0].item()
        right = torch.autograd.grad(-(logp - logp.detach()).exp().sum(), logp)[0].item()
    engine = bandit(clip_only, logp.detach(), logp.detach(), tensor(1.0)).dloss_dlogps
    show(
        "logp - logp kills the gradient, logp - sg[logp] does not",
        "d/dl of -exp(l - l) A = 0; of -exp(l - l0) A = -A; engine: -A",
        "one token, A = 1",
        [wrong, right, engine.item()],
        [0.0, -1.0, -1.0],
    )

    # 4  1000 and 50 tokens
    lengths = make_batch(
        logps=torch.zeros(2, 1000, dtype=torch.float64),
        advantages=tensor(1, 1),
        mask=torch.arange(1000) < torch.tensor([[1000], [50]]),
    )
    weights = [
        evaluate(replace(clip_only, baseline="given", scale="none", reduction=name), lengths).weights[:, 0]
        for name in ("mean_per_response", "mean_over_tokens")
    ]
    show(
        "a token of a long answer against one of a short answer",
        "per response (1/1000) / (1/50) = 1/20; over tokens 1",
        "answers of 1000 and of 50 tokens",
        [(w[0] / w[1]).item() for w in weights],
        [0.05, 1.0],
    )

    # 5  the same band, rare and frequent
    p0 = tensor(0.01, 0.5)
    edge = bandit(clip_only, (p0 * 1.2).log(), p0.log(), tensor(1, 1))
    beyond = bandit(clip_only, (p0 * 1.2001).log(), p0.log(), tensor(1, 1))
    show(
        "+20 % on a rare and on a frequent token",
        "p0 * r - p0 at r = 1.2: 0.01 -> 0.012, 0.5 -> 0.6; flat just beyond",
        "p0 = 0.01 and 0.5, A = 1, epsilon 0.2; last: flat tokens at r = 1.2001",
        [*(p0 * edge.ratios.flatten() - p0).tolist(), float(beyond.flat.sum())],
        [0.002, 0.1, 2.0],
    )

    # 6  group advantages
    def of_rewards(row: Row, *rewards: float) -> Tensor:
        batch = make_batch(logps=torch.full((4,), -1.0, dtype=torch.float64), rewards=tensor(*rewards), group_ids=[0] * 4)
        return compute_advantages(row, batch)

    grpo = replace(ROWS["grpo"], kl="none")
    show(
        "group advantages, population std",
        "(R - 1/2) / (1/2); (R - 1/4) / sqrt(3/16)",
        "rewards [1,0,1,0] and [0,1,0,0]",
        torch.cat([of_rewards(grpo, 1, 0, 1, 0), of_rewards(grpo, 0, 1, 0, 0)]),
        [1, -1, 1, -1, -0.57735, 1.73205, -0.57735, -0.57735],
        5,
    )
    show(
        "the same with the sample std of most trainers",
        "std = sqrt(1/3): 0.5 / 0.57735",
        "rewards [1,0,1,0], no guard",
        of_rewards(replace(grpo, std_ddof=1, std_eps=0.0), 1, 0, 1, 0),
        [0.8660, -0.8660, 0.8660, -0.8660],
        4,
    )
    show(
        "a group without spread gives no signal",
        "A = 0, whatever the guard",
        "rewards [0,0,0,0]",
        of_rewards(grpo, 0, 0, 0, 0),
        [0.0, 0.0, 0.0, 0.0],
    )

    # 7  RLOO
    loo = of_rewards(ROWS["rloo@verl-0.9.1"], 1, 0, 1, 0)
    centred = of_rewards(replace(grpo, scale="none"), 1, 0, 1, 0)
    show(
        "RLOO's identity",
        "R_i - mean of the others = G / (G - 1) * (R_i - mean): 1 - 1/3 = 4/3 * 1/2",
        "rewards [1,0,1,0]; last: largest difference of the two sides",
        [loo[0].item(), loo[1].item(), (loo - 4 / 3 * centred).abs().max().item()],
        [2 / 3, -2 / 3, 0.0],
    )

    # 8  GSPO's ratio
    ratios = tensor(2.0, 0.5, 1.5)
    three = make_batch(
        logps=ratios.log().unsqueeze(0),
        old_logps=torch.zeros(1, 3, dtype=torch.float64),
        mask=[[True] * 3],
        advantages=tensor(1.0),
    )
    levels = [
        evaluate(replace(clip_only, baseline="given", scale="none", ratio=level), three).ratios[0, 0].item()
        for level in ("sequence_mean", "sequence_product")
    ]
    show(
        "GSPO's ratio: geometric mean, not arithmetic mean, not product",
        "1.5^(1/3); (2 + 0.5 + 1.5)/3; 2 * 0.5 * 1.5",
        "token ratios 2, 0.5, 1.5",
        [levels[0], ratios.mean().item(), levels[1]],
        [1.5 ** (1 / 3), 4 / 3, 1.5],
    )

    # 9  one input, many surrogates
    rows = [
        clip_only,
        replace(clip_only, surrogate="dual_clip"),
        replace(clip_only, surrogate="cispo"),
        replace(clip_only, surrogate="sapo"),
    ]
    slopes = [bandit(row, tensor(4.0).log(), tensor(0.0), tensor(-1.0)).dloss_dlogps.item() for row in rows]
    p = 1 / (1 + math.exp(-1.05 * 3))
    show(
        "clip, dual clip, CISPO, SAPO on one token",
        "-r A = 4; 0 beyond c = 3; clip(r) = 1.2; 4 p (1 - p) r, p = sigmoid(1.05 * 3)",
        "r = 4, A = -1: d loss / d logp",
        slopes,
        [4.0, 0.0, 1.2, 4 * p * (1 - p) * 4],
    )

    # 10  DPO
    def pair(row: PreferenceRow, *four: float) -> PreferenceEvaluation:
        chosen, rejected, ref_chosen, ref_rejected = (tensor(x).log() for x in four)
        return evaluate_preference(
            row,
            make_preferences(
                chosen_logps=chosen, rejected_logps=rejected, ref_chosen_logps=ref_chosen, ref_rejected_logps=ref_rejected
            ),
        )

    dpo = replace(PREFERENCE_ROWS["dpo"], beta=1.0)
    before, after = pair(dpo, 0.4, 0.3, 0.4, 0.3), pair(dpo, 0.3, 0.1, 0.4, 0.3)
    show(
        "the chosen answer falls while the DPO loss falls",
        "exp(D) = (0.3/0.1) / (0.4/0.3) = 2.25; log 2 -> log(1 + 1/2.25)",
        "chosen 0.4 -> 0.3, rejected 0.3 -> 0.1, beta 1",
        [after.margins.exp().item(), before.loss.item(), after.loss.item()],
        [2.25, 0.6931, 0.3677],
        4,
    )
    show(
        "a pair's loss",
        "-log sigmoid(0.2 * 2)",
        "D = 2, beta 0.2",
        pair(replace(dpo, beta=0.2), math.exp(-1), math.exp(-3), 1, 1).loss.unsqueeze(0),
        [0.513],
        3,
    )
    both = pair(PREFERENCE_ROWS["dpo"], 0.4, 0.3, 0.4, 0.3).dloss_dlogps
    with_sft = pair(replace(PREFERENCE_ROWS["dpo"], sft_coef=1.0), 0.4, 0.3, 0.4, 0.3).dloss_dlogps
    show(
        "DPO beside SFT: gradient on chosen and on rejected",
        "DPO -beta/2, +beta/2; SFT -1, 0",
        "policy = reference, beta 0.1",
        torch.cat([both, with_sft - both]),
        [-0.05, 0.05, -1.0, 0.0],
    )
    return examples


def print_examples() -> None:
    examples = worked_examples()
    for example in examples:
        print(f"{example.title}\n{example.text('engine', 'by hand')}\n")
    print(f"{sum(example.agrees() for example in examples)} of {len(examples)} agree.")
