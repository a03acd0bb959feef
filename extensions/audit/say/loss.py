"""From the search for a loss to words and findings: a plain match, a mistake, a tie of both, or nothing."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from extensions.audit.catalogue import CATALOGUE, Finding, finding
from extensions.audit.checks.healthy import not_mistakes
from extensions.audit.declared import Declared
from extensions.audit.read.recording import Recording
from extensions.audit.say.report import (
    DECIDES_LOSS,
    MOST_MATCHES,
    Report,
    cannot_tell_from,
    listed,
    match_json,
    row_names,
    tie_lines,
    tied,
)
from extensions.audit.search.forms import build_batch
from extensions.audit.read.masks import mask_edits
from extensions.audit.search.match import LOSS_DEFAULTS, LossResult, Match, against, rows_with
from extensions.audit.search.rules import AdvantageResult
from extensions.audit.tolerance import GRADIENT, SETTING, SHOWN
from extensions.objectives import Row, evaluate

NEAR = 0.1
"""A nearest fit further off than this share of the gradient says nothing, and is not printed."""
UNSURE = 0.2
NOISE = 10.0
"""Expected accidental matches above which a match by value alone is a warning, not a mistake; and no finding at all."""

_FIRST_PASS = (
    ("ratio", "surrogate", "clip_low", "clip_high", "ratio_cap"),
    "every ratio is 1",
    "a batch of a later pass, with dloss_dlogps",
)
_ONE_TOKEN = (("ratio", "reduction"), "every answer is one token long", "answers of several tokens, of unequal length")
"""Choices that whole kinds of batches cannot tell apart, why, and the recording that would."""


@dataclass
class LossVerdict:
    """One search result on its way into one report. wanted: the declared choices in the words of a match, if any."""

    recording: Recording
    declared: Declared | None
    wanted: dict | None
    advantages: AdvantageResult
    result: LossResult
    report: Report

    def __post_init__(self):
        self.lines = self.report.lines.setdefault("loss", [])
        self.has_gradient = any(name in self.recording.arrays for name in ("dloss_dlogps", "dloss_dloss_mat"))
        self.loss = self.recording.number("loss")
        # With the value alone to judge by, what fits may fit by accident.
        self.unsure = not self.has_gradient and self.result.chance > UNSURE
        self.tried = f"{self.result.tried} hypotheses tried"
        if not self.has_gradient:
            self.tried += f"; {self.result.chance:.2g} expected by accident"

    def say(self) -> None:
        """Fill report.loss, report.gradient, the lines and the findings."""
        report, result, wanted = self.report, self.result, self.wanted
        report.remarks += result.remarks
        report.missing += result.missing
        matches, mistakes = result.matches, result.mistakes
        if wanted is not None:  # what was declared comes first among equals
            matches = sorted(matches, key=lambda m: (bool(against(m.fields, wanted)), m.order))
        report.loss = {
            "matches": [match_json(m) for m in matches[:MOST_MATCHES]],
            "tied": len(tied(matches)),
            "with_a_mistake": [match_json(m) for m in mistakes[:MOST_MATCHES]],
            "tried": result.tried,
            "expected_by_accident": result.chance,
            "reported": self.loss,
        }
        report.gradient = {"agrees": None, "recorded": self.has_gradient}
        if not self.has_gradient:
            report.missing.append("dloss_dlogps: torch.autograd.grad(loss, logps, retain_graph=True)")
        near = [m for m in mistakes if wanted is not None and not against(m.fields, wanted)]
        plain = matches if wanted is None else [m for m in matches if not against(m.fields, wanted)]

        if plain and (not all(m.weak for m in plain) or not mistakes or wanted is not None and not near):
            self.say_match(plain)
        elif near or mistakes and not matches:
            self.say_mistakes(near or mistakes)
            self.say_other_convention(matches, (near or mistakes)[0])
        elif matches and wanted is None:
            self.say_match(matches)
            self.say_rival_mistakes(matches[0], tied(mistakes))
        elif matches:
            self.say_match(matches)
            self.say_declared_differs(tied(matches))
        else:
            self.say_nothing()
        self.lines.append(self.tried)
        if not self.has_gradient and matches and result.chance > 0.5:
            self.cannot_tell(
                f"the value alone is weak here: {result.chance:.2g} matches are expected by accident. dloss_dlogps would "
                "decide"
            )
        report.findings += not_mistakes(self.recording, result, self.has_gradient)

    def cannot_tell(self, line: str) -> None:
        self.lines.append(line)
        self.report.cannot_tell.append(f"loss: {line.strip()}")

    def blame(self, found: Finding) -> None:
        """Add a finding, unless the value alone fits so many hypotheses that naming one would be an accident."""
        if not self.has_gradient and self.result.chance > NOISE:
            evidence = f"Loss: {self.tried}; one of those that fit would be {found.name}."
            found = finding("value_decides_nothing", "warning", evidence)
        self.report.findings.append(found)

    def say_best(self, best: Match, title: str) -> None:
        self.lines.append(title)
        self.lines += [f"  ({remark})" for remark in best.remarks]
        if best.gap is not None:
            self.lines.append(f"reported {self.loss:.6g}, recomputed within {abs(best.gap):.1e}")

    # ---- without a mistake

    def say_match(self, matches: list[Match]) -> None:
        best, same = matches[0], tied(matches)
        rows = dict.fromkeys(name for m in same for name in rows_with(m.fields))
        self.say_best(best, f"{best.label()}{row_names(list(rows))}")
        if best.weak:  # a denominator was solved
            solved = ("budget (max_completion_length)" if "budget" in m.fields else "num_items_in_batch" for m in same)
            self.report.missing += dict.fromkeys(solved)
        if self.result.zero:
            self.lines.append("the reported loss is 0 within rounding: its value decides nothing")
        self.say_ties(same)
        if best.residual is not None:
            self.say_gradient(best)
        self.confirm(best)
        self.report.findings += self.choice_findings(same)

    def say_ties(self, same: list[Match]) -> None:
        """The choices in which equally good matches differ, and what would decide each."""
        ties, left = [], dict(DECIDES_LOSS)
        batch = self.report.batch
        for is_so, (names, why, decider) in (
            (batch.get("largest_log_ratio") == 0, _FIRST_PASS),
            (batch.get("longest") == 1, _ONE_TOKEN),
        ):
            differ = [name for name in names if name in left and len({str(m.fields.get(name)) for m in same}) > 1]
            if is_so and differ:
                left = {name: text for name, text in left.items() if name not in names}
                ties.append(f"cannot tell {listed(differ)}: {why}. To decide, record {decider}")
        ties += tie_lines([m.fields for m in same], left, LOSS_DEFAULTS)
        if ties:
            self.lines.append(f"{len(same)} combinations give the same number on this batch:")
            for line in ties:
                self.cannot_tell(f"  {line}")

    def say_gradient(self, best: Match) -> None:
        agrees = best.by == "gradient and value" or self.loss is None
        self.report.gradient |= {"agrees": agrees, "residual": best.residual}
        if not agrees:
            self.report.gradient["differs"] = "agrees with the best match, whose value is not the reported one"
        if agrees or best.gap is None:
            return
        expected = self.loss - best.gap
        evidence = f"{best.label()} has the recorded gradient within {best.residual:.1e}"
        evidence += f"; its value differs by {best.gap:.6g}."
        times = self.loss / expected if abs(expected) > 1e-12 else math.nan
        if abs(times - round(times, 0)) < SHOWN:
            evidence += f" Reported is {times:.6g} times the value that the gradient belongs to."
        self.report.findings.append(finding("gradient_value_disagree", "warning", evidence))

    def confirm(self, best: Match) -> None:
        """The best match once more, as one Row through objectives.evaluate, on every row of the batch."""
        made = recomputed(self.recording, best)
        if made is None:
            return
        text = f"through the engine: loss {best.factor * made.loss.item():.6g}"
        gradient = self.recording.get("dloss_dlogps")
        if gradient is not None and np.isfinite(gradient).all():
            off = best.factor * made.dloss_dlogps - torch.as_tensor(gradient)
            off = torch.where(on_a_clip_edge(self.recording, best.fields), 0.0, off)
            size = max(float(np.linalg.norm(gradient)), 1e-30)
            whole = float(off.norm()) / size
            text += f", gradient within {whole:.1e} of its size"
            if best.residual is not None and whole > 10 * max(best.residual, GRADIENT, self.recording.eps):
                # The search compares the gradient on some rows of a large batch: these were not among them.
                rows = np.flatnonzero(off.norm(dim=1) > 1e-4 * size / math.sqrt(len(off)))
                differs = "agrees with the best match in most rows, and not in those below"
                self.report.gradient |= {"agrees": False, "residual": whole, "differs": differs}
                evidence = f"{best.label()} fits the value, and the gradient of most rows; the whole is {whole:.1e} off."
                self.report.findings.append(finding("gradient_differs_in_rows", "warning", evidence, rows))
        self.lines.append(text)

    def choice_findings(self, same: list[Match]) -> list[Finding]:
        """What a plain match says on its own: a choice that is known to do no good, or that deserves a word."""
        best, found = same[0], []
        f = best.fields

        def every(**choices) -> bool:
            return all(m.fields.get(name, LOSS_DEFAULTS.get(name)) == value for m in same for name, value in choices.items())

        if every(kl="k1", kl_weight="none", kl_gradient="own"):
            found.append(finding("kl_estimator_gradient", "mistake", f"The loss holds {f['kl_coef']:g} times k1."))
        elif every(kl="k3", kl_weight="none", kl_gradient="own"):
            found.append(finding("k3_gradient", "note", f"The loss holds {f['kl_coef']:g} times k3."))
        if every(accumulation="divide"):
            steps = self.recording.number("accumulation_steps")
            evidence = f"Divided by {steps:g} accumulation steps, as recorded."
            found.append(finding("divided_by_whole_number", "note", evidence))
        if all(m.fields.get("surrogate") in ("clip", "dual_clip") and _is_lower_bound_wrong(m.fields) for m in same):
            evidence = f"Lower bound {1 - f['clip_low']:g} with an upper width of {f['clip_high']:g}."
            found.append(finding("clip_lower_bound_wrong", "warning", evidence))
        if self.declared is not None:
            return found
        # Without a declaration: what is right for one trainer and a mistake in another.
        rule = self.advantages.matches[0].fields.get("baseline") if self.advantages.matches else None
        if every(ratio="sequence_product") and rule != "leave_one_out" and f.get("surrogate") == "clip":
            evidence = f"{best.label()}; right for RLOO, not for GSPO."
            found.append(finding("sequence_sum_for_mean", "warning", evidence))
        if every(reduction="sum_over_width"):
            evidence = (
                f"The denominator is the padded width, {self.report.batch['width']}: verl's seq-mean-token-sum-norm does "
                "this by default, a mean over padded slots does it by mistake."
            )
            found.append(finding("padding_in_denominator", "warning", evidence))
        if not (best.weak or f.get("token_losses") or any(rows_with(m.fields) for m in same)):
            found.append(finding("unnamed_combination", "note", best.label() + "."))
        return found

    # ---- against a declaration

    def say_declared_differs(self, same: list[Match]) -> None:
        """One finding for each declared choice that none of the tied matches makes."""
        match = same[0]
        differs = against(match.fields, self.wanted)
        shared = set.intersection(*(set(against(m.fields, self.wanted)) for m in same))
        names = [name for name in differs if name in shared] or differs
        severity, done = "warning" if self.unsure else "mistake", set()
        for name in names:
            key = _declared_finding(name, names, same, self.wanted)
            if key is None or key in done or key in self.report.named():
                continue
            done.add(key)
            got = {**LOSS_DEFAULTS, **match.fields}.get(name)
            evidence = (
                f"Declared {name.replace('_', ' ')} {self.wanted[name]}, reproduced with "
                f"{'nothing' if got is None else got}: {match.label()}."
            )
            self.blame(finding(key, severity, evidence))

    def say_other_convention(self, matches: list[Match], mistake: Match) -> None:
        """A plain match that contradicts the declaration, and fits as well as the mistake does."""
        other = next((m for m in matches if not m.weak and m.by == mistake.by), None)
        if other is not None and self.wanted is not None and other.order[3] <= mistake.order[3]:
            self.cannot_tell(f"or another convention than declared: {other.label()}")
            self.say_declared_differs([other])

    # ---- with a mistake

    def say_mistakes(self, mistakes: list[Match]) -> None:
        best = mistakes[0]
        same = tied(mistakes)
        names = list(dict.fromkeys(name for m in same for name in m.mistakes))
        self.say_best(best, f"{best.label()}, with a mistake: {CATALOGUE[best.mistakes[0]].what}")
        if self.has_gradient:
            self.report.gradient |= {"agrees": False, "residual": best.residual}
        if len(names) > 1:
            self.cannot_tell(f"cannot tell which mistake: {', '.join(names)}")
        for line in tie_lines([m.fields for m in same], DECIDES_LOSS, LOSS_DEFAULTS):
            self.cannot_tell(f"  {line}")
        for name in names:
            match = next(m for m in same if name in m.mistakes)
            self.blame(self.mistake_finding(name, match, names))

    def mistake_finding(self, name: str, match: Match, names: list[str]) -> Finding:
        key, severity, advice = name, "warning" if self.unsure else "mistake", None
        numbers, undeclared = self.recording.numbers, self.declared is None
        if name == "beta_twice" and undeclared and "beta" not in numbers:
            severity, advice = "warning", "record beta"
        if name == "extra_division" and undeclared and "accumulation_steps" not in numbers:
            if match.fields.get("reduction") != "mean_over_window":
                # Trainers that divide a micro-batch's mean by the accumulation steps are right to do so.
                key, severity = "divided_by_whole_number", "warning"
                advice = "record accumulation_steps (and world_size): right if it is by these steps, and only once"
        how = "value alone, no gradient recorded"
        if match.residual is not None:
            how = f"gradient within {match.residual:.1e}"
        if match.by == "gradient" and self.loss is not None:
            severity = "warning"  # one of the two numbers contradicts it
            how += f"; the value does not fit, it differs by {match.gap:.4g}"
        parts = [f"With it, {match.label()} gives what was reported ({how})", *match.remarks]
        evidence = "; ".join(parts) + "."
        evidence += cannot_tell_from(name, names)
        if self.unsure:
            evidence += f" {self.result.chance:.2g} matches are expected by accident."
        return finding(key, severity, evidence, _rows_of_edit(self.recording, name), advice)

    def say_rival_mistakes(self, best: Match, mistakes: list[Match]) -> None:
        """A solved denominator and a mistake (mostly a division too many) explain the same number."""
        for m in {m.mistakes: m for m in reversed(mistakes)}.values():
            self.cannot_tell(f"cannot tell it from: {m.label()}, with a mistake: {CATALOGUE[m.mistakes[0]].what}")
            why = f" ({'; '.join(m.remarks)})" if m.remarks else ""
            self.blame(
                finding(
                    "divided_by_whole_number" if m.mistakes == ("extra_division",) else m.mistakes[0],
                    "warning",
                    f"Either {best.label()}, or {m.label()}{why}; this recording cannot tell which.",
                    advice="record num_items_in_batch, budget (max_completion_length), accumulation_steps",
                )
            )

    # ---- nothing fits

    def say_nothing(self) -> None:
        result, findings = self.result, self.report.findings
        self.lines.append("none of the hypotheses gives what was reported")
        if result.proportional is not None:
            m = result.proportional
            self.lines.append(f"gradient proportional to: {m.label()}")
            findings.append(finding("unexplained_factor", "warning", f"{m.label()}, within {m.residual:.1e}; {self.tried}."))
            return
        if result.proportional_mistake is not None:
            self.say_mistake_times_a_factor(result.proportional_mistake)
            return
        evidence = f"Loss: {self.tried}."
        if result.nearest is not None and result.nearest.residual <= NEAR:
            nearest = f"{result.nearest.label()}, {100 * result.nearest.residual:.1f} % off"
            self.lines.append(f"nearest gradient: {nearest}")
            evidence += f" Nearest gradient: {nearest}."
        if self.loss is not None or self.has_gradient:
            findings.append(finding("not_reproduced", "warning", evidence))
            if self.wanted is not None:  # a right trainer may do more than a row of the table can say
                evidence = f"Declared {self.declared.row.name}; {self.tried}."
                findings.append(finding("declared_not_seen", "warning", evidence))

    def say_mistake_times_a_factor(self, m: Match) -> None:
        """A form with a mistake gives gradient and value, times one number that nothing recorded explains."""
        what = f"gradient within {m.residual:.1e}" + (", and the value with it" if self.loss is not None else "")
        self.say_best(m, f"{m.label()}, with a mistake: {CATALOGUE[m.mistakes[0]].what}")
        self.report.gradient |= {"agrees": False, "residual": m.residual}
        for name in m.mistakes:
            evidence = f"With it, {m.label()} gives what was reported ({what}); no right form does at any factor."
            self.report.findings.append(finding(name, "mistake", evidence, _rows_of_edit(self.recording, name)))
        evidence = f"Beside that mistake the loss is multiplied by {m.factor:.6g}; {self.tried}."
        self.report.findings.append(finding("unexplained_factor", "warning", evidence))


def on_a_clip_edge(recording: Recording, fields: dict) -> torch.Tensor:
    """Tokens whose ratio lies on an edge of the clip to the rounding of the trainer's arithmetic: either branch is right."""
    old, new = (torch.as_tensor(recording.arrays[name]) for name in ("old_logps", "logps")) if "old_logps" in recording else (None, None)
    near = torch.zeros(recording.arrays["mask"].shape, dtype=torch.bool)
    if old is None or old.shape != near.shape:
        return near
    edges = [1 - fields.get("clip_low", math.inf), 1 + fields.get("clip_high", math.inf), fields.get("ratio_cap", math.inf)]
    size = 1 + torch.maximum(new.abs(), old.abs())
    for edge in edges:
        if 0 < edge < math.inf:
            near |= (new - old - math.log(edge)).abs() <= EDGE_ULPS * recording.eps * size
    return near


