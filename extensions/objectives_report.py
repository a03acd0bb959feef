"""The command of extensions.objectives: reports on one batch, a reader's file, worked examples, the figure.

Everything that is computed here is computed by extensions.objectives; this file reads, prints and draws.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Iterator, NamedTuple

import numpy as np
import torch
from torch import Tensor

import plot_results
import rl_lab
from extensions.objectives import (
    CHOICES,
    GROUP_BASELINES,
    NOT_EXPRESSED,
    NUMBERS,
    PREFERENCE_CHOICES,
    PREFERENCE_ROWS,
    ROWS,
    SURROGATES,
    Batch,
    Evaluation,
    PreferenceEvaluation,
    PreferenceRow,
    Preferences,
    Row,
    compute_advantages,
    evaluate,
    evaluate_preference,
    make_batch,
    make_preferences,
    reduction_weights,
)

# ------------------------------------------------------------------------------------------ one small batch

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
    )
    return replace(batch, advantages=torch.where(mask, batch.rewards.unsqueeze(1) - values, 0.0)), ids


def small_preferences(batch: Batch) -> Preferences:
    """Three pairs of answers of the small batch, each better than its partner; KTO labels the same six answers."""
    rows = torch.tensor([0, 2, 5, 1, 1, 4])
    return Preferences(
        logps=batch.logps[rows],
        mask=batch.mask[rows],
        are_pairs=True,
        ref_logps=batch.ref_logps[rows],
        labels=torch.tensor([True, True, True, False, False, False]),
        kl_seq_logps=torch.tensor([-5.0, -7.0, -4.0, -9.0, -9.0, -8.0], dtype=torch.float64),
        ref_kl_seq_logps=torch.tensor([-5.5, -7.0, -4.5, -8.5, -9.5, -8.5], dtype=torch.float64),
    )


# ------------------------------------------------------------------------------------------ a reader's batch

FILE_NUMBERS = (
    "num_items_in_batch",
    "steps_per_generation",
    "num_processes",
    "accumulation_steps",
    "budget",
    "window_tokens",
    "window_rows",
)
PREFERENCE_ARRAYS = (
    "chosen_logps",
    "rejected_logps",
    "ref_chosen_logps",
    "ref_rejected_logps",
    "labels",
    "kl_seq_logps",
    "ref_kl_seq_logps",
)


class ReadersBatch(NamedTuple):
    """What a file held: a rollout, or preferences; and the names in it that nothing reads."""

    batch: Batch | None
    preferences: Preferences | None
    unread: list[str]


def read_batch(path: Path) -> ReadersBatch:
    """A batch from an .npz file whose arrays have the names of Batch, or of make_preferences. float32 becomes float64.

    Nothing is unpickled. Raises rl_lab.FileProblem for a file that cannot be read or whose arrays do not fit.
    """
    try:
        with np.load(path, allow_pickle=False) as stored:
            if not isinstance(stored, np.lib.npyio.NpzFile):
                raise rl_lab.FileProblem(
                    f"--batch {path}: one array without a name; wanted an .npz file with logps, mask, ..."
                )
            arrays = {name: stored[name] for name in stored.files}
    except OSError as problem:
        raise rl_lab.FileProblem(f"--batch {path}: {problem.strerror or 'not an .npz file'}") from problem
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as problem:
        raise rl_lab.FileProblem(f"--batch {path}: not an .npz file of plain arrays (numpy.savez writes one)") from problem
    arrays = {name: values.astype(np.float64) if values.dtype.kind == "f" else values for name, values in arrays.items()}
    rollout = {field.name for field in dataclasses.fields(Batch)} | set(FILE_NUMBERS)
    is_preference = any(name in arrays for name in PREFERENCE_ARRAYS)
    wanted = {"logps", "mask", "ref_logps", *PREFERENCE_ARRAYS} if is_preference else rollout
    used = {name: values for name, values in arrays.items() if name in wanted}
    if is_preference and "logps" in used:
        used = {name: values for name, values in used.items() if "chosen" not in name and "rejected" not in name}
    if "logps" not in used and "chosen_logps" not in used:
        raise rl_lab.FileProblem(
            f"--batch {path}: holds {', '.join(sorted(arrays)) or 'nothing'}; wanted at least logps and mask"
        )
    unread = sorted(set(arrays) - set(used))
    try:
        used = {name: values.item() if name in FILE_NUMBERS else values for name, values in used.items()}
        if is_preference:
            return ReadersBatch(None, make_preferences(**used), unread)
        return ReadersBatch(make_batch(**used, allow_empty_rows=True), None, unread)
    except (TypeError, ValueError) as problem:
        raise rl_lab.FileProblem(f"--batch {path}: {problem}") from problem


# ------------------------------------------------------------------------------------------ reports


def lacking(row: Row | PreferenceRow, batch: Batch | Preferences) -> list[str]:
    """Arrays that the row reads and the batch does not hold. Without old_logps the batch is a first pass: nothing lacks."""
    if isinstance(row, PreferenceRow):
        held = {"pairs": batch.are_pairs}
        return [name for name in row.needs if not held.get(name, getattr(batch, name, None) is not None)]
    stand_ins = {
        "rewards": (batch.token_level_rewards, batch.rewards_per_func, batch.gen_rewards),
        "group_ids": (batch.gen_group_ids,),
        "old_logps": (batch.logps,),
        "rewards_per_func": (batch.gen_rewards_per_func,),
    }
    return [
        name
        for name in row.needs
        if getattr(batch, name) is None and all(other is None for other in stand_ins.get(name, ()))
    ]


def verdict(loss: Tensor, gradient: Tensor, size: float) -> str:
    """Whether the loss is zero, and whether the gradient is: two questions."""
    if not gradient.any():
        return "gradient is 0"
    return "loss 0, gradient not" if abs(loss.item()) <= 1e-12 * max(size, 1e-300) else "neither is 0"


def verdict_of_first_pass(row: Row, batch: Batch) -> str:
    """The verdict with the policy that sampled as the current one, so that every ratio is 1."""
    first = evaluate(row, batch if batch.old_logps is None else replace(batch, logps=batch.old_logps))
    return verdict(first.loss, first.dloss_dlogps, (first.weights * first.token_losses).abs().sum().item())


def with_given_advantages(row: Row) -> Row:
    """The row with the batch's advantages in place of its own: its ratio, surrogate, KL in the loss and reduction remain."""
    kl = {"kl": "none", "kl_coef": 0.0, "kl_place": "loss"} if row.kl_in_reward else {}
    return replace(
        row,
        baseline="given",
        credit="outcome",
        scale="none",
        group_filter="none",
        overlong="none",
        reward_parts="sum_then_normalise",
        **kl,
    )


