"""A small batch that every row can be shown on."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

import rl_lab
from extensions.objectives.batch import Batch, make_batch
from extensions.objectives.pairs import Preferences
EOS_AND_PAD = 4


def small_batch() -> tuple[Batch, Tensor]:
    """Two prompts with three answers each, 2 to 6 tokens, over a vocabulary of 5; and the token ids, (6, 6).

    EOS and PAD share id 4, so the mask comes from lengths: `ids != 4` would drop every real EOS. Policies are softmaxes of
    smooth functions of (answer, position, token): no random number, and ratios from 0.6 to 3.3.
    """
    lengths = torch.tensor([2, 6, 4, 3, 5, 2])
    answer, position, token = torch.meshgrid(torch.arange(6), torch.arange(6), torch.arange(5), indexing="ij")
    mask = torch.arange(6) < lengths.unsqueeze(1)
    ids = (answer[..., 0] + 2 * position[..., 0]) % 3 + 1
    ids = ids.masked_fill(torch.arange(6) >= lengths.unsqueeze(1) - 1, EOS_AND_PAD)
    wave = (0.6 * answer + 1.1 * position + 2.3 * token).double()
    logits, old_logits = 1.4 * wave.cos(), 1.4 * wave.cos() + 0.7 * (1.3 * wave).sin()
    ref_logits = 1.1 * wave.cos() + 0.5 * (1.9 * wave).sin()
    logps, old_logps, ref_logps = (rl_lab.action_logps(z, ids) for z in (logits, old_logits, ref_logits))
    values = 0.4 + 0.3 * (0.9 * answer[..., 0] + 0.5 * position[..., 0]).double().sin()
    batch = make_batch(
        logps=logps,
        old_logps=old_logps,
        ref_logps=ref_logps,
        mask=mask,
        rewards=torch.tensor([1.0, 0.0, 0.5, 0.2, 0.0, 1.0], dtype=torch.float64),
        group_ids=torch.tensor([0, 0, 0, 1, 1, 1]),
        reward_baselines=torch.tensor([0.5, 0.5, 0.5, 0.2, 0.2, 0.2], dtype=torch.float64),
        rewards_per_func=torch.tensor([[1.0, 0], [0, 0], [0, 0.5], [0, 0.2], [0, 0], [1, 0]], dtype=torch.float64),
        reward_weights=torch.ones(2, dtype=torch.float64),
        logits=logits,
        ref_logits=ref_logits,
        values=values,
        vpreds=values + 0.1 * wave[..., 0].cos(),
        entropies=torch.special.entr(logits.softmax(dim=-1)).sum(dim=-1),
        budget=6,
        truncated=torch.tensor([False, False, False, False, True, False]),
        sampler_logps=old_logps + 0.25 * (1.7 * wave[..., 0]).sin(),
        sampler_weights=1 + 0.2 * (1.1 * wave[..., 0]).cos(),
        selected_tokens=mask & (ids != 1),
    )
    return replace(batch, advantages=torch.where(mask, batch.rewards.unsqueeze(1) - values, 0.0)), ids


def small_preferences(batch: Batch) -> Preferences:
    """Three pairs of answers of the small batch, each better than its partner; KTO labels the same six answers."""
    rows = torch.tensor([0, 2, 5, 1, 1, 4])
    return Preferences(
        logps=batch.logps[rows],
        mask=batch.mask[rows],
        are_pairs=True,
        answer_lengths=batch.lengths[rows],
        pair_weights=torch.tensor([0.5, 1.0, 0.75], dtype=torch.float64),
        ref_logps=batch.ref_logps[rows],
        labels=torch.tensor([True, True, True, False, False, False]),
        kl_seq_logps=torch.tensor([-5.0, -7.0, -4.0, -9.0, -9.0, -8.0], dtype=torch.float64),
        ref_kl_seq_logps=torch.tensor([-5.5, -7.0, -4.5, -8.5, -9.5, -8.5], dtype=torch.float64),
    )
