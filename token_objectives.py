"""DPO and GRPO on token sequences: causal shift, response mask, EOS that shares its id with PAD, and reductions.

The model is a trainable 5x5 bigram table: row = previous token, entries = logits of the next. Two prewritten answers to one
prompt, of different lengths, take one SGD step under each objective. This checks the wiring of sequence objectives. It is
no GRPO training: nothing is sampled from an old policy, there is no attention mask and no independent evaluation.

Same as the papers: DPO sums token log-probabilities; outcome GRPO gives every token of an answer the answer's advantage,
averages over the tokens of each answer, then over answers. Different: the KL at each observed prefix is exact, a sum over
the five tokens, where the GRPO paper estimates it from the sampled token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Callable, NamedTuple, Sequence

# First of the imports that take time: it answers Ctrl-C while torch is loading.
from rl_lab import (
    LabParser,
    categorical_kl,
    check_writable,
    clipped_policy_loss,
    dpo_loss,
    format_table,
    group_advantages,
    json_text,
    one_line,
    path_argument,
    replace_files,
    response_logps,
    response_token_logps,
    run_command,
    software,
)

import torch  # isort: skip
from torch import Tensor  # isort: skip

BOS, PROMPT, GOOD, BAD, EOS = range(5)
PAD = EOS
VOCABULARY = ("BOS", "prompt", "good", "bad", "EOS")

INPUT_IDS = torch.tensor([[BOS, PROMPT, GOOD, EOS, PAD], [BOS, PROMPT, BAD, BAD, EOS]])
RESPONSE_MASK = torch.tensor([[False, False, True, True, False], [False, False, True, True, True]])
"""Row 0 is the chosen answer (reward 1), row 1 the rejected one (reward 0). Only position tells EOS from PAD."""

REWARDS = torch.tensor([1.0, 0.0], dtype=torch.float64)
LEARNING_RATE = 0.1
DPO_BETA = 0.5
CLIP_EPSILON = 0.2
KL_WEIGHT = 0.02
GROUP_EPS = 1e-8

# ------------------------------------------------------------------------------------------ reductions

Reduction = Callable[[Tensor, Tensor], Tensor]


def mean_per_response(token_values: Tensor, valid: Tensor) -> Tensor:
    """(1/B) sum_i (1/T_i) sum_t x_it over valid tokens, T_i the valid tokens of row i: every response weighs 1/B.

    token_values [B, T] floating, valid [B, T] bool -> scalar. Gradient: to valid tokens. Unset slots are not read: NaN
    there changes nothing. Raises ValueError (shapes, a row without a valid token). The reduction of the GRPO paper.
    """
    _check_tokens(token_values, valid)
    per_response = token_values.masked_fill(~valid, 0.0).sum(dim=1) / valid.sum(dim=1)
    return per_response.mean()


def mean_over_tokens(token_values: Tensor, valid: Tensor) -> Tensor:
    """(sum_i sum_t x_it) / (sum_i T_i) over valid tokens: every token weighs the same, long responses weigh more.

    Arguments, gradient and errors as mean_per_response. The reduction of DAPO.
    """
    _check_tokens(token_values, valid)
    return token_values.masked_fill(~valid, 0.0).sum() / valid.sum()


def _check_tokens(token_values: Tensor, valid: Tensor) -> None:
    if token_values.dim() != 2 or token_values.shape != valid.shape or valid.dtype != torch.bool:
        raise ValueError(
            f"token_values {tuple(token_values.shape)} {token_values.dtype} and valid {tuple(valid.shape)} {valid.dtype}: "
            "wanted one shape [B, T] and a bool mask"
        )
    if not valid.any(dim=1).all():
        raise ValueError(f"valid: row {int((~valid.any(dim=1)).nonzero()[0])} has no valid token to average over")


# ------------------------------------------------------------------------------------------ model and objectives


def bigram_logits(table: Tensor, input_ids: Tensor) -> Tensor:
    """The model: logits of the next token depend on this token only. table [V, V], input_ids [B, T] -> [B, T, V]."""
    return table[input_ids]


def check_same_prompt(input_ids: Tensor, mask: Tensor) -> None:
    """Raise ValueError unless all rows start with the same tokens up to their first response token.

    DPO and GRPO compare answers to one prompt; a tokenizer that merges across the border breaks that silently.
    """
    lengths = mask.int().argmax(dim=1)
    shortest = int(lengths.min())
    if not (lengths == shortest).all() or not (input_ids[:, :shortest] == input_ids[:1, :shortest]).all():
        raise ValueError(
            f"input_ids: the rows have prompts of lengths {lengths.tolist()} or other tokens; wanted one prompt"
        )


def pair_logps(table: Tensor, reference: Tensor, input_ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities of the pair (row 0 chosen, row 1 rejected), summed over response tokens.

    -> chosen, rejected, ref_chosen, ref_rejected, each a scalar. Gradient: to `table` only. Raises ValueError when the
    answers have different prompts.
    """
    check_same_prompt(input_ids, mask)
    chosen, rejected = response_logps(bigram_logits(table, input_ids), input_ids, mask)
    ref_chosen, ref_rejected = response_logps(bigram_logits(reference, input_ids), input_ids, mask).detach()
    return chosen, rejected, ref_chosen, ref_rejected


