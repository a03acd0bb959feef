"""One batch under every row, one row step by step, two rows compared: text from what the engine computed."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

import rl_lab
from extensions.objectives.batch import Batch
from extensions.objectives.choices import CHOICES, FIELDS, NUMBERS, QUIET, STEPS, Row
from extensions.objectives.engine import evaluate
from extensions.objectives.pairs import (
    PREFERENCE_CHOICES,
    PREFERENCE_FIELDS,
    PreferenceRow,
    Preferences,
    evaluate_preference,
)
from extensions.objectives.rows import NOT_EXPRESSED, ROWS
from extensions.objectives.rows_pairs import PREFERENCE_ROWS

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
    kl = {} if row.kl_in_loss else {"kl": "none", "kl_coef": 0.0, "kl_place": "loss"}
    return replace(
        row,
        baseline="given",
        credit="outcome",
        scale="none",
        group_filter="none",
        overlong="none",
        reward_parts="sum_then_normalise",
        reward_clip="none",
        centre="mean",
        whiten_over="counted",
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
        good, bad = (data.labels, ~data.labels) if row.of_labels else (slice(None, half), slice(half, None))
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
        idle = {"pair_weight": "none", "sft_reduction": "mean_over_tokens"}
        fields = {name: text for name, text in fields.items() if getattr(row, name) != idle.get(name)}
        return fields | {name: f"{getattr(row, name):g}" for name in row.numbers}
    given = row.baseline in ("given", "gae")
    idle = {
        **{name: not row.has_kl for name in ("kl", "kl_anchor", "kl_place")},
        **{name: not row.kl_in_loss for name in ("kl_weight", "kl_gradient", "kl_tokens", "kl_reduction")},
        **{name: given for name in ("reward_parts", "missing_reward", "credit")},
        "std_guard": row.scale == "none",
        "singleton": not row.is_grouped,
        "surrogate": row.ratio == "none",
        "rows_counted": row.reduction in ("mean_over_tokens", "mean_over_window", "sum_over_tokens"),
        "sampler_bound": row.sampler_correction == "none",
        **{name: row.sampler_drop == "none" for name in ("sampler_drop_level", "sampler_dropped")},
        "sampler_place": row.sampler_drop == row.sampler_correction == "none" or not row.kl_in_loss,
        "entropy_reduction": not row.entropy_coef,
    }
    fields = {
        name: f"{getattr(row, name)}: {table[getattr(row, name)]}"
        for name, table in CHOICES.items()
        if not idle.get(name, name in QUIET and getattr(row, name) == FIELDS[name].default)
    }
    read = [
        n
        for choice, numbers in NUMBERS.items()
        if choice[0] in fields and getattr(row, choice[0]) == choice[1]
        for n in numbers
    ]
    read += [n for n in ("log_ratio_min", "log_ratio_max") if not math.isinf(getattr(row, n)) and row.ratio != "none"]
    read += [n for n in ("kl_log_limit", "kl_limit") if row.has_kl and not math.isinf(getattr(row, n))]
    read += ["length_eps"] if row.length_eps and row.reduction == "mean_per_response" else []
    read += ["entropy_coef"] if row.entropy_coef else []
    return fields | {name: f"{getattr(row, name):g}" for name in dict.fromkeys(read)}


def _grid(name: str, values: Tensor, mask: Tensor, digits: int = 4) -> str:
    """A per-token quantity, one answer per line, unused slots as dots."""
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
        "answers as labelled" if row.of_labels else f"rows 0 to {len(data.logps) // 2 - 1} chosen, the others rejected"
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
    lines = ["CHOICES OF A ROW; the numbers that a choice reads stand below it with their defaults"]
    for name, field in (FIELDS | {f"preference {name}": field for name, field in PREFERENCE_FIELDS.items()}).items():
        lines += ["", f"  {name}"]
        for value, choice in field.choices.items():
            lines.append(f"    {value:26s} {choice.formula}")
            numbers = ", ".join(f"{number.name} {number.default:g}" for number in choice.numbers)
            notes = "; ".join(filter(None, [getattr(choice, "words", ""), numbers and f"reads {numbers}"]))
            lines += [f"    {'':26s}   {notes}"] if notes else []
    lines += ["", "NAMED ROWS", ""]
    lines += [f"  {name:36s} {row.source}" for name, row in (ROWS | PREFERENCE_ROWS).items()]
    lines += ["", "NOT EXPRESSED AS A ROW", ""]
    return "\n".join(lines + [f"  {name}\n    {reason}" for name, reason in NOT_EXPRESSED.items()])