def suited(row: Row, batch: Batch) -> Row:
    """The row, or with_given_advantages where the batch holds advantages and no rewards to compute them from."""
    is_needed = batch.advantages is not None and "rewards" in lacking(row, batch)
    return with_given_advantages(row) if is_needed else row


def family_table(batch: Batch) -> str:
    """Every row of ROWS on one batch, one line each; rows the batch cannot feed are named below with what they lack."""
    lengths = torch.where(batch.lengths > 0, batch.lengths, batch.lengths.max() + 1)
    short, long = int(lengths.argmin()), int(batch.lengths.argmax())
    lines, left_out = [], {}
    for name, named_row in ROWS.items():
        row = suited(named_row, batch)
        missing = ", ".join(lacking(row, batch))
        if not missing:
            try:
                result = evaluate(row, batch)
            except ValueError as problem:
                missing = str(problem).removeprefix(f"{name}: ")
        if missing:
            left_out.setdefault(missing, []).append(name)
            continue
        weight = result.weights.sum(dim=1)
        size = (result.weights * result.token_losses).abs().sum().item()
        lines.append(
            [
                name + ("" if row is named_row else " *"),
                f"{result.loss.item() + 0.0:.6f}",
                f"{result.dloss_dlogps.norm().item():.6f}",
                f"{weight[short].item():.4f}",
                f"{weight[long].item():.4f}",
                f"{int(result.flat.sum())}/{int(batch.mask.sum())}",
                verdict(result.loss, result.dloss_dlogps, size),
                verdict_of_first_pass(row, batch),
            ]
        )
    text = (
        rl_lab.format_table(
            [
                "objective",
                "loss",
                "gradient norm",
                "weight short",
                "weight long",
                "flat tokens",
                "zero or not",
                "on the first pass",
            ],
            lines,
        )
        if lines
        else "No row of the table can be evaluated on this batch."
    )
    text += (
        f"\n\nweight short, weight long: what the reduction gives to all tokens of row {short} ({int(batch.lengths[short])} "
        f"tokens) and of row {long}\n({int(batch.lengths[long])} tokens). Flat: tokens whose gradient the clip has removed. "
        "Gradient norm: over d loss / d logp.\nOn the first pass: the same with every ratio 1, policy = the "
        "one that sampled. A loss of 0 there is no sign of\ntrouble; a gradient of 0 is. Compare gradients between rows, "
        "not losses: these are different objectives."
    )
    if any(line[0].endswith("*") for line in lines):
        text += "\n* with the advantages of the batch, since it holds no rewards to compute the row's own from"
    for missing, names in left_out.items():
        text += f"\n\nleft out, for want of {missing}: {', '.join(names)}"
    return text


