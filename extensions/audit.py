"""Tell an engineer what their trainer really computed: recompute one recorded batch and name the choices and the mistakes.

    python -m extensions.audit extensions/captures/trl_grpo_grpo_pass2.npz       a recorded batch of a real trainer
    python -m extensions.audit BATCH.npz --declared grpo@trl-1.16.0 --set clip_high=0.28 --set beta=0.04
    python -m extensions.audit BATCH.npz --json report.json --fail-on warning
    python -m extensions.audit --list                                           every mistake it knows, with what to change
    python -m extensions.audit --self-test                                      plants each mistake into each shipped capture
    python -m extensions.audit --self-test --damaged 10000                      damaged and hostile files instead

The report says, in this order: the batch in words; which advantage rule gives the reported advantages; which objective,
reduction and KL give the reported loss; whether the gradient agrees; then findings. Where several choices give the same
number on this batch it says "cannot tell", lists them, and says which recording would decide. Exit status: 0 clean, 1 a
finding at or above --fail-on, 2 a file or usage error.

What to record. Everything is optional except what a check needs; a check that lacks an input names it. The most telling
array is `dloss_dlogps`, the gradient of the loss with respect to the token log-probabilities: many mistakes have the right
value and a wrong gradient. A loss of 0 on the first pass tells nothing; its gradient tells everything.

Recording recipes (the TRL ones are run by verification/test_audit_recipes.py against TRL 1.16.0):

TRL GRPOTrainer - subclass, and write what `_compute_loss` read and returned:

    import numpy as np, torch

    class RecordingGRPOTrainer(GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            outputs = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            if outputs[0].requires_grad:
                self.recorded_logps = outputs[0]
            return outputs

        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            logps = self.recorded_logps
            (gradient,) = torch.autograd.grad(loss, logps, retain_graph=True)
            arrays = {"logps": logps, "dloss_dlogps": gradient, "loss": loss, "mask": inputs["completion_mask"],
                      "completion_ids": inputs["completion_ids"], "advantages": inputs["advantages"],
                      "num_items_in_batch": torch.as_tensor(inputs["num_items_in_batch"]), "beta": torch.tensor(self.beta),
                      "budget": torch.tensor(self.max_completion_length), "clip_low": torch.tensor(self.epsilon_low),
                      "clip_high": torch.tensor(self.epsilon_high),
                      "accumulation_steps": torch.tensor(self.current_gradient_accumulation_steps)}
            for name, key in (("old_logps", "old_per_token_logps"), ("ref_logps", "ref_per_token_logps")):
                if inputs.get(key) is not None:
                    arrays[name] = inputs[key]
            np.savez("batch.npz", **{name: value.detach().float().cpu().numpy() for name, value in arrays.items()})
            return loss

`rewards` and `group_ids` let the audit check the advantages too. TRL computes them over the whole generation batch and then
shuffles: record them where that happens, in `_generate_and_score_completions` (before the shuffle), with `advantages`, as a
file of its own; groups are consecutive rows there: group_ids = np.arange(rows) // num_generations.

TRL DPOTrainer - the policy and then the reference run once in `_compute_loss`; keep what they return:

    class RecordingDPOTrainer(DPOTrainer):
        def _compute_loss(self, model, inputs, return_outputs=False):
            seen = []
            modules = {id(module): module for module in (model, self.ref_model) if module is not None}.values()
            hooks = [module.register_forward_hook(lambda _, args, output: seen.append(output.get("log_probs")))
                     for module in modules]
            try:
                result = super()._compute_loss(model, inputs, return_outputs)
            finally:
                for hook in hooks:
                    hook.remove()
            loss = result[0] if return_outputs else result
            mask = inputs["completion_mask"][:, 1:].bool()               # the log-probability of token t + 1 stands at t
            logps, ref_logps = (x[:, -mask.shape[1]:] for x in seen[:2])
            (gradient,) = torch.autograd.grad(loss, seen[0], retain_graph=True)
            chosen, rejected = torch.where(mask, logps, 0.0).sum(1).chunk(2)
            ref_chosen, ref_rejected = torch.where(mask, ref_logps, 0.0).sum(1).chunk(2)
            arrays = {"logps": logps, "ref_logps": ref_logps, "dloss_dlogps": gradient[:, -mask.shape[1]:], "loss": loss,
                      "chosen_logps": chosen, "rejected_logps": rejected, "ref_chosen_logps": ref_chosen,
                      "ref_rejected_logps": ref_rejected, "beta": torch.tensor(self.beta), "mask": mask}
            np.savez("pairs.npz", **{name: value.detach().float().cpu().numpy() for name, value in arrays.items()})
            return result

verl - in the actor's update, beside the call of the policy loss function (names as verl 0.9.1 has them):

    pg_loss, metrics = policy_loss_fn(old_log_prob=old_log_prob, log_prob=log_prob, advantages=advantages,
                                      response_mask=response_mask, loss_agg_mode=loss_agg_mode, config=config)
    (gradient,) = torch.autograd.grad(pg_loss, log_prob, retain_graph=True)
    np.savez("batch.npz", **{name: x.detach().float().cpu().numpy() for name, x in dict(
        log_prob=log_prob, old_log_probs=old_log_prob, response_mask=response_mask, advantages=advantages,
        dloss_dlogps=gradient, loss=pg_loss, token_level_rewards=data["token_level_rewards"]).items()},
        uid=np.array(data["uid"], dtype=str), clip_low=config.clip_ratio_low, clip_high=config.clip_ratio_high)

Same as objectives.py: every formula is taken from there. Left out: what its NOT_EXPRESSED lists, and combinations of two
mistakes at once.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import textwrap
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Sequence

import numpy as np
import torch

import rl_lab
from extensions import audit_advantages, audit_checks, audit_forms, audit_preferences, audit_search
from extensions.audit_mistakes import CATALOGUE, NOTES, SEVERITIES, Finding, finding
from extensions.audit_read import ALIASES, CANONICAL, NUMBERS, SUFFIXES, Recording, check_numbers, read_recording
from extensions.audit_search import LOSS_DEFAULTS, Match, against, differing
from extensions.objectives import PREFERENCE_ROWS, ROWS, PreferenceRow, Row, evaluate

# ------------------------------------------------------------------------------------------ what was declared


@dataclass(frozen=True)
class Declared:
    """The row a user says the trainer follows, and its choices in the words of a match."""

    row: Row | PreferenceRow
    set_fields: tuple[str, ...] = ()

    @property
    def is_pairs(self) -> bool:
        return isinstance(self.row, PreferenceRow)

    def loss_fields(self, recording: Recording) -> dict:
        """The loss part under the names of audit_search.Match.fields; what has no effect is left out."""
        row = self.row
        fields: dict = {"ratio": row.ratio, "reduction": row.reduction}
        if row.ratio != "none":
            fields["surrogate"] = row.surrogate
            if (
                row.surrogate in ("clip", "dual_clip", "capped_clip", "cispo", "dppo_tv", "dppo_kl")
                or row.ratio == "sequence_mean_of_clipped"
            ):
                low = recording.number("clip_low", row.clip_low) if "clip_low" not in self.set_fields else row.clip_low
                high = recording.number("clip_high", row.clip_high) if "clip_high" not in self.set_fields else row.clip_high
                if row.surrogate == "cispo":
                    low, high = row.clip_low, row.clip_high
                fields |= {"clip_low": float(low), "clip_high": float(high)}
        if row.reduction == "mean_over_window" and "num_items_in_batch" not in recording.numbers:
            fields["window_unknown"] = True  # a mean over any number of tokens may be it
        coef = recording.number("beta", row.kl_coef) if "kl_coef" not in self.set_fields else row.kl_coef
        reference, logps = recording.get("ref_logps"), recording.get("logps")
        is_visible = reference is None or logps is None or not np.array_equal(reference, logps)
        if row.kl != "none" and row.kl_place == "loss" and coef and not is_visible:
            pass  # policy and reference are equal: the term is 0 with gradient 0, whatever it is
        elif row.kl != "none" and row.kl_place == "loss" and coef:
            fields |= {"kl": row.kl, "kl_coef": float(coef), "kl_weight": row.kl_weight, "kl_gradient": row.kl_gradient}
        else:
            fields["kl"] = "none"
        if row.accumulation == "divide" and recording.number("accumulation_steps", 1) > 1:
            fields["accumulation"] = "divide"
        return fields

    def advantage_fields(self) -> dict:
        row = self.row
        fields = {"baseline": row.baseline, "scale": row.scale, "credit": row.credit, "reward_parts": row.reward_parts}
        if row.scale != "none":
            fields |= {"std_ddof": row.std_ddof, "std_eps": float(row.std_eps), "std_guard": row.std_guard}
        return {} if row.baseline == "given" and row.scale == "none" else fields


_ADVANTAGE_DEFAULTS = {"credit": "outcome", "reward_parts": "sum_then_normalise", "scale": "none"}


def parse_declared(name: str | None, settings: Sequence[str]) -> tuple[Declared | None, dict[str, float]]:
    """--declared ROW and --set key=value -> the row with its fields set, and numbers for the recording.

    Raises ValueError for an unknown name or a value that does not fit.
    """
    numbers: dict[str, float] = {}
    changes: dict[str, object] = {}
    known = {**ROWS, **PREFERENCE_ROWS}
    if name is not None and name not in known:
        import difflib

        near = difflib.get_close_matches(name, known, n=3)
        raise ValueError(
            f"--declared: got {name!r}, wanted a row of the table"
            + (f"; near: {', '.join(near)}" if near else "; python -m extensions.objectives --list names them")
        )
    row = known.get(name) if name else None
    types = {f.name: f.type for f in dataclasses.fields(row)} if row is not None else {}
    for setting in settings:
        key, sign, text = setting.partition("=")
        if not sign or not key:
            raise ValueError(f"--set: got {setting!r}, wanted key=value")
        canonical = CANONICAL.get(key, key)
        used = False
        if key in types and key not in ("name", "source", "differs"):
            value: object = text
            if types[key] in ("float", "int"):
                value = _number(key, text)
                value = int(value) if types[key] == "int" else value
            changes[key] = value
            used = True
        if canonical in NUMBERS:
            numbers[canonical] = _number(key, text)
            used = True
        if canonical == "beta" and row is not None and isinstance(row, Row):
            changes["kl_coef"] = _number(key, text)
        if key == "kl_coef":
            numbers["beta"] = _number(key, text)
        if not used:
            raise ValueError(
                f"--set: {key!r} is no number of a recording"
                + (" and no field of the declared row" if row else "; fields of a row need --declared")
            )
    if row is not None and changes:
        row = replace(row, **changes)
    return (Declared(row, tuple(changes)) if row is not None else None), numbers


def _number(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise ValueError(f"--set {key}: got {text!r}, wanted a number")
    return value


# ------------------------------------------------------------------------------------------ the audit


@dataclass
class Report:
    """Everything the audit says; `as_json` is what --json writes."""

    batch: dict = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    advantages: dict = field(default_factory=dict)
    loss: dict = field(default_factory=dict)
    gradient: dict = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    cannot_tell: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    lines: dict[str, list[str]] = field(default_factory=dict)

    def worst(self) -> str | None:
        return max((f.severity for f in self.findings), key=SEVERITIES.index, default=None)

    def named(self) -> list[str]:
        return [f.name for f in self.findings]

    def as_json(self) -> dict:
        return _finite(
            {
                "batch": {**self.batch, "in_words": self.words},
                "advantages": {"matches": [], **self.advantages},
                "loss": {"matches": [], "tried": 0, **self.loss},
                "gradient": {"agrees": None, **self.gradient},
                "findings": [f.as_json() for f in self.findings],
                "cannot_tell": self.cannot_tell,
                "record_next": self.missing,
                "remarks": self.remarks,
            }
        )


def _finite(value):
    """JSON has no infinities: they become strings."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