def preference_margin(table: Tensor, reference: Tensor, input_ids: Tensor, mask: Tensor) -> Tensor:
    """h = (chosen - ref_chosen) - (rejected - ref_rejected) of pair_logps -> scalar."""
    chosen, rejected, ref_chosen, ref_rejected = pair_logps(table, reference, input_ids, mask)
    return (chosen - ref_chosen) - (rejected - ref_rejected)


def dpo_sequence_loss(table: Tensor, reference: Tensor, input_ids: Tensor, mask: Tensor) -> Tensor:
    """DPO on the pair of pair_logps -> scalar.

    Gradient: to `table` only; the reference is fixed. Raises ValueError when the answers have different prompts.
    """
    return dpo_loss(*pair_logps(table, reference, input_ids, mask), DPO_BETA)


def grpo_sequence_loss(
    table: Tensor, old: Tensor, reference: Tensor, input_ids: Tensor, mask: Tensor, reduction: Reduction = mean_per_response
) -> Tensor:
    """Outcome GRPO on the group of all rows -> scalar.

    reduction over tokens of: -min(rho A, clip(rho) A) + KL_WEIGHT * KL(current || reference at this prefix), where A is
    the response's group advantage. Gradient: to `table` only; old and reference are fixed. Raises ValueError when the
    answers have different prompts.
    """
    check_same_prompt(input_ids, mask)
    logits = bigram_logits(table, input_ids)
    token_logps, valid = response_token_logps(logits, input_ids, mask)
    old_token_logps, _ = response_token_logps(bigram_logits(old, input_ids), input_ids, mask)
    advantages = group_advantages(REWARDS, GROUP_EPS).unsqueeze(1).expand_as(token_logps)
    policy_loss = clipped_policy_loss(token_logps, old_token_logps, advantages, CLIP_EPSILON)
    # Logits that score no response token are set aside before the KL: 0 * NaN would reach the gradient from behind the mask.
    unused = ~valid.unsqueeze(-1)
    scored, ref_scored = (x[:, :-1].masked_fill(unused, 0.0) for x in (logits, bigram_logits(reference, input_ids)))
    kl_current_reference = categorical_kl(scored, ref_scored)
    return reduction(policy_loss + KL_WEIGHT * kl_current_reference, valid)


class SgdStep(NamedTuple):
    """One plain SGD step from a table: loss and table on both sides of it."""

    loss_before: float
    loss_after: float
    gradient_norm: float
    table_after: Tensor


def sgd_step(loss: Callable[[Tensor], Tensor], table: Tensor) -> SgdStep:
    """table - LEARNING_RATE * gradient, with the loss evaluated before and after."""
    table = table.clone().requires_grad_()
    before = loss(table)
    (gradient,) = torch.autograd.grad(before, table)
    after = table.detach() - LEARNING_RATE * gradient
    return SgdStep(before.item(), loss(after).item(), gradient.norm().item(), after)


def token_id_mask(input_ids: Tensor, mask: Tensor) -> Tensor:
    """THE MISTAKE: `mask & (ids != EOS)`. With EOS and PAD on one id it drops the real EOS of every answer."""
    return mask & (input_ids != EOS)


# ------------------------------------------------------------------------------------------ report


def run_check() -> dict:
    """Everything the report prints, as results-tokens.json holds it (without the software versions)."""
    table = torch.zeros(5, 5, dtype=torch.float64)
    old = reference = table
    token_logps, valid = response_token_logps(bigram_logits(table, INPUT_IDS), INPUT_IDS, RESPONSE_MASK)
    sequences = {}
    for row, name in enumerate(("chosen", "rejected")):
        sequences[name] = {
            "input_ids": INPUT_IDS[row].tolist(),
            "response_mask": RESPONSE_MASK[row].int().tolist(),
            "scored_positions": valid[row].nonzero().flatten().tolist(),
            "token_logps": token_logps[row][valid[row]].tolist(),
        }

    wrong_mask = token_id_mask(INPUT_IDS, RESPONSE_MASK)
    wrong = response_logps(bigram_logits(table, INPUT_IDS), INPUT_IDS, wrong_mask)
    mistake = {
        "kept_tokens": wrong_mask.sum(dim=1).tolist(),
        "right_tokens": RESPONSE_MASK.sum(dim=1).tolist(),
        "dropped_positions": [row.nonzero().flatten().tolist() for row in RESPONSE_MASK & ~wrong_mask],
        "response_logps": wrong.tolist(),
        "right_response_logps": token_logps.sum(dim=1).tolist(),
    }

    dpo = sgd_step(lambda t: dpo_sequence_loss(t, reference, INPUT_IDS, RESPONSE_MASK), table)
    grpo = sgd_step(lambda t: grpo_sequence_loss(t, old, reference, INPUT_IDS, RESPONSE_MASK), table)
    over_tokens = grpo_sequence_loss(table, old, reference, INPUT_IDS, RESPONSE_MASK, mean_over_tokens)
    return {
        "config": {
            "learning_rate": LEARNING_RATE,
            "dpo_beta": DPO_BETA,
            "clip_epsilon": CLIP_EPSILON,
            "kl_weight": KL_WEIGHT,
            "group_eps": GROUP_EPS,
            "eos_id": EOS,
            "pad_id": PAD,
        },
        "sequences": sequences,
        "eos_mask_mistake": mistake,
        "dpo": {
            "loss_before": dpo.loss_before,
            "loss_after": dpo.loss_after,
            "margin_before": preference_margin(table, reference, INPUT_IDS, RESPONSE_MASK).item(),
            "margin_after": preference_margin(dpo.table_after, reference, INPUT_IDS, RESPONSE_MASK).item(),
            "gradient_norm": dpo.gradient_norm,
        },
        "grpo": {
            "rewards": REWARDS.tolist(),
            "advantages": group_advantages(REWARDS, GROUP_EPS).tolist(),
            "loss_before": grpo.loss_before,
            "loss_after": grpo.loss_after,
            "gradient_norm": grpo.gradient_norm,
            "mean_over_tokens_before": over_tokens.item(),
        },
    }


