"""What a policy does, measured the same way for every method."""

from __future__ import annotations

import copy
import dataclasses

import torch

from extensions.tiny_lm.stage import Diagnostics, Stage
from extensions.tiny_lm.model import Decoder, generate, join
from extensions.tiny_lm.task import PAD, Prompts, describe, rewards, written
from rl_lab import categorical_kl

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