MOST_MATCHES = 40


def audit(recording: Recording, declared: Declared | None = None, numbers: dict[str, float] | None = None) -> Report:
    """Recompute one recorded batch and say what it follows. Gradient: none. Raises rl_lab.FileProblem as read_recording."""
    recording.numbers |= numbers or {}
    check_numbers(recording.numbers)
    report = Report(remarks=list(recording.remarks))
    audit_checks.describe_batch(recording, report.batch, report.words)
    report.findings += audit_checks.input_findings(recording)
    with np.errstate(all="ignore"):
        if audit_preferences.is_preference(recording):
            _audit_pairs(recording, declared, report)
        elif audit_advantages.is_environment(recording):
            _audit_time(recording, report)
        else:
            _audit_rollout(recording, declared, report)
    report.findings += audit_checks.metric_findings(recording, report.lines.setdefault("metrics", []))
    order = {name: place for place, name in enumerate(reversed(SEVERITIES))}
    seen: dict[tuple, Finding] = {}
    for f in report.findings:
        kept = seen.get((f.name,))
        if kept is None or order[f.severity] < order[kept.severity]:
            seen[(f.name,)] = f
    report.findings = sorted(seen.values(), key=lambda f: order[f.severity])
    report.missing = list(dict.fromkeys(report.missing))
    return report


# ---- rollouts


def _audit_rollout(recording: Recording, declared: Declared | None, report: Report) -> None:
    if "mask" not in recording.arrays:
        report.missing.append("logps, old_logps, mask (rows x tokens), advantages, loss and dloss_dlogps")
        report.lines["advantages"] = ["not checked: nothing to compute them from"]
        report.lines["loss"] = ["not checked: no per-token array"]
        return
    advantages = audit_advantages.search_advantages(recording)
    _say_advantages(recording, declared, advantages, report)
    arrays = recording.arrays
    if "vpreds" in arrays and "logps" not in arrays and "loss_mat" not in arrays:
        _audit_value_loss(recording, report)
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
    result = audit_search.search_loss(recording, A, declared=wanted)
    _say_loss(recording, declared, wanted, advantages, result, report)


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
            batch = audit_advantages.advantage_batch(recording)
            missing = (
                {"missing_reward": "exclude"} if batch.rewards is not None and bool(batch.rewards.isnan().any()) else {}
            )
            made = audit_advantages.compute_advantages(Row("rule", singleton="zero", **missing, **fields), batch).numpy()
        except (ValueError, TypeError):
            continue
        result = audit_search.search_loss(recording, made, look_for_mistakes=False)
        if result.matches and not result.zero and (best is None or result.matches[0].order < best[0]):
            best = (result.matches[0].order, name, made)
        elif best is None:
            best = ((9,), name, made)
    report.missing.append("advantages, as the loss used them")
    if best is None:
        return None
    report.remarks.append(f"advantages were not recorded: computed by the rule of {best[1]}")
    return best[2]


