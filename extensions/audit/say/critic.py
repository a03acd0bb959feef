"""The loss of a critic that was recorded alone."""

from __future__ import annotations


import numpy as np
import torch

from extensions.audit.catalogue import CATALOGUE, finding
from extensions.audit.read.recording import Recording
from extensions.audit.say.report import DECIDES_LOSS, MOST_MATCHES, Report, match_json, tie_lines, tied
from extensions.audit.search.digest import Target
from extensions.audit.search.forms import Form, Spec, build_batch
from extensions.audit.search.loss import VALUE_COEFS, value_forms
from extensions.audit.search.match import LOSS_DEFAULTS, LossResult
from extensions.audit.search.screen import Screen


def say_value_loss(recording: Recording, report: Report) -> None:
    lines = report.lines.setdefault("loss", [])
    if "returns" not in recording.arrays or ("loss" not in recording.numbers and "dloss_dvpreds" not in recording.arrays):
        report.missing.append("returns, values, vpreds, loss and dloss_dvpreds")
        lines.append("not checked: the critic's loss needs vpreds, returns and the loss")
        return
    mask = torch.as_tensor(recording.arrays["mask"])
    gradient = recording.get("dloss_dvpreds")
    target = Target(
        recording.number("loss"), None if gradient is None else torch.as_tensor(gradient), recording.eps
    )
    batch = build_batch(recording, advantages=np.ones(len(mask)))
    result = LossResult()
    report.gradient["recorded"] = gradient is not None
    screen = Screen(recording, batch, target, result)

    def spec(fields: dict, coef: float, value, slope, mistake) -> Spec:
        made = Form(-coef * torch.where(mask, value, 0.0), -coef * torch.where(mask, slope, 0.0))
        return Spec({**fields, "value_coef": coef}, mistake, lambda _: made)

    tried = [
        spec(fields, coef, value, slope, mistake)
        for fields, value, slope, mistake in value_forms(recording, mask)
        for coef in VALUE_COEFS
    ]
    screen.try_forms(screen.digest(tried), kl="none")
    result.matches.sort(key=lambda m: m.order)
    strong = [m for m in result.matches if not m.weak]
    result.matches = strong or result.matches
    if result.matches:
        result.mistakes = []
    result.mistakes.sort(key=lambda m: m.order)
    report.loss = {
        "matches": [match_json(m) for m in result.matches[:MOST_MATCHES]],
        "tried": result.tried,
        "reported": recording.number("loss"),
    }
    if result.matches:
        best = result.matches[0]
        lines.append(best.label())
        report.gradient["agrees"] = True if best.residual is not None else None
        decide = tie_lines([m.fields for m in tied(result.matches)], DECIDES_LOSS, LOSS_DEFAULTS)
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