def sequence_table(sequence: dict, name: str) -> str:
    """One line per position: token, mask, which row of logits scores it, and its log-probability."""
    logp_of_row = dict(zip(sequence["scored_positions"], sequence["token_logps"]))
    rows = []
    for position, (token, in_response) in enumerate(zip(sequence["input_ids"], sequence["response_mask"])):
        label = "PAD" if token == PAD and not in_response else VOCABULARY[token]
        scored = [f"logits[{position - 1}]", f"{logp_of_row[position - 1]:.6f}"] if in_response else ["-", "-"]
        rows.append([f"  {position}", str(token), label, str(in_response), *scored])
    total = sum(sequence["token_logps"])
    return f"{name}: log-probability of the response {total:.6f}\n" + format_table(
        ["  position", "id", "token", "mask", "scored by", "logp"], rows
    )


def report(result: dict) -> str:
    """The printed check: alignment, both objectives with one step each, and the two mistakes beside the right result."""
    dpo, grpo, mistake = result["dpo"], result["grpo"], result["eos_mask_mistake"]
    header = ["", "loss before", "loss after", "gradient norm"]
    steps = [
        [name, *(f"{x[key]:.6f}" for key in ("loss_before", "loss_after", "gradient_norm"))]
        for name, x in (("DPO", dpo), ("GRPO", grpo))
    ]
    advantages = ", ".join(f"{x:+.6f}" for x in grpo["advantages"])
    mistakes = [
        ["response tokens, mask & (ids != EOS)", *map(str, mistake["kept_tokens"])],
        ["response tokens, right mask", *map(str, mistake["right_tokens"])],
        ["response logp, mask & (ids != EOS)", *(f"{x:.6f}" for x in mistake["response_logps"])],
        ["response logp, right mask", *(f"{x:.6f}" for x in mistake["right_response_logps"])],
    ]
    return "\n".join(
        [
            sequence_table(result["sequences"]["chosen"], "chosen"),
            "",
            sequence_table(result["sequences"]["rejected"], "rejected"),
            "",
            f"One SGD step (learning rate {LEARNING_RATE:g}) from the zero table, each objective on its own:",
            format_table(header, steps),
            f"DPO margin {dpo['margin_before']:.6f} -> {dpo['margin_after']:.6f}.",
            f"GRPO advantages {advantages}.",
            "Its loss starts at 0, its gradient does not.",
            "",
            "Mistake 1: a mask from token ids.",
            "EOS and PAD share id 4, so it drops the real EOS of both answers:",
            format_table(["", "chosen", "rejected"], mistakes),
            "",
            "Mistake 2: another reduction under the same name.",
            "The same token losses, -1 -1 and +1 +1 +1:",
            format_table(
                ["", "GRPO loss before"],
                [
                    ["mean per response, (-1 + 1) / 2 (the GRPO paper)", f"{grpo['loss_before']:.6f}"],
                    ["mean over tokens, (-2 + 3) / 5 (DAPO)", f"{grpo['mean_over_tokens_before']:.6f}"],
                ],
            ),
        ]
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = LabParser(
        description="Check masks, shift, DPO and GRPO on two token sequences;\nprint the tables and write them as JSON.",
        epilog="example:\n  python -B token_objectives.py --output results-tokens.json",
    )
    default = Path("results-tokens.json")
    parser.add_argument(
        "--output", type=path_argument, default=default, metavar="FILE", help=f"file to write; default {default}"
    )
    output = parser.parse_args(argv).output
    check_writable([output], expected_bytes=10_000)
    result = run_check()
    replace_files({output: json_text({"config": result.pop("config"), "software": software(), **result})})
    print(report(result))
    print(f"\nFile: {one_line(output)}")


if __name__ == "__main__":
    run_command(main)