def preference_table(data: Preferences) -> str:
    """Every row of PREFERENCE_ROWS on one set of pairs or labelled answers."""
    lines, left_out = [], {}
    for name, row in PREFERENCE_ROWS.items():
        missing = ", ".join(lacking(row, data))
        if missing:
            left_out.setdefault(missing, []).append(name)
            continue
        result = evaluate_preference(row, data)
        half = len(data.logps) // 2
        sums = result.dloss_dlogps.sum(dim=1)
        good, bad = (data.labels, ~data.labels) if row.loss == "kto" else (slice(None, half), slice(half, None))
        lines.append(
            [
                name,
                f"{result.loss.item():.6f}",
                f"{result.margins.mean().item():+.4f}",
                f"{result.dloss_dlogps.norm().item():.6f}",
                f"{sums[good].sum().item():+.6f}",
                f"{sums[bad].sum().item():+.6f}",
            ]
        )
    header = ["preference loss", "loss", "mean margin", "gradient norm", "on chosen", "on rejected"]
    text = rl_lab.format_table(header, lines)
    text += "\n\non chosen, on rejected: sum of d loss / d logp over their tokens; negative pushes the log-probability up."
    for missing, names in left_out.items():
        text += f"\nleft out, for want of {missing}: {', '.join(names)}"
    return text


SHOWN = 8  # rows and tokens of a batch that an explanation prints


def active_fields(row: Row | PreferenceRow) -> dict[str, str]:
    """The fields that have an effect in this row, each with its value and formula: what the row is."""
    if isinstance(row, PreferenceRow):
        fields = {name: f"{getattr(row, name)}: {table[getattr(row, name)]}" for name, table in PREFERENCE_CHOICES.items()}
        numbers = {
            "beta": True,
            "label_smoothing": row.loss in ("cdpo", "robust", "exo", "aot", "aot_unpaired"),
            "gamma": row.loss == "simpo",
            "sft_coef": row.sft_coef != 0,
            "tail_weight": row.tail_weight != 1,
            "desirable_weight": row.loss == "kto",
            "undesirable_weight": row.loss == "kto",
        }
        return fields | {name: f"{getattr(row, name):g}" for name, is_read in numbers.items() if is_read}
    has_kl = row.kl != "none" and row.kl_coef != 0
    idle = {
        "kl_anchor": not has_kl,
        "kl_place": not has_kl,
        "kl_weight": not row.kl_in_loss,
        "kl_gradient": not row.kl_in_loss,
        "kl_reduction": not row.kl_in_loss,
        "std_guard": row.scale == "none",
        "singleton": row.baseline not in GROUP_BASELINES and row.scale != "group_std",
        "reward_parts": row.baseline in ("given", "gae"),
        "missing_reward": row.baseline in ("given", "gae"),
        "credit": row.baseline in ("given", "gae"),
        "surrogate": row.ratio == "none",
        "rows_counted": row.reduction in ("mean_over_tokens", "mean_over_window", "sum_over_tokens"),
        "kl": not has_kl,
    }
    fields = {
        name: f"{getattr(row, name)}: {table[getattr(row, name)]}"
        for name, table in CHOICES.items()
        if not idle.get(name, False)
    }
    read = [
        n
        for choice, numbers in NUMBERS.items()
        if choice[0] in fields and getattr(row, choice[0]) == choice[1]
        for n in numbers
    ]
    read += [n for n in ("log_ratio_min", "log_ratio_max") if not math.isinf(getattr(row, n)) and row.ratio != "none"]
    read += [n for n in ("kl_log_limit", "kl_limit") if has_kl and not math.isinf(getattr(row, n))]
    read += ["length_eps"] if row.length_eps and row.reduction == "mean_per_response" else []
    read += ["entropy_coef"] if row.entropy_coef else []
    return fields | {name: f"{getattr(row, name):g}" for name in dict.fromkeys(read)}


STEPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "1  answers and rewards",
        ("group_filter", "overlong", "overlong_max", "overlong_cache", "reward_parts", "missing_reward"),
    ),
    ("2  advantage", ("baseline", "credit", "gamma", "lam", "scale", "std_ddof", "std_eps", "std_guard", "singleton")),
    ("3  ratio", ("ratio", "log_ratio_min", "log_ratio_max")),
    (
        "4  surrogate J, maximised",
        (
            "surrogate",
            "clip_low",
            "clip_high",
            "ratio_cap",
            "tau_positive",
            "tau_negative",
            "vespo_k_positive",
            "vespo_lam_positive",
            "vespo_k_negative",
            "vespo_lam_negative",
            "off_policy_rows",
            "off_policy_threshold",
        ),
    ),
    (
        "5  KL to a fixed policy",
        ("kl", "kl_coef", "kl_place", "kl_anchor", "kl_weight", "kl_gradient", "kl_log_limit", "kl_limit", "kl_reduction"),
    ),
    ("6  reduction of -J", ("reduction", "rows_counted", "length_eps", "accumulation")),
    ("7  critic and entropy", ("value_loss", "value_coef", "value_clip", "entropy_coef")),
)


def _grid(name: str, values: Tensor, mask: Tensor, digits: int = 4) -> str:
    """A per-token quantity, one answer a line, unused slots as dots."""
    lines = [f"    {name}"]
    for number, (row, used) in enumerate(zip(values[:SHOWN].tolist(), mask[:SHOWN].tolist())):
        cells = [f"{value + 0.0:.{digits}f}" if is_used else "." for value, is_used in zip(row[:SHOWN], used[:SHOWN])]
        lines.append(f"      row {number}  " + " ".join(cell.rjust(digits + 5) for cell in cells))
    if values.shape[0] > SHOWN or values.shape[1] > SHOWN:
        lines.append(f"      (first {SHOWN} rows and tokens of {values.shape[0]} x {values.shape[1]})")
    return "\n".join(lines)


def explain(row: Row, batch: Batch) -> str:
    """One row, step by step: its choices with their formulas, then what each step gives on the batch."""
    result, fields, mask = evaluate(row, batch), active_fields(row), batch.mask
    lines = [
        row.name,
        f"  source   {row.source or '-'}",
        f"  differs  {row.differs or '-'}",
        f"  reads    {', '.join(row.needs)}",
    ]
    numbers = {
        "2": _grid("A", result.advantages, mask),
        "3": _grid("r", result.ratios, mask) if row.ratio != "none" else "",
        "4": _grid("J", -result.token_losses, mask & result.kept.unsqueeze(1))
        + f"\n    share of tokens: ratio outside the band {result.ratio_outside_fraction:.3f}, clipped branch chosen "
        f"{result.clipped_branch_fraction:.3f}, gradient 0 {result.zero_gradient_fraction:.3f}",
        "5": "" if result.kl is None else _grid("KL_t", result.kl, mask) + f"\n    mean over tokens {result.kl_mean:.6f}",
        "6": _grid("weight of a token", result.weights, mask),
    }
    for title, names in STEPS:
        chosen = [f"    {name:16s} {fields[name]}" for name in names if name in fields]
        if (
            title.startswith("5")
            and "kl" not in fields
            or title.startswith("7")
            and row.value_loss == "none"
            and len(chosen) < 2
        ):
            continue
        lines += ["", f"  {title}", *chosen, *filter(None, [numbers.get(title[0], "")])]
    parts = [
        ("policy", result.policy_loss),
        ("KL", result.kl_loss),
        ("critic", result.value_loss),
        ("entropy", result.entropy_loss),
    ]
    parts = [f"{name} {part.item() + 0.0:.6f}" for name, part in parts if name == "policy" or part.item() != 0]
    size = (result.weights * result.token_losses).abs().sum().item()
    lines += [
        "",
        "  result",
        f"    loss {result.loss.item() + 0.0:.6f} = {' + '.join(parts)}",
        f"    gradient norm {result.dloss_dlogps.norm().item():.6f}   {verdict(result.loss, result.dloss_dlogps, size)}",
        _grid("d loss / d logp", result.dloss_dlogps, mask, digits=5),
    ]
    return "\n".join(lines)