_ADVANTAGE_FINDINGS = {"std_eps": "std_eps_differs", "std_guard": "std_eps_differs"}


def _say_advantages(recording: Recording, declared: Declared | None, result, report: Report) -> None:
    lines = report.lines.setdefault("advantages", [])
    report.remarks += result.remarks
    matches, mistakes = result.matches, result.mistakes
    report.advantages = {
        "matches": [
            {**m.fields, "rows": audit_advantages.rows_with(m.fields), "largest_difference": m.gap, "reads": m.reads}
            for m in matches[:MOST_MATCHES]
        ],
        "with_a_mistake": [
            {**m.fields, "mistake": m.mistakes[0], "largest_difference": m.gap} for m in mistakes[:MOST_MATCHES]
        ],
        "tried": result.tried,
    }
    if not result.checked:
        report.missing += result.missing
        lines.append("not checked" + (f": record {'; '.join(result.missing)}" if result.missing else ""))
        return
    report.missing += [m for m in result.missing if not matches]
    if matches:
        for match in matches[:3]:
            names = audit_advantages.rows_with(match.fields)
            lines.append(f"{match.label()}{_names(names)}" + (f"  ({match.remark})" if match.remark else ""))
        if len(matches) > 1:
            decide = _tie([m.fields for m in matches], _DECIDES_ADVANTAGES, {})
            if decide:
                lines += decide
                report.cannot_tell += [f"advantages: {line.strip()}" for line in decide]
        lines.append(f"{result.tried} rules tried; largest difference {matches[0].gap:.1e}")
        if declared is not None and not declared.is_pairs:
            _declared_advantages(declared, matches, report)
        elif report.batch.get("groups", 1) > 1 and all(
            m.fields.get("baseline") == "none" and m.fields.get("scale") == "batch_std" for m in matches
        ):
            report.findings.append(
                finding(
                    "groups_pooled",
                    "warning",
                    f"{report.batch['groups']} groups are recorded and not used: {matches[0].label()}; "
                    "right for REINFORCE++, wrong for GRPO.",
                )
            )
        _baseline_notes(recording, matches, report)
    elif mistakes:
        for name in dict.fromkeys(m.mistakes[0] for m in mistakes):
            match = next(m for m in mistakes if m.mistakes[0] == name)
            lines.append(f"{match.label()}, with a mistake: {CATALOGUE[name].what}")
            report.findings.append(
                finding(
                    name,
                    "mistake",
                    f"With it, {match.label()} gives the reported {match.reads} within {match.gap:.1e}"
                    + (f"; {match.remark}" if match.remark else "")
                    + f" ({result.tried} rules tried).",
                    match.rows,
                )
            )
    else:
        lines.append(f"none of {result.tried} rules gives the reported advantages")
        advice = (
            "record rewards before any shaping, group_ids, and for a micro-batch gen_rewards, gen_group_ids and row_ids of "
            "the whole generation batch"
        )
        report.findings.append(
            finding("not_reproduced", "warning", f"Advantages: {result.tried} rules tried.", advice=advice)
        )


def _declared_advantages(declared: Declared, matches, report: Report) -> None:
    wanted = declared.advantage_fields()
    if not wanted:
        return
    differences = [[k for k in differing({**_ADVANTAGE_DEFAULTS, **m.fields}, wanted)] for m in matches]
    if any(not d for d in differences):
        return
    got, names = matches[0], differences[0]
    for name in names:
        value, expected = {**_ADVANTAGE_DEFAULTS, **got.fields}.get(name), wanted[name]
        if name == "std_ddof":
            key = "sample_for_population_std" if value == 1 else "population_for_sample_std"
        elif name in ("baseline", "scale", "credit", "reward_parts"):
            # A mean and a std over the whole batch are another estimator's rule, and what pooled groups amount to.
            pooled = (
                got.fields.get("baseline") == "none"
                and got.fields.get("scale") in ("batch_std", "token_std")
                and wanted["baseline"] in ("group_mean", "leave_one_out")
            )
            key = "groups_pooled" if pooled else "advantage_rule_differs"
        else:
            key = _ADVANTAGE_FINDINGS[name]
        report.findings.append(
            finding(key, "mistake", f"Declared {name} {expected}, the reported advantages follow {value}: {got.label()}.")
        )
        if key in ("advantage_rule_differs", "groups_pooled"):
            break


def _baseline_notes(recording: Recording, matches, report: Report) -> None:
    empty = np.flatnonzero(~recording.arrays["mask"].any(1))
    truncated = recording.get("row_truncated")
    rows = np.union1d(empty, np.flatnonzero(truncated)) if truncated is not None else empty
    if len(rows) and matches[0].fields.get("baseline") in ("group_mean", "leave_one_out") and not matches[0].remark:
        report.findings.append(
            finding("dropped_rows_in_baseline", "note", f"{len(rows)} of {len(recording.arrays['mask'])} rows.", rows)
        )


def _names(names: Sequence[str]) -> str:
    if not names:
        return ""
    return "  [" + ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") + "]"


# ---- ties

_DECIDES_LOSS = {
    "ratio": "a batch of a later pass, where ratios differ from 1, with dloss_dlogps",
    "surrogate": "a batch of a later pass with ratios outside the band",
    "clip_low": "a batch of a later pass with ratios between the widths, or clip_low and clip_high themselves",
    "clip_high": "a batch of a later pass with ratios between the widths, or clip_low and clip_high themselves",
    "ratio_cap": "a token with A < 0 and a ratio above the cap",
    "off_policy_rows": "answers with A < 0 further from the policy that sampled",
    "off_policy_threshold": "the threshold itself (off_policy_threshold)",
    "reduction": "rows of unequal length with dloss_dlogps, num_items_in_batch, budget (max_completion_length)",
    "budget": "budget (max_completion_length)",
    "window_tokens": "num_items_in_batch",
    "rows_counted": "a batch with an empty row",
    "kl": "ref_logps that differ from logps, with dloss_dlogps",
    "kl_weight": "ratios that differ from 1, with dloss_dlogps",
    "kl_gradient": "dloss_dlogps",
    "kl_coef": "beta",
    "kl_anchor": "old_logps that differ from ref_logps",
    "entropy_coef": "dloss_dentropies",
    "value_loss": "dloss_dvpreds",
    "value_coef": "dloss_dvpreds",
    "value_clip": "dloss_dvpreds, with values that moved beyond the clip",
}
_DECIDES_BETWEEN = (
    ("surrogate", {"clip", "dual_clip", "capped_clip"}, "a token with A < 0 and a ratio above the cap c"),
    (
        "reduction",
        {"mean_over_window", "mean_over_tokens"},
        "a micro-batch of a larger window (accumulation_steps above 1), with num_items_in_batch",
    ),
)
"""What decides when only these values are left; it comes before the text for the field in general."""
_DECIDES_ADVANTAGES = {
    "baseline": "rewards that differ within groups",
    "std_ddof": "groups with spread",
    "std_eps": "a group whose spread is small",
    "std_guard": "a group whose spread is small",
    "singleton": "a group of one",
    "scale": "groups of different spread",
    "credit": "rewards on several tokens",
    "gamma": "gamma",
    "lam": "lam",
}


