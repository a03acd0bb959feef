"""The order of an audit: describe the batch, advantages, loss, gradient, metrics, findings. No file is read here."""

from __future__ import annotations

import numpy as np

from extensions.audit.catalogue import SEVERITIES, Finding
from extensions.audit.checks.inputs import describe_batch, input_findings
from extensions.audit.checks.metrics import metric_findings
from extensions.audit.declared import Declared
from extensions.audit.read.recording import Recording, check_numbers
from extensions.audit.say.advantages import say_advantages, say_time
from extensions.audit.say.loss import LossVerdict, say_value_loss
from extensions.audit.say.pairs import say_pairs
from extensions.audit.say.report import Report
from extensions.audit.search.advantages import search_advantages
from extensions.audit.search.loss import search_loss
from extensions.audit.search.over_time import is_environment
from extensions.audit.search.pairs import is_preference
from extensions.audit.search.rules import advantage_batch
from extensions.objectives import ROWS, Row, compute_advantages


def audit(recording: Recording, declared: Declared | None = None, numbers: dict[str, float] | None = None) -> Report:
    """Recompute one recorded batch and say what it follows. Gradient: none. Raises rl_lab.FileProblem as read_recording."""
    recording.numbers |= numbers or {}
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
    order = {name: place for place, name in enumerate(reversed(SEVERITIES))}
    seen: dict[tuple, Finding] = {}
    for f in report.findings:
        kept = seen.get((f.name,))
        if kept is None or order[f.severity] < order[kept.severity]:
            seen[(f.name,)] = f
    report.findings = sorted(seen.values(), key=lambda f: order[f.severity])
    report.missing = list(dict.fromkeys(report.missing))
    return report


def _audit_rollout(recording: Recording, declared: Declared | None, report: Report) -> None:
    if "mask" not in recording.arrays:
        report.missing.append("logps, old_logps, mask (rows x tokens), advantages, loss and dloss_dlogps")
        report.lines["advantages"] = ["not checked: nothing to compute them from"]
        report.lines["loss"] = ["not checked: no per-token array"]
        return
    advantages = search_advantages(recording)
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
    result = search_loss(recording, A, declared=wanted)
    LossVerdict(recording, declared, wanted, advantages, result, report).say()


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
        if result.matches and not result.zero and (best is None or result.matches[0].order < best[0]):
            best = (result.matches[0].order, name, made)
        elif best is None:
            best = ((9,), name, made)
    report.missing.append("advantages, as the loss used them")
    if best is None:
        return None
    report.remarks.append(f"advantages were not recorded: computed by the rule of {best[1]}")
    return best[2]