def explain_preference(row: PreferenceRow, data: Preferences) -> str:
    """One preference loss: its choices, then scores, losses and gradients on the data."""
    result = evaluate_preference(row, data)
    lines = [
        row.name,
        f"  source   {row.source or '-'}",
        f"  differs  {row.differs or '-'}",
        f"  reads    {', '.join(row.needs)}",
        "",
    ]
    lines += [f"    {name:18s} {text}" for name, text in active_fields(row).items()]
    lines += ["", "  margins  " + ", ".join(f"{x:+.6f}" for x in result.margins.tolist()[:SHOWN])]
    lines += [
        "  losses   " + ", ".join(f"{x:.6f}" for x in result.losses.tolist()[:SHOWN]),
        f"  loss     {result.loss.item():.6f}",
    ]
    order = (
        "answers as labelled" if row.loss == "kto" else f"rows 0 to {len(data.logps) // 2 - 1} chosen, the others rejected"
    )
    return "\n".join([*lines, _grid(f"d loss / d logp ({order})", result.dloss_dlogps, data.mask, digits=5)])


def compare(first: Row | PreferenceRow, second: Row | PreferenceRow, results: tuple) -> str:
    """Where two rows choose differently, and what that does to the loss and to the gradient of each answer."""
    lines = [f"{first.name} against {second.name}"]
    here, there = active_fields(first), active_fields(second)
    for name in dict.fromkeys([*here, *there]):
        only_one_has_kl = name.startswith("kl_") and ("kl" in here) != ("kl" in there)
        if here.get(name) != there.get(name) and not only_one_has_kl:
            lines += [
                f"  {name}",
                f"    {first.name:24s} {here.get(name, 'has no part')}",
                f"    {second.name:24s} {there.get(name, 'has no part')}",
            ]
    if len(lines) == 1:
        lines.append("  the same choices")
    a, b = (result.dloss_dlogps for result in results)
    both = (a.norm() * b.norm()).item()
    lines += [
        "",
        f"  loss             {results[0].loss.item():.6f} and {results[1].loss.item():.6f}",
        f"  gradient norm    {a.norm().item():.6f} and {b.norm().item():.6f}",
    ]
    if a.shape == b.shape:
        cosine = f"{(a * b).sum().item() / both:.6f}" if both else "not defined: a gradient is 0"
        lines.append(f"  cosine of the two gradients  {cosine}   (1: the same direction)")
        table = [
            [f"row {i}", f"{x:+.6f}", f"{y:+.6f}"] for i, (x, y) in enumerate(zip(a.sum(1).tolist(), b.sum(1).tolist()))
        ]
        summed = rl_lab.format_table(["sum over tokens of d loss / d logp", first.name, second.name], table[:SHOWN])
        lines += ["", *("  " + line for line in summed.splitlines())]
    return "\n".join(lines)


def list_choices() -> str:
    """Every choice with its formula, every named row, and what is left out with the reason."""
    lines = ["CHOICES OF A ROW"]
    for field, table in (*CHOICES.items(), *((f"preference {name}", t) for name, t in PREFERENCE_CHOICES.items())):
        lines += ["", f"  {field}", *(f"    {name:26s} {formula}" for name, formula in table.items())]
    lines += ["", "NAMED ROWS", ""]
    lines += [f"  {name:36s} {row.source}" for name, row in (ROWS | PREFERENCE_ROWS).items()]
    lines += ["", "NOT EXPRESSED AS A ROW", ""]
    return "\n".join(lines + [f"  {name}\n    {reason}" for name, reason in NOT_EXPRESSED.items()])