def _tie(all_fields: list[dict], decides: dict[str, str], defaults: dict) -> list[str]:
    """One line for each choice in which tied hypotheses differ: the alternatives, and the recording that would decide."""
    lines = []
    for name, recording in decides.items():
        values = []
        for fields in all_fields:
            value = fields.get(name, defaults.get(name))
            if value is not None and value not in values:
                values.append(value)
        if len(values) > 1:
            shown = ", ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in values[:6]) + (
                " ..." if len(values) > 6 else ""
            )
            special = (text for field_, among, text in _DECIDES_BETWEEN if field_ == name and among.issuperset(values))
            lines.append(f"cannot tell {name.replace('_', ' ')}: {shown}. It would be decided by {next(special, recording)}")
    return lines


def tied(matches: list[Match]) -> list[Match]:
    """The matches that explain the recording as well as the best one does."""
    if not matches:
        return []
    best = matches[0]
    return [m for m in matches if m.by == best.by and m.weak == best.weak and m.order[3] == best.order[3]]


# ---- the loss


_RATIO_FIELDS = ("ratio", "surrogate", "clip_low", "clip_high", "ratio_cap")


def _listed(names: Sequence[str]) -> str:
    """a, b and c, in words."""
    words = [name.replace("_", " ") for name in names]
    return ", ".join(words[:-1]) + (" and " if len(words) > 1 else "") + words[-1]


_FIELD_FINDINGS = {
    "reduction": "reduction_differs",
    "ratio": "ratio_differs",
    "surrogate": "surrogate_differs",
    "clip_low": "clip_range_differs",
    "clip_high": "clip_range_differs",
    "kl": "kl_differs",
    "kl_weight": "kl_differs",
    "kl_gradient": "kl_differs",
    "kl_coef": "kl_coef_differs",
    "accumulation": "extra_division",
    "off_policy_rows": "surrogate_differs",
}


def _match_json(m: Match) -> dict:
    return {
        **m.fields,
        "factor": m.factor,
        "by": m.by,
        "gradient_residual": m.residual,
        "loss_difference": m.gap,
        "rows": audit_search.rows_with(m.fields),
        "in_words": m.label(),
        **({"mistakes": list(m.mistakes)} if m.mistakes else {}),
        **({"remarks": list(m.remarks)} if m.remarks else {}),
    }


def _say_loss(
    recording: Recording, declared: Declared | None, wanted: dict | None, advantages, result, report: Report
) -> None:
    lines = report.lines.setdefault("loss", [])
    report.remarks += result.remarks
    report.missing += result.missing
    has_gradient = "dloss_dlogps" in recording.arrays or "dloss_dloss_mat" in recording.arrays
    matches, mistakes = result.matches, result.mistakes
    if wanted is not None:
        # What was declared comes first among equals.
        matches = sorted(matches, key=lambda m: (bool(against(m.fields, wanted)), m.order))
    report.loss = {
        "matches": [_match_json(m) for m in matches[:MOST_MATCHES]],
        "tied": len(tied(matches)),
        "with_a_mistake": [_match_json(m) for m in mistakes[:MOST_MATCHES]],
        "tried": result.tried,
        "expected_by_accident": result.chance,
        "reported": recording.number("loss"),
    }
    report.gradient = {"agrees": None}
    if not has_gradient:
        report.missing.append("dloss_dlogps: torch.autograd.grad(loss, logps, retain_graph=True)")
    near_declared = [m for m in mistakes if wanted is not None and not against(m.fields, wanted)]
    plain = matches if wanted is None else [m for m in matches if not against(m.fields, wanted)]
    strong = [m for m in plain if not m.weak]
    by_accident = "" if has_gradient else f"; {result.chance:.2g} expected by accident"
    tried = f"{result.tried} hypotheses tried{by_accident}"
    unsure = not has_gradient and result.chance > 0.2

    if plain and (strong or not mistakes or wanted is not None and not near_declared):
        _say_match(recording, declared, advantages, plain, result, report, lines)
    elif near_declared or mistakes and not matches:
        _say_mistakes(recording, declared, near_declared or mistakes, matches, result, report, lines, has_gradient)
        other = next((m for m in matches if not m.weak and m.by == (near_declared or mistakes)[0].by), None)
        if other is not None and wanted is not None and other.order[3] <= (near_declared or mistakes)[0].order[3]:
            lines.append(f"or another convention: {other.label()}")
            report.cannot_tell.append(f"loss: a mistake, or another convention than declared: {other.label()}")
            _declared_findings([other], wanted, report, unsure)
    elif matches and mistakes and wanted is None:
        # A solved denominator and a division too many explain the same number.
        _say_match(recording, declared, advantages, matches, result, report, lines)
        for m in list({m.mistakes: m for m in reversed(tied(mistakes))}.values())[::-1]:
            lines.append(f"cannot tell it from: {m.label()}")
            report.cannot_tell.append(f"loss: {matches[0].label()} or {m.label()}")
            report.findings.append(
                finding(
                    "divided_by_whole_number" if m.mistakes == ("extra_division",) else m.mistakes[0],
                    "warning",
                    f"Either {matches[0].label()}, or {m.label()} ({'; '.join(m.remarks)}); this recording cannot "
                    "tell which.",
                    advice="record num_items_in_batch, budget (max_completion_length), accumulation_steps",
                )
            )
    elif matches:
        _say_match(recording, declared, advantages, matches, result, report, lines)
        _declared_findings(tied(matches), wanted, report, unsure)
    else:
        lines.append("none of the hypotheses gives what was reported")
        if result.nearest is not None and result.proportional is None:
            lines.append(f"nearest gradient: {result.nearest.label()}, {100 * result.nearest.residual:.1f} % off")
        evidence = f"Loss: {tried}."
        if result.nearest is not None:
            evidence += f" Nearest: {result.nearest.label()}, gradient {100 * result.nearest.residual:.1f} % off."
        if result.proportional is not None:
            m = result.proportional
            lines.append(f"gradient proportional to: {m.label()}")
            report.findings.append(
                finding("unexplained_factor", "warning", f"{m.label()}, within {m.residual:.1e}; {tried}.")
            )
        elif recording.number("loss") is not None or has_gradient:
            report.findings.append(finding("not_reproduced", "warning", evidence))
            if declared is not None and wanted is not None:
                report.findings.append(finding("declared_not_seen", "mistake", f"Declared {declared.row.name}; {tried}."))
        report.gradient["agrees"] = False if has_gradient else None
    lines.append(tried)
    if not has_gradient and matches and result.chance > 0.5:
        line = (
            f"the value alone is weak here: {result.chance:.2g} matches are expected by accident. dloss_dlogps would decide"
        )
        lines.append(line)
        report.cannot_tell.append(f"loss: {line}")
    report.findings += audit_checks.not_mistakes(recording, matches, result, has_gradient)