EDGE_ULPS = 4


def recomputed(recording: Recording, match: Match):
    """objectives.evaluate of the match as one Row on the whole batch; None where a Row cannot say it."""
    f, advantages = match.fields, recording.get("advantages")
    if f.get("token_losses") or match.mistakes or advantages is None:
        return None
    choices = {field.name: f[field.name] for field in dataclasses.fields(Row) if field.name in f}
    try:
        batch = build_batch(recording, advantages=advantages)
        changes = {name: f[name] for name in ("window_tokens", "budget") if name in f}
        if "global_batch_size" not in f:
            changes["window_rows"] = None
        if "value_loss" in f:
            for name in ("vpreds", "returns", "values"):
                if name in recording.arrays:
                    changes[name] = torch.where(batch.mask, torch.as_tensor(recording.arrays[name]), 0.0)
        return evaluate(Row("match", baseline="given", **choices), replace(batch, **changes))
    except (ValueError, TypeError):
        return None


def _is_lower_bound_wrong(fields: dict) -> bool:
    """The band [1 - low, 1 + high] is [eps, 1 + eps]."""
    return fields["clip_low"] >= 0.5 and abs(fields["clip_low"] + fields["clip_high"] - 1) < SETTING


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


def _declared_finding(name: str, names: list[str], same: list[Match], wanted: dict) -> str | None:
    """The mistake that a difference in this choice amounts to; None if another difference says it."""
    full = {**LOSS_DEFAULTS, **same[0].fields}
    got, expected = full.get(name), wanted[name]
    if name == "reduction":
        if got in ("sum_over_tokens", "sum_per_response") and expected.startswith("mean"):
            return "sum_for_mean"
        if any(m.fields.get("reduction") == "sum_over_width" for m in same):
            return "padding_in_denominator"
    elif name == "ratio" and got == "sequence_product":
        return "sequence_sum_for_mean"
    elif name in ("clip_low", "clip_high"):
        exchanged = (full.get("clip_low"), full.get("clip_high")) == (wanted.get("clip_high"), wanted.get("clip_low"))
        if exchanged and "clip_low" in names:
            return "clip_sides_swapped"
        if math.isinf(got):
            return "clip_one_sided"
    elif name == "kl" and got == "k1":
        return "kl_estimator_gradient"
    elif name == "kl_coef" and isinstance(expected, float) and expected and abs(got - expected**2) < SETTING * expected**2:
        return "beta_twice"
    elif name in ("kl_weight", "kl_gradient", "kl_coef") and "kl" in names:
        return None
    return _FIELD_FINDINGS.get(name, "declared_not_seen")


def _rows_of_edit(recording: Recording, name: str) -> list[int]:
    """Rows whose mask this mistake changes."""
    if "mask" not in recording.arrays:
        return []
    edit = mask_edits(recording).get(name)
    return [] if edit is None else np.flatnonzero((edit != recording.arrays["mask"]).any(1)).tolist()