# ------------------------------------------------------------------------------------------ worked examples


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


# ------------------------------------------------------------------------------------------ figure


def gradient_curves(sign: float, ratios: np.ndarray, old_probability: float = 0.2) -> dict[str, np.ndarray]:
    """d loss / d logp of one token with weight 1, for every surrogate, A = sign. ratios (K,) -> name -> (K,)."""
    old_logps = torch.full((len(ratios),), math.log(old_probability), dtype=torch.float64)
    batch = make_batch(
        logps=old_logps + torch.as_tensor(ratios).log(), old_logps=old_logps, advantages=torch.full_like(old_logps, sign)
    )
    row = replace(ROWS["grpo"], baseline="given", scale="none", kl="none", reduction="sum_over_tokens", clip_high=0.28)
    return {
        name: evaluate(replace(row, surrogate=name), batch).dloss_dlogps.squeeze(1).numpy()
        for name in SURROGATES
        if name != "capped_clip"  # the same as dual_clip while c > 1 + high
    }


def weight_curves(lengths: np.ndarray, budget: float) -> dict[str, np.ndarray]:
    """What one token weighs, by the length of its answer, in a batch with one answer of each length."""
    width = int(lengths.max())
    mask = torch.arange(width) < torch.as_tensor(lengths).unsqueeze(1)
    batch = make_batch(logps=torch.zeros(mask.shape, dtype=torch.float64), mask=mask, budget=budget)
    return {
        name: reduction_weights(ROWS["grpo"], batch, name).squeeze(1).numpy()
        for name in CHOICES["reduction"]
        if name != "mean_over_window"  # the same as mean_over_tokens while the batch is the window
    }


def draw():
    """Gradient against ratio for both signs of A, one line a surrogate; weight against length, one line a reduction."""
    figure, (positive, negative, weight) = plot_results.new_figure(3, columns=3, panel_size=(5.2, 4.6))
    ratios = np.linspace(0.02, 4.0, 1991)
    for axis, sign in ((positive, 1.0), (negative, -1.0)):
        for number, (name, slope) in enumerate(gradient_curves(sign, ratios).items()):
            # Thick lines first, so that lines that coincide stay visible.
            axis.plot(ratios, slope, label=name, linewidth=6.5 - 0.75 * number, alpha=0.85)
        axis.axvspan(0.8, 1.28, color="grey", alpha=0.15, linewidth=0)
        axis.set(title=f"gradient of one token, A = {sign:+.0f}", xlabel="ratio r", ylabel="d loss / d logp")
    negative.set_ylim(-0.2, 4.2)
    positive.set_ylim(-4.2, 0.2)
    lengths = np.unique(np.geomspace(8, 1024, 40).astype(int))
    for number, (name, values) in enumerate(weight_curves(lengths, budget=4096).items()):
        weight.plot(lengths, values, label=name, linewidth=3.0 - 0.3 * number, marker="o", markersize=2.5)
    weight.set(
        title="weight of one token in a batch of one answer per length",
        xlabel="length of its answer (tokens)",
        ylabel="weight",
        xscale="log",
        yscale="log",
    )
    for axis in (positive, negative, weight):
        axis.title.set_fontsize(10.5)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.supxlabel("band 1 - 0.2 to 1 + 0.28, c = 3; old probability 0.2 (dppo); budget 4096 tokens", fontsize=9)
    return figure


# ------------------------------------------------------------------------------------------ command line

EXAMPLES = """\
examples:
  python -m extensions.objectives
  python -m extensions.objectives --objective grpo --versus dapo@trl-1.16.0
  python -m extensions.objectives --objective dpo --versus ipo
  python -m extensions.objectives --batch my_batch.npz --objective gspo
  python -m extensions.objectives --plot surrogates.svg"""


def row_named(name: str) -> Row | PreferenceRow:
    """A row of either table. Raises ValueError with the nearest names."""
    known = ROWS | PREFERENCE_ROWS
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        raise ValueError(f"no objective {name!r}" + (f"; near: {', '.join(near)}" if near else "") + "; --list shows all")
    return known[name]