def _say_match(recording, declared, advantages, matches, result, report, lines) -> None:
    best = matches[0]
    same = tied(matches)
    rows = dict.fromkeys(name for m in same for name in audit_search.rows_with(m.fields))
    lines.append(f"{best.label()}{_names(list(rows))}")
    lines += [f"  ({remark})" for remark in best.remarks]
    if best.gap is not None:
        lines.append(f"reported {recording.number('loss'):.6g}, recomputed within {abs(best.gap):.1e}")
    if best.weak:
        report.missing.append("budget (max_completion_length)" if "budget" in best.fields else "num_items_in_batch")
    if result.zero:
        lines.append("the reported loss is 0 within rounding: its value decides nothing")
    decides = _DECIDES_LOSS
    for names, why, recording_wanted in (
        (_RATIO_FIELDS, "every ratio is 1", "a batch of a later pass, with dloss_dlogps"),
        (("ratio", "reduction"), "every answer is one token long", "answers of several tokens, of unequal length"),
    ):
        is_so = report.batch.get("largest_log_ratio") == 0 if names is _RATIO_FIELDS else report.batch.get("longest") == 1
        differ = [name for name in names if len({str(m.fields.get(name)) for m in same}) > 1]
        if is_so and differ:
            decides = {name: text for name, text in decides.items() if name not in names}
            line = f"cannot tell {_listed(differ)}: {why}. It would be decided by {recording_wanted}"
            lines.append(line)
            report.cannot_tell.append(f"loss: {line}")
    decide = _tie([m.fields for m in same], decides, LOSS_DEFAULTS)
    if len(same) > 1 and decide:
        lines.append(f"{len(same)} combinations give the same number on this batch:")
        lines += [f"  {line}" for line in decide]
        report.cannot_tell += [f"loss: {line}" for line in decide]
    has_gradient = best.residual is not None
    if has_gradient:
        report.gradient = {
            "agrees": best.by == "gradient and value" or recording.number("loss") is None,
            "residual": best.residual,
        }
        if not report.gradient["agrees"] and best.by == "gradient":
            gap = best.gap if best.gap is not None else math.nan
            evidence = (
                f"{best.label()} has the recorded gradient within {best.residual:.1e}; its value differs by {gap:.6g}."
            )
            loss = recording.number("loss")
            if loss is not None and abs(loss - gap) > 1e-12 and abs(loss / (loss - gap) - round(loss / (loss - gap))) < 1e-4:
                evidence += f" Reported is {loss / (loss - gap):.6g} times the value that the gradient belongs to."
            report.findings.append(finding("gradient_value_disagree", "warning", evidence))
    confirmed = engine_check(recording, best)
    if confirmed is not None:
        lines.append(confirmed)
    report.findings += _choice_findings(recording, declared, advantages, same, result)


def engine_check(recording: Recording, match: Match) -> str | None:
    """The best match once more, as one Row through objectives.evaluate on the whole batch."""
    f = match.fields
    if f.get("token_losses") or match.mistakes:
        return None
    names = {field_.name for field_ in dataclasses.fields(Row)}
    choices = {k: v for k, v in f.items() if k in names}
    overrides = {}
    if "window_tokens" in f:
        overrides["window_tokens"] = f["window_tokens"]
    if "value_loss" in f:
        for name in ("vpreds", "returns", "values"):
            if name in recording.arrays:
                overrides[name] = recording.arrays[name]
    A = recording.arrays.get("advantages")
    if A is None:
        return None
    try:
        batch = audit_forms.build_batch(recording, advantages=A)
        changes = dict(overrides)
        changes = {
            k: torch.where(batch.mask, torch.as_tensor(v), 0.0) if isinstance(v, np.ndarray) else v
            for k, v in changes.items()
        }
        if "budget" in f:
            changes["budget"] = f["budget"]
        if "global_batch_size" not in f:
            changes["window_rows"] = None
        batch = replace(batch, **changes)
        made = evaluate(Row("match", baseline="given", **choices), batch)
    except (ValueError, TypeError):
        return None
    text = f"through the engine: loss {made.loss.item():.6g}"
    g = recording.get("dloss_dlogps")
    if g is not None and np.isfinite(g).all():
        off = float((made.dloss_dlogps - torch.as_tensor(g)).norm()) / max(float(np.linalg.norm(g)), 1e-30)
        text += f", gradient within {off:.1e} of its size"
    return text


def _choice_findings(recording, declared, advantages, same, result) -> list[Finding]:
    """What a plain match says on its own: a choice that is known to do no good, or that deserves a word."""
    found = []
    best = same[0]
    kls = {m.fields.get("kl", "none") for m in same}
    f = best.fields
    if kls == {"k1"} and all(m.fields.get("kl_weight") == "none" and m.fields.get("kl_gradient") == "own" for m in same):
        found.append(finding("kl_estimator_gradient", "mistake", f"+ {f['kl_coef']:g} k1 in the loss, reproduced."))
    elif kls == {"k3"} and all(m.fields.get("kl_weight") == "none" and m.fields.get("kl_gradient") == "own" for m in same):
        found.append(finding("k3_gradient", "note", f"+ {f['kl_coef']:g} k3."))
    ratios = {m.fields.get("ratio") for m in same}
    rule = advantages.matches[0].fields.get("baseline") if advantages.matches else None
    if ratios == {"sequence_product"} and rule != "leave_one_out" and declared is None and f.get("surrogate") == "clip":
        found.append(finding("sequence_sum_for_mean", "warning", f"{best.label()}; right for RLOO, not for GSPO."))
    if all(m.fields.get("reduction") == "sum_over_width" for m in same) and declared is None:
        width = recording.arrays["mask"].shape[1]
        found.append(
            finding(
                "padding_in_denominator",
                "warning",
                f"The denominator is the padded width, {width}: verl's seq-mean-token-sum-norm "
                "does this by default, a mean over padded slots does it by mistake.",
            )
        )
    if all(
        m.fields.get("surrogate") in ("clip", "dual_clip")
        and m.fields["clip_low"] >= 0.5
        and abs(m.fields["clip_low"] + m.fields["clip_high"] - 1) < 1e-3
        for m in same
    ):
        found.append(
            finding(
                "clip_lower_bound_wrong",
                "warning",
                f"Lower bound {1 - f['clip_low']:g} with an upper width of {f['clip_high']:g}.",
            )
        )
    if all(m.fields.get("accumulation") == "divide" for m in same):
        found.append(
            finding(
                "divided_by_whole_number",
                "note",
                f"Divided by {recording.number('accumulation_steps'):g} accumulation steps, as recorded.",
            )
        )
    if (
        not any(audit_search.rows_with(m.fields) for m in same)
        and not f.get("token_losses")
        and declared is None
        and not best.weak
    ):
        found.append(finding("unnamed_combination", "note", best.label() + "."))
    return found


