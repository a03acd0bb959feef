"""The order of an audit: describe the batch, advantages, loss, gradient, metrics, findings. No file is read here."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from extensions.audit.catalogue import SEVERITIES, finding
from extensions.audit.checks.advice import advice_left, unread_words
from extensions.audit.checks.inputs import describe_batch, input_findings
from extensions.audit.checks.metrics import metric_findings
from extensions.audit.declared import Declared
from extensions.audit.read.recording import Recording, check_numbers
from extensions.audit.reading import read_loss
from extensions.audit.say.advantages import say_advantages, say_time
from extensions.audit.say.critic import say_value_loss
from extensions.audit.say.loss import LossVerdict
from extensions.audit.say.pairs import say_pairs
from extensions.audit.say.quantities import quantity_verdicts
from extensions.audit.say.reading import say_reading
from extensions.audit.say.report import Report
from extensions.audit.search.advantages import search_advantages
from extensions.audit.search.loss import search_loss
from extensions.audit.search.over_time import is_environment
from extensions.audit.search.pairs import is_preference
from extensions.audit.search.rules import advantage_batch
from extensions.objectives import ROWS, Row, compute_advantages


def audit(recording: Recording, declared: Declared | None = None, numbers: dict[str, float] | None = None) -> Report:
    """Recompute one recorded batch and say what it follows. The recording is left as it is.

    declared, numbers: as parse_declared returns them; numbers stand beside those of the recording and win. Gradient: none.
    Raises rl_lab.FileProblem for a number that no trainer can have.
    """
    recording = replace(
        recording,
        arrays=dict(recording.arrays),
        numbers={**recording.numbers, **(numbers or {})},
        remarks=list(recording.remarks),
    )
    check_numbers(recording.numbers)
    report = Report(remarks=list(recording.remarks))
    describe_batch(recording, report.batch, report.words)
    report.findings += input_findings(recording)
    with np.errstate(all="ignore"):
        if is_preference(recording):
            say_pairs(recording, declared, report)
        elif is_environment(recording):
            say_time(recording, report)
        else:
            _audit_rollout(recording, declared, report)
    report.findings += metric_findings(recording, report.lines.setdefault("metrics", []))
    if _nothing_checked(report, recording):
        report.findings.append(finding("nothing_checked", "warning", _reported_words(recording)))
    order = {name: place for place, name in enumerate(reversed(SEVERITIES))}
    unique = {(f.name, f.evidence): f for f in sorted(report.findings, key=lambda f: -order[f.severity])}
    report.findings = sorted(unique.values(), key=lambda f: order[f.severity])
    report.findings = [replace(f, advice=advice_left(f.advice, recording)) for f in report.findings]
    report.missing = [text for text in dict.fromkeys(report.missing) if advice_left(f"record {text}", recording)]
    report.quantities = quantity_verdicts(recording, report)
    return report


_ENOUGH_FOR_A_CHECK = (
    ("pass_index", "logps", "old_logps"),
    ("completion_ids", "eos_id"),
    ("token_level_rewards",),
    ("reset_rows",),
    ("log_steps",),
    ("log_values", "log_windows"),
)
"""What the checks that need no search read: each has a verdict on these."""


def _nothing_checked(report: Report, recording: Recording) -> bool:
    """Neither a rule, nor a loss, nor a metric was compared with anything, and no check of the inputs has a verdict."""
    return not (
        report.advantages.get("tried")
        or report.loss.get("tried")
        or report.lines["metrics"]
        or any(f.severity != "note" for f in report.findings)
        or any(all(name in recording for name in names) for names in _ENOUGH_FOR_A_CHECK)
    )


def _reported_words(recording: Recording) -> str:
    names = ", ".join(sorted([*recording.arrays, *recording.numbers]))
    return f"Recorded: {names}." + ("" if not recording.unread else f" {unread_words(recording)}.")


def _audit_rollout(recording: Recording, declared: Declared | None, report: Report) -> None:
    if "mask" not in recording.arrays:
        report.missing.append("logps, old_logps, mask (rows x tokens), advantages, loss and dloss_dlogps")
        report.lines["advantages"] = ["not checked: nothing to compute them from"]
        report.lines["loss"] = ["not checked: no per-token array"]
        return
    rule = declared.advantage_fields() if declared is not None and not declared.is_pairs else None
    advantages = search_advantages(recording, declared=rule)
    say_advantages(recording, declared, advantages, report)
    arrays = recording.arrays
    if "vpreds" in arrays and "logps" not in arrays and "loss_mat" not in arrays:
        say_value_loss(recording, report)
        return
    if "loss" not in recording.numbers and "dloss_dlogps" not in arrays:
        if "kl" not in arrays and "logps" in arrays or "advantages" in arrays and "logps" not in arrays:
            report.missing.append("loss, and dloss_dlogps with it: torch.autograd.grad(loss, logps)")
        report.lines["loss"] = ["not checked: no loss and no gradient recorded"]
        return
    if "logps" not in arrays and "loss_mat" not in arrays:
        report.missing.append("logps (rows x tokens)")
        report.lines["loss"] = ["not checked: no log-probabilities recorded"]
        return
    wanted = declared.loss_fields(recording) if declared is not None and not declared.is_pairs else None
    if "loss_mat" in arrays and wanted is not None:
        wanted = {name: wanted[name] for name in ("reduction", "window_unknown", "accumulation") if name in wanted}
    A = arrays.get("advantages")
    if A is None and "loss_mat" not in arrays and ("rewards" in arrays or "token_level_rewards" in arrays):
        A = _advantages_for(recording, declared, report)
    elif A is None and "loss_mat" not in arrays:
        report.remarks.append("neither advantages nor rewards were recorded: the loss is read as a plain likelihood (A = 1)")
    reading = read_loss(recording, A)
    result = search_loss(recording, A, declared=wanted)
    LossVerdict(recording, declared, wanted, advantages, result, report).say()
    say_reading(reading, report)


class _Guess(NamedTuple):
    """Advantages made by a row, and how well the loss fits with them."""

    order: tuple
    name: str
    advantages: np.ndarray


def _advantages_for(recording: Recording, declared: Declared | None, report: Report) -> np.ndarray | None:
    """Advantages were not recorded: the declared row's, else those of the rule whose loss fits first."""
    names = (
        [declared.row.name]
        if declared is not None
        else ["grpo@trl-1.16.0", "grpo@verl-0.9.1", "grpo", "dr_grpo", "rloo", "reinforce"]
    )
    best = None
    for name in names:
        row = declared.row if declared is not None else ROWS[name]
        fields = {
            k: getattr(row, k) for k in ("baseline", "scale", "credit", "gamma", "lam", "std_ddof", "std_eps", "std_guard")
        }
        try:
            batch = advantage_batch(recording)
            missing = (
                {"missing_reward": "exclude"} if batch.rewards is not None and bool(batch.rewards.isnan().any()) else {}
            )
            made = compute_advantages(Row("rule", singleton="zero", **missing, **fields), batch).numpy()
        except (ValueError, TypeError):
            continue
        result = search_loss(recording, made, look_for_mistakes=False)
        if result.matches and not result.zero and (best is None or result.matches[0].order < best.order):
            best = _Guess(result.matches[0].order, name, made)
        elif best is None:
            best = _Guess((9,), name, made)
    report.missing.append("advantages, as the loss used them")
    if best is None:
        return None
    report.remarks.append(f"advantages were not recorded: computed by the rule of {best.name}")
    return best.advantages