def build_parser() -> rl_lab.LabParser:
    def named(text: str) -> Row | PreferenceRow:
        try:
            return row_named(text)
        except ValueError as problem:
            raise argparse.ArgumentTypeError(str(problem)) from None

    parser = rl_lab.LabParser(
        prog="python -m extensions.objectives",
        description="PPO, GRPO, DPO and their relatives as one table of choices, evaluated on one batch.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--objective", type=named, metavar="NAME", help="explain one row step by step")
    parser.add_argument(
        "--versus", type=named, metavar="OTHER", help="with --objective: what the other row does differently"
    )
    parser.add_argument(
        "--batch", type=Path, metavar="FILE.npz", help="your batch instead of the small one; arrays named as in Batch"
    )
    parser.add_argument(
        "--plot", type=plot_results.figure_path, metavar="FILE", help="draw gradients and weights to .svg, .png or .pdf"
    )
    parser.add_argument("--examples", action="store_true", help="worked examples by the engine beside their arithmetic")
    parser.add_argument(
        "--list", action="store_true", help="every choice with its formula, every named row, what is left out"
    )
    return parser


def report(arguments: argparse.Namespace) -> Iterator[str]:
    """The report on one batch: the table, or one row."""
    row, other = arguments.objective, arguments.versus
    if arguments.batch is None:
        batch, ids = small_batch()
        data = small_preferences(batch)
        if row is None:
            yield "A small batch: two prompts, three answers each. EOS and PAD share id 4; bars end the counted tokens.\n"
            for number in range(len(ids)):
                length = int(batch.lengths[number])
                tokens = [str(token) for token in ids[number].tolist()]
                text = " ".join(tokens[:length]) + " | " + " ".join(tokens[length:])
                prompt, reward = int(batch.group_ids[number]), batch.rewards[number].item()
                yield f"  row {number}  prompt {prompt}  reward {reward:.1f}  tokens {text}"
            yield ""
    else:
        batch, data, unread = read_batch(arguments.batch)
        if unread:
            yield f"{arguments.batch}: not read: {', '.join(unread)}\n"
        if batch is not None and batch.old_logps is None:
            yield "No old_logps in the file: taken as the first pass over the batch, every ratio 1.\n"
    if row is None:
        if batch is not None:
            yield family_table(batch)
        if data is not None:
            yield ("" if batch is None else "\n") + preference_table(data)
        return
    results = []
    if batch is not None:
        row, other = (r if r is None or isinstance(r, PreferenceRow) else suited(r, batch) for r in (row, other))
        if row is not arguments.objective:
            yield "The batch holds no rewards: its advantages are taken as they are.\n"
    for chosen in (row, other):
        if chosen is None:
            continue
        source = data if isinstance(chosen, PreferenceRow) else batch
        missing = lacking(chosen, source) if source is not None else list(chosen.needs)
        if missing:
            raise rl_lab.FileProblem(f"--batch {arguments.batch}: {chosen.name} also needs {', '.join(missing)}")
        try:
            if isinstance(chosen, PreferenceRow):
                results.append(evaluate_preference(chosen, source))
            else:
                results.append(evaluate(chosen, source))
        except ValueError as problem:
            raise rl_lab.FileProblem(str(problem)) from problem
    yield explain_preference(row, data) if isinstance(row, PreferenceRow) else explain(row, batch)
    if other is not None:
        yield "\n" + compare(row, other, tuple(results))


def main(argv: list[str] | None = None) -> None:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.versus and not arguments.objective:
        parser.error("--versus: wanted together with --objective")
    if arguments.versus and type(arguments.versus) is not type(arguments.objective):
        parser.error(
            f"--versus: {arguments.objective.name} and {arguments.versus.name} read different data; compare like with like"
        )
    if arguments.plot:
        try:
            plot_results.save(draw(), arguments.plot)
        except plot_results.PlotProblem as problem:
            raise rl_lab.FileProblem(str(problem)) from problem
        print(f"wrote {arguments.plot}")
    if arguments.examples:
        print_examples()
    if arguments.list:
        print(list_choices())
    if arguments.objective or arguments.batch or not (arguments.plot or arguments.examples or arguments.list):
        for text in report(arguments):
            print(text)