def _declared_findings(same: list[Match], wanted: dict, report: Report, unsure: bool) -> None:
    """One finding for each declared choice that none of the tied matches makes."""
    match = same[0]
    full = {**LOSS_DEFAULTS, **match.fields}
    shared = set.intersection(*(set(against(m.fields, wanted)) for m in same))
    names = [name for name in against(match.fields, wanted) if name in shared] or against(match.fields, wanted)
    swapped = (full.get("clip_low"), full.get("clip_high")) == (
        wanted.get("clip_high"),
        wanted.get("clip_low"),
    ) and "clip_low" in names
    done = set()
    for name in names:
        got, expected = full.get(name), wanted[name]
        key = _FIELD_FINDINGS.get(name, "declared_not_seen")
        if name == "reduction":
            if got in ("sum_over_tokens", "sum_per_response") and expected.startswith("mean"):
                key = "sum_for_mean"
            elif any(m.fields.get("reduction") == "sum_over_width" for m in same):
                key = "padding_in_denominator"
        elif name == "ratio" and got == "sequence_product":
            key = "sequence_sum_for_mean"
        elif name in ("clip_low", "clip_high"):
            if swapped:
                key = "clip_sides_swapped"
            elif math.isinf(got):
                key = "clip_one_sided"
        elif name == "kl" and got == "k1":
            key = "kl_estimator_gradient"
        elif name == "kl_coef" and isinstance(expected, float) and expected and abs(got - expected**2) < 1e-3 * expected**2:
            key = "beta_twice"
        elif name in ("kl_weight", "kl_gradient", "kl_coef") and "kl" in names:
            continue
        if key not in done:
            done.add(key)
            shown = got if got is not None else "nothing"
            report.findings.append(
                finding(
                    key,
                    "warning" if unsure else "mistake",
                    f"Declared {name.replace('_', ' ')} {expected}, reproduced with {shown}: {match.label()}.",
                )
            )


def _say_mistakes(recording, declared, mistakes, matches, result, report, lines, has_gradient) -> None:
    best = mistakes[0]
    same = [m for m in mistakes if m.by == best.by and m.order[3] == best.order[3]]
    names = list(dict.fromkeys(name for m in same for name in m.mistakes))
    lines.append(f"{best.label()}, with a mistake: {CATALOGUE[best.mistakes[0]].what}")
    lines += [f"  ({remark})" for remark in best.remarks]
    if best.gap is not None:
        lines.append(f"reported {recording.number('loss'):.6g}, recomputed within {abs(best.gap):.1e}")
    report.gradient["agrees"] = False if has_gradient else None
    if has_gradient:
        report.gradient["residual"] = best.residual
    unsure = not has_gradient and result.chance > 0.2
    tie = f" Cannot tell from: {', '.join(names[1:])}." if len(names) > 1 else ""
    if tie:
        report.cannot_tell.append(f"mistake: {', '.join(names)}")
        lines.append(f"cannot tell which mistake: {', '.join(names)}")
    decide = _tie([m.fields for m in same], _DECIDES_LOSS, LOSS_DEFAULTS)
    if decide:
        lines += [f"  {line}" for line in decide]
        report.cannot_tell += [f"loss: {line}" for line in decide]
    for name in names:
        m = next(m for m in same if name in m.mistakes)
        severity = "warning" if unsure else "mistake"
        advice, key = None, name
        if name == "beta_twice" and "beta" not in recording.numbers and declared is None:
            severity, advice = "warning", "record beta"
        if (
            name == "extra_division"
            and declared is None
            and "accumulation_steps" not in recording.numbers
            and (m.fields.get("reduction") != "mean_over_window")
        ):
            # Trainers that divide a micro-batch's mean by the accumulation steps are right to do so.
            severity, key = "warning", "divided_by_whole_number"
            advice = "record accumulation_steps (and world_size): right if it is by the accumulation steps, and only once"
        how = f"gradient within {m.residual:.1e}" if m.residual is not None else "value alone, no gradient recorded"
        others = [n for n in names if n != name]
        evidence = (
            f"With it, {m.label()} gives what was reported ({how})"
            + (f"; {'; '.join(m.remarks)}" if m.remarks else "")
            + "."
        )
        if others:
            evidence += f" Cannot tell from: {', '.join(others)}."
        if unsure:
            evidence += f" {result.chance:.2g} matches are expected by accident."
        report.findings.append(finding(key, severity, evidence, _rows_of_edit(recording, name), advice))


def _rows_of_edit(recording: Recording, name: str) -> list[int]:
    edits = audit_forms.mask_edits(recording) if "mask" in recording.arrays else {}
    if name not in edits:
        return []
    return np.flatnonzero((edits[name] != recording.arrays["mask"]).any(1)).tolist()


# ---- critic alone


def _audit_value_loss(recording: Recording, report: Report) -> None:
    lines = report.lines.setdefault("loss", [])
    if "returns" not in recording.arrays or ("loss" not in recording.numbers and "dloss_dvpreds" not in recording.arrays):
        report.missing.append("returns, values, vpreds, loss and dloss_dvpreds")
        lines.append("not checked: the critic's loss needs vpreds, returns and the loss")
        return
    mask = torch.as_tensor(recording.arrays["mask"])
    gradient = recording.get("dloss_dvpreds")
    target = audit_search.Target(
        recording.number("loss"), None if gradient is None else torch.as_tensor(gradient), recording.eps
    )
    batch = audit_forms.build_batch(recording, advantages=np.ones(len(mask)))
    result = audit_search.LossResult()
    screen = audit_search.Screen(recording, batch, target, result)

    def spec(fields: dict, coef: float, value, slope, mistake) -> audit_forms.Spec:
        made = audit_forms.Form(-coef * torch.where(mask, value, 0.0), -coef * torch.where(mask, slope, 0.0))
        return audit_forms.Spec({**fields, "value_coef": coef}, mistake, lambda _: made)

    forms = [
        spec(fields, coef, value, slope, mistake)
        for fields, value, slope, mistake in audit_search.value_forms(recording, mask)
        for coef in audit_search.VALUE_COEFS
    ]
    screen.try_forms(screen.digest(forms), kl="none")
    result.matches.sort(key=lambda m: m.order)
    strong = [m for m in result.matches if not m.weak]
    result.matches = strong or result.matches
    if result.matches:
        result.mistakes = []
    result.mistakes.sort(key=lambda m: m.order)
    report.loss = {
        "matches": [_match_json(m) for m in result.matches[:MOST_MATCHES]],
        "tried": result.tried,
        "reported": recording.number("loss"),
    }
    if result.matches:
        best = result.matches[0]
        lines.append(best.label())
        report.gradient["agrees"] = True if best.residual is not None else None
        decide = _tie([m.fields for m in tied(result.matches)], _DECIDES_LOSS, LOSS_DEFAULTS)
        lines += decide
        report.cannot_tell += [f"loss: {line}" for line in decide]
    elif result.mistakes:
        best = result.mistakes[0]
        lines.append(f"{best.label()}, with a mistake: {CATALOGUE[best.mistakes[0]].what}")
        report.findings.append(finding(best.mistakes[0], "mistake", f"With it, {best.label()} gives the reported loss."))
        report.gradient["agrees"] = False if best.residual is not None else None
    else:
        lines.append("none of the hypotheses gives what was reported")
        report.findings.append(finding("not_reproduced", "warning", f"Critic: {result.tried} hypotheses tried."))
    lines.append(f"{result.tried} hypotheses tried")


# ---- time


def _audit_time(recording: Recording, report: Report) -> None:
    lines = report.lines.setdefault("advantages", [])
    result = audit_advantages.search_time(recording)
    report.remarks += result.remarks
    report.missing += result.missing
    report.lines["loss"] = ["not checked: a rollout of an environment, no loss in it"]
    report.advantages = {
        "matches": [{**m.fields, "reads": m.reads, "largest_difference": m.gap} for m in result.matches],
        "with_a_mistake": [{**m.fields, "mistake": m.mistakes[0]} for m in result.mistakes],
        "tried": result.tried,
    }
    if any("two flags" in m for m in result.missing):
        report.findings.append(finding("flags_missing", "warning", "Taken as ends of episodes, all of them."))
    if any(m.startswith("terminal_values") for m in result.missing):
        report.findings.append(
            finding(
                "flags_missing",
                "warning",
                "The value of the true final observation is not recorded, so the value after the "
                "reset stands in its place.",
                advice="record terminal_values (or next_values before any reset)",
            )
        )
    if result.matches:
        for m in result.matches[:3]:
            lines.append(f"{m.label()}, with terminated and boundary apart, gives the reported {m.reads}")
        lines.append(f"{result.tried} rules tried; largest difference {result.matches[0].gap:.1e}")
    elif result.mistakes:
        names = list(dict.fromkeys(m.mistakes[0] for m in result.mistakes))
        for name in names:
            m = next(m for m in result.mistakes if m.mistakes[0] == name)
            lines.append(f"{m.label()}, with a mistake: {CATALOGUE[name].what}")
            others = f" Cannot tell from: {', '.join(n for n in names if n != name)}." if len(names) > 1 else ""
            report.findings.append(
                finding(name, "mistake", f"With it, {m.label()} gives the reported {m.reads}. {m.remark}.{others}", m.rows)
            )
    elif result.checked:
        lines.append(f"none of {result.tried} rules gives what was reported")
        report.findings.append(
            finding(
                "not_reproduced",
                "warning",
                f"Advantages: {result.tried} rules tried.",
                advice="record gamma, lam, terminal_values and both flags",
            )
        )
    else:
        lines.append("not checked" + (f": record {'; '.join(result.missing)}" if result.missing else ""))


# ---- pairs


def _audit_pairs(recording: Recording, declared: Declared | None, report: Report) -> None:
    lines = report.lines.setdefault("loss", [])
    name = declared.row.name if declared is not None and declared.is_pairs else None
    if declared is not None and declared.is_pairs and "beta" not in recording.numbers and "beta" in declared.set_fields:
        recording.numbers["beta"] = declared.row.beta
    result = audit_preferences.search_preferences(recording, declared=name)
    report.remarks += result.remarks
    report.missing += [m for m in result.missing if m != "beta" or not result.matches]
    report.lines["advantages"] = ["a preference loss has none"]
    matches, mistakes = result.matches, result.mistakes
    as_json = lambda m: {
        **m.fields,
        "factor": m.factor,
        "by": m.by,
        "gradient_residual": m.residual,
        "loss_difference": m.gap,  # noqa: E731
        "rows": m.names(),
        "in_words": m.label(),
        **({"mistakes": list(m.mistakes)} if m.mistakes else {}),
    }
    if name:
        matches = sorted(matches, key=lambda m: (name not in m.names(), m.order))
    report.loss = {
        "matches": [as_json(m) for m in matches[:MOST_MATCHES]],
        "with_a_mistake": [as_json(m) for m in mistakes[:MOST_MATCHES]],
        "tried": result.tried,
        "reported": recording.number("loss"),
    }
    has_gradient = any(n in recording.arrays for n in ("dloss_dlogps", "dloss_dchosen_logps"))
    report.gradient = {"agrees": None}
    fits = [m for m in matches if name is None or name in m.names() or declared_fits(m, declared)]
    if fits:
        best = fits[0]
        lines.append(f"{best.label()}{_names(best.names())}")
        if best.gap is not None:
            lines.append(f"reported {recording.number('loss'):.6g}, recomputed within {abs(best.gap):.1e}")
        same = [m for m in fits if m.by == best.by]
        if len(same) > 1:
            decide = _tie(
                [m.fields for m in same],
                {
                    "loss": "margins that differ from 0 (a later step), with the gradient",
                    "score": "answers of unequal length",
                    "beta": "beta",
                    "label_smoothing": "label_smoothing and the gradient",
                    "tail_weight": "pairs of unequal length",
                    "gamma": "gamma",
                    "sft_coef": "the coefficient",
                    "divergence": "a later step",
                },
                {},
            )
            lines += decide
            report.cannot_tell += [f"loss: {line}" for line in decide]
        if has_gradient and best.residual is not None:
            report.gradient = {"agrees": best.by == "gradient and value" or best.gap is None, "residual": best.residual}
            if best.by == "gradient" and best.gap is not None:
                report.findings.append(
                    finding("gradient_value_disagree", "warning", f"{best.label()}: value differs by {best.gap:.3g}.")
                )
    else:
        candidates = [m for m in mistakes if name is None or name in m.names() or declared_fits(m, declared)] or (
            [] if matches else mistakes
        )
        if candidates:
            best = candidates[0]
            same = [m for m in candidates if m.by == best.by]
            names = list(dict.fromkeys(n for m in same for n in m.mistakes))
            lines.append(f"{best.label()}, with a mistake: {CATALOGUE[names[0]].what}")
            report.gradient["agrees"] = False if has_gradient else None
            for n in names:
                m = next(m for m in same if n in m.mistakes)
                severity = "mistake"
                key, advice = n, None
                if n == "extra_division" and declared is None and "accumulation_steps" not in recording.numbers:
                    key, severity, advice = "divided_by_whole_number", "warning", "record accumulation_steps"
                others = f" Cannot tell from: {', '.join(x for x in names if x != n)}." if len(names) > 1 else ""
                report.findings.append(
                    finding(
                        key,
                        severity,
                        f"With it, {m.label()} gives what was reported"
                        + (f"; {'; '.join(m.remarks)}" if m.remarks else "")
                        + f".{others}",
                        advice=advice,
                    )
                )
            if len(names) > 1:
                report.cannot_tell.append(f"mistake: {', '.join(names)}")
        elif matches:
            best = matches[0]
            lines.append(f"{best.label()}{_names(best.names())}")
            report.gradient["agrees"] = True if best.residual is not None else None
            report.findings.append(_declared_pairs(best, declared))
        elif recording.number("loss") is not None or has_gradient:
            lines.append("none of the hypotheses gives what was reported")
            report.findings.append(finding("not_reproduced", "warning", f"Loss: {result.tried} hypotheses tried."))
            report.gradient["agrees"] = False if has_gradient else None
        else:
            lines.append("not checked: no loss and no gradient recorded")
    lines.append(f"{result.tried} hypotheses tried")
    report.findings += audit_checks.pair_findings(recording, result)


def declared_fits(match, declared: Declared | None) -> bool:
    if declared is None or not declared.is_pairs:
        return declared is None
    row = declared.row
    return (match.row.loss, match.row.score, match.row.reference, match.row.divergence) == (
        row.loss,
        row.score,
        row.reference,
        row.divergence,
    )


def _declared_pairs(match, declared: Declared) -> Finding:
    got, row = match.row, declared.row
    evidence = f"Declared {row.name}, reproduced by {match.label()}."
    if row.loss == got.loss and row.score != got.score:
        return finding("ipo_sum_or_mean" if row.loss == "ipo" else "dpo_mean_for_sum", "mistake", evidence)
    if {row.loss, got.loss} <= {"sigmoid", "cdpo", "robust"}:
        return finding("smoothing_variant", "mistake", evidence)
    return finding("preference_loss_differs", "mistake", evidence)


# ------------------------------------------------------------------------------------------ the printed report


def printed(report: Report, path: str) -> str:
    out = [f"Audit of {path}", "", "Batch", *_indented(report.words)]
    for title, key in (("Advantages", "advantages"), ("Loss", "loss")):
        out += ["", title, *_indented(report.lines.get(key, ["not checked"]))]
    agrees = report.gradient.get("agrees")
    residual = report.gradient.get("residual")
    wrong = "does not agree with a right computation" + ("; with the mistake it does" if residual is not None else "")
    words = {True: "agrees with the best match", False: wrong, None: "not recorded"}[agrees]
    out += ["", "Gradient", f"  {words}" + (f" (off by {residual:.1e} of its size)" if residual is not None else "")]
    if report.lines.get("metrics"):
        out += ["", "Reported metrics", *_indented(report.lines["metrics"])]
    out += ["", "Findings"]
    if not report.findings:
        out.append("  none")
    for f in report.findings:
        out += textwrap.wrap(
            f"{f.severity.upper()}  {f.name}: {f.evidence}", 116, initial_indent="  ", subsequent_indent="    "
        )
        if f.rows:
            shown = ", ".join(map(str, f.rows[:12])) + (f" and {len(f.rows) - 12} more" if len(f.rows) > 12 else "")
            out.append(f"    rows: {shown}")
        if f.advice:
            out += textwrap.wrap(f"change: {f.advice}", 116, initial_indent="    ", subsequent_indent="      ")
    if report.missing:
        out += ["", "To decide more, record", *_indented(report.missing)]
    if report.remarks:
        out += ["", "Remarks", *_indented(report.remarks)]
    return "\n".join(out)


def _indented(lines: Sequence[str]) -> list[str]:
    return [
        piece
        for line in lines
        for piece in textwrap.wrap(line, 118, initial_indent="  ", subsequent_indent="    ", drop_whitespace=True) or [""]
    ]


# ------------------------------------------------------------------------------------------ command line


def names_table() -> str:
    """The names accepted for every array and number, for --help."""
    lines = []
    for name, others in ALIASES.items():
        lines += textwrap.wrap(
            f"{name}" + (f" = {', '.join(others)}" if others else ""), 100, initial_indent="  ", subsequent_indent="      "
        )
    return "\n".join(lines)


def list_mistakes() -> str:
    out = []
    for name, mistake in CATALOGUE.items():
        out += [
            name,
            *textwrap.wrap(mistake.what, 110, initial_indent="    ", subsequent_indent="    "),
            *textwrap.wrap(f"change: {mistake.advice}", 110, initial_indent="    ", subsequent_indent="      "),
        ]
    out += ["", "Not mistakes"]
    for name, text in NOTES.items():
        out += [name, *textwrap.wrap(text, 110, initial_indent="    ", subsequent_indent="    ")]
    return "\n".join(out)


def build_parser() -> rl_lab.LabParser:
    parser = rl_lab.LabParser(
        prog="python -m extensions.audit",
        description="Recompute one recorded batch of a trainer: which advantage rule, objective, reduction and KL it "
        "follows, whether the gradient agrees, and which known mistakes are in it.",
        epilog=f"formats: {', '.join(SUFFIXES)} (.npz without pickles, .pt weights only, .jsonl one response a line)\n\n"
        f"names (each with the other names that are accepted; N rows, T tokens):\n{names_table()}\n\n"
        "example:\n  python -m extensions.audit extensions/captures/trl_grpo_grpo_pass2.npz --declared grpo@trl-1.16.0",
    )
    parser.add_argument("batch", nargs="?", type=Path, metavar="BATCH", help="the recorded batch")
    parser.add_argument(
        "--declared", metavar="ROW", help="the row the trainer is said to follow; differences become findings"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="a number that was not recorded (beta, clip_high, accumulation_steps, budget, ...), or a field of the declared "
        "row; repeatable",
    )
    parser.add_argument(
        "--fail-on",
        choices=("mistake", "warning", "never"),
        default="mistake",
        help="exit 1 for a finding of this severity or above; default mistake",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--list", action="store_true", help="print every mistake it knows, and what is none")
    parser.add_argument(
        "--self-test", action="store_true", help="plant each mistake into each shipped capture and print what was named"
    )
    parser.add_argument(
        "--damaged", type=int, metavar="N", help="with --self-test: N damaged, random or hostile files instead"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.list:
        print(list_mistakes())
        return
    if arguments.damaged is not None and (not arguments.self_test or arguments.damaged < 1):
        parser.error(f"argument --damaged: got {arguments.damaged}, wanted a number above 0, with --self-test")
    if arguments.self_test:
        from extensions import audit_selftest

        is_good = audit_selftest.run_damaged(arguments.damaged) if arguments.damaged else audit_selftest.run(arguments.json)
        sys.exit(0 if is_good else 1)
    if arguments.batch is None:
        parser.error("the following arguments are required: BATCH (a recorded batch), or --list or --self-test")
    try:
        declared, numbers = parse_declared(arguments.declared, arguments.settings)
    except ValueError as problem:
        parser.error(str(problem))
    try:
        if arguments.json is not None:
            rl_lab.check_writable([arguments.json], expected_bytes=20_000)
        recording = read_recording(arguments.batch)
        if declared is not None and declared.is_pairs != audit_preferences.is_preference(recording):
            kind = "pairs" if declared.is_pairs else "rollouts"
            parser.error(
                f"argument --declared: {arguments.declared} is a row for {kind}, and {arguments.batch} holds the other kind"
            )
        report = audit(recording, declared, numbers)
        if arguments.json is not None:
            rl_lab.replace_files({arguments.json: rl_lab.json_text(report.as_json())})
    except rl_lab.FileProblem as problem:
        parser.exit(2, f"{parser.prog}: error: {problem}\n")
    except (ValueError, TypeError, IndexError, KeyError, RuntimeError, ArithmeticError) as problem:
        # What no check has foreseen still ends in one line: the arrays came from outside.
        short = " ".join(str(problem).split())[:200]
        parser.exit(2, f"{parser.prog}: error: {arguments.batch}: its arrays do not fit together ({short})\n")
    except MemoryError:
        parser.exit(2, f"{parser.prog}: error: {arguments.batch}: does not fit into memory\n")
    print(printed(report, str(arguments.batch)))
    worst = report.worst()
    if arguments.fail_on != "never" and worst is not None and SEVERITIES.index(worst) >= SEVERITIES.index(arguments.fail_on):
        sys.stdout.flush()
        sys.exit(1)


if __name__ == "__main__":
    rl_lab.run_command(main)
