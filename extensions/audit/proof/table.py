"""How good the audit is: plant every mistake into every shipped capture, and throw damaged files at the reader.

    python -m extensions.audit --self-test                     the table: mistake by mistake, how often it was named
    python -m extensions.audit --self-test --damaged 10000     truncated, random, wrong and hostile files

A planted batch is a capture whose reported numbers were computed again by `naive_loss`, with the mistake in it. naive_loss
shares nothing with the audit or with objectives.py: it is the loss as a trainer writes it, in float32, and its gradient is
autograd's. That the right version of naive_loss reproduces the recorded loss and gradient of each capture is a test.

A row of the table counts the planted batches in which the mistake changes a number. Named: the audit has a finding of that
name; wrong: it has none as severe, and another name as a mistake. Each batch is audited with the gradient and with loss and
advantages only, with the right row declared and (in a second pair of columns) without. A mistake that is a right choice
elsewhere (a sum for a mean, ddof 1 for 0) can only be one against a declaration, so without one it is not counted.
"""

from __future__ import annotations

import math
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Iterator

import rl_lab
from extensions.audit.declared import Declared
from extensions.audit.proof.plant_advantages import advantage_plants
from extensions.audit.proof.plant_loss import Planted, loss_plants
from extensions.audit.proof.plant_others import other_plants
from extensions.audit.proof.plant_pairs import pair_plants
from extensions.audit.proof.plant_time import time_plants
from extensions.audit.proof.truth import CAPTURES, Truth, load, manifest, truth_of
from extensions.audit.read.recording import read_recording, recording_from
from extensions.audit.run import audit
from extensions.audit.say.report import Report

PLANTERS: tuple[Callable, ...] = (loss_plants, advantage_plants, time_plants, pair_plants, other_plants)


def all_plants(files: Callable[[str], bool] = lambda file: True) -> Iterator[Planted]:
    for entry in manifest():
        if files(entry["file"]):
            arrays = load(entry["file"])
            for planter in PLANTERS:
                yield from planter(entry, arrays)


# ------------------------------------------------------------------------------------------ judging


GRADIENTS = (
    "dloss_dlogps",
    "dloss_dvpreds",
    "dloss_dentropies",
    "dloss_dchosen_logps",
    "dloss_drejected_logps",
    "dloss_dloss_mat",
    "backward_dlogps",
    "dloss_dseq_logps",
    "dkl_dlogps",
)


def judge(planted: Planted, with_gradient: bool, with_declared: bool) -> tuple[bool, bool, Report]:
    """(named, a wrong name with more confidence, the report)."""
    arrays = planted.arrays if with_gradient else {k: v for k, v in planted.arrays.items() if k not in GRADIENTS}
    recording = recording_from(arrays)
    report = audit(recording, planted.declared if with_declared else None, dict(planted.numbers) if with_declared else None)
    rank = {"note": 0, "warning": 1, "mistake": 2}
    accepted = planted.accepted + (("divided_by_whole_number",) if planted.mistake == "extra_division" else ())
    own = max((rank[f.severity] for f in report.findings if f.name in accepted), default=-1)
    others = [f for f in report.findings if f.name not in accepted and f.name not in ("not_reproduced", "declared_not_seen")]
    other = max((rank[f.severity] for f in others), default=-1)
    return own >= 0, other == 2 and other > own, report


def clean_problem(entry: dict, arrays: dict, report: Report, numbers_given: bool) -> str | None:
    """What is wrong with the report on a clean capture: a mistake, or the right convention not named. None if nothing is."""
    mistakes = [f.name for f in report.findings if f.severity == "mistake"]
    if "done_only" in entry["file"]:
        # torchrl was handed one flag for two, which is the mistake itself.
        return None if mistakes == ["one_flag_for_two"] else f"findings {mistakes}, wanted one_flag_for_two"
    if mistakes:
        return f"mistakes reported: {mistakes}"
    t = truth_of(entry, arrays)
    if t is not None:
        return _loss_problem(t, report)
    if entry["kind"] == "advantage" and not report.advantages.get("matches"):
        return "no advantage rule found"
    if entry["kind"] == "gae" and not report.advantages.get("matches"):
        return "no rule found"
    if entry["kind"] in ("dpo", "kto"):
        wanted = {"sigmoid": "dpo", "exo_pair": "exo", "bco_pair": "bco", "kto": "kto"}
        config = entry["config_effective"]
        loss = config["loss_type"]
        loss = loss if isinstance(loss, str) else loss[0] if len(loss) == 1 else "dpo_sft"
        name = wanted.get(loss, loss)
        name = {"forward_kl": "dpo_forward_kl", "js_divergence": "dpo_js"}.get(config.get("f_divergence_type"), name)
        name = "ld_dpo" if config.get("ld_alpha") else name
        best = [m for m in report.loss["matches"] if m["by"] == report.loss["matches"][0]["by"]]
        return None if any(name in m["rows"] for m in best) else f"{name} not among {[m['in_words'] for m in best][:3]}"
    if entry["kind"] == "kl":
        return (
            None
            if any(line.startswith("kl: ") and "none" not in line for line in report.lines.get("metrics", []))
            else "kl not named"
        )
    if entry["kind"] in ("policy_loss", "reduction", "value_loss", "ppo") and entry["config"].get("loss_mode") not in (
        "clip_cov",
    ):
        return None if report.loss.get("matches") else "no loss rule found"
    return None


def _loss_problem(t: Truth, report: Report) -> str | None:
    matches = report.loss.get("matches", [])
    wanted = t.fields()
    best = [m for m in matches if m["by"] == matches[0]["by"]]
    best += [m for m in report.loss.get("with_a_mistake", []) if "divided_by_whole_number" in report.named()]
    for m in best:
        got = {"kl": "none", "off_policy_rows": "keep", **m}
        same = all(
            got.get(k) == v
            or isinstance(v, float)
            and isinstance(got.get(k), (int, float))
            and math.isclose(got[k], v, rel_tol=1e-3)
            for k, v in wanted.items()
            if k not in ("reduction", "off_policy_rows")
        )
        if {got.get("ratio"), wanted.get("ratio")} == {"sequence_mean", "sequence_mean_token"}:
            same = all(got.get(k) == v for k, v in wanted.items() if k in ("kl", "surrogate", "clip_low", "clip_high"))
        same &= t.off_policy is None or got["off_policy_rows"] == "drop"
        reductions = {wanted["reduction"]}
        if wanted["reduction"] == "mean_over_window":
            reductions.add("mean_over_tokens")
        if wanted["reduction"] == "sum_over_budget":
            reductions |= {"sum_over_width"}
        same &= (
            m.get("reduction") in reductions
            or m.get("reduction") == "mean_per_response"
            and report.batch.get("width") == 1
            or (report.batch.get("width") == 1)
        )
        factor = m["factor"] * (t.accumulation if t.divides and m.get("accumulation") != "divide" else 1)
        if m.get("budget") and t.budget and not math.isclose(m["budget"], t.budget):
            factor *= t.budget / m["budget"]
        if same and math.isclose(factor, 1, rel_tol=1e-3):
            return None
    return f"{wanted} not among {[m['in_words'] for m in best][:3]}"


# ------------------------------------------------------------------------------------------ the table


@dataclass
class Score:
    planted: dict[str, int] = field(default_factory=dict)
    named: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)


COLUMNS = (
    ("gradient", True, True),
    ("loss only", False, True),
    ("gradient, undeclared", True, False),
    ("loss only, undeclared", False, False),
)


def measure(plants: Iterator[Planted], columns=COLUMNS, progress: bool = False) -> dict[str, dict[str, Score]]:
    """{column: {mistake: Score}} over planted batches."""
    table: dict[str, dict[str, Score]] = {title: {} for title, _, _ in columns}
    for count, planted in enumerate(plants):
        if progress and sys.stderr.isatty() and count % 10 == 0:
            print(
                f"\r{count} planted batches, now {planted.capture} {planted.mistake}        ",
                end="",
                file=sys.stderr,
                flush=True,
            )
        for title, with_gradient, with_declared in columns:
            if not with_declared and planted.needs_declared:
                continue
            if not with_gradient and not planted.changed_value:
                continue
            score = table[title].setdefault(planted.mistake, Score())
            score.planted[planted.capture] = score.planted.get(planted.capture, 0) + 1
            try:
                named, wrong, report = judge(planted, with_gradient, with_declared)
            except Exception as problem:  # counted as a failure, and the rest of the table is still worth something
                score.wrong.append(f"{planted.capture}: ended in {type(problem).__name__}: {problem}")
                continue
            score.named[planted.capture] = score.named.get(planted.capture, 0) + named
            if wrong:
                score.wrong.append(
                    f"{planted.capture}: {', '.join(f.name for f in report.findings if f.severity == 'mistake')}"
                )
            elif not named:
                score.missed.append(planted.capture)
    return table


def totals(scores: dict[str, Score]) -> tuple[int, int, int]:
    """(planted, named, named wrongly with more confidence)."""
    return (
        sum(sum(s.planted.values()) for s in scores.values()),
        sum(sum(s.named.values()) for s in scores.values()),
        sum(len(s.wrong) for s in scores.values()),
    )


def table_text(table: dict[str, dict[str, Score]]) -> str:
    names = list(dict.fromkeys(name for scores in table.values() for name in scores))
    rows = []
    for name in names:
        cells = []
        for scores in table.values():
            s = scores.get(name)
            cells.append(
                "-"
                if s is None
                else f"{sum(s.named.values())}/{sum(s.planted.values())}" + (f" ({len(s.wrong)} wrong)" if s.wrong else "")
            )
        rows.append([name, *cells])
    last = ["all"]
    for scores in table.values():
        planted, named, wrong = totals(scores)
        last.append(f"{named}/{planted} = {100 * named / max(planted, 1):.1f} %, {wrong} wrong")
    return rl_lab.format_table(["mistake planted", *table], [*rows, last])


def clean_report() -> list[tuple[str, str, str]]:
    """(capture, how, what is wrong) for every clean capture that is not read right: bare, and with its configuration set."""
    problems = []
    for entry in manifest():
        arrays = load(entry["file"])
        t = truth_of(entry, arrays)
        runs: list[tuple[str, Declared | None, dict | None]] = [("bare", None, None)]
        if t is not None:
            runs.append(("declared", t.declared(), t.numbers()))
        for how, declared, numbers in runs:
            try:
                report = audit(read_recording(CAPTURES / entry["file"]), declared, numbers)
            except rl_lab.FileProblem as problem:
                problems.append((entry["file"], how, str(problem)))
                continue
            problem = clean_problem(entry, arrays, report, numbers is not None)
            if problem:
                problems.append((entry["file"], how, problem))
    return problems


def run(json_path: Path | None = None) -> bool:
    """Print the table; True if every bar is met."""
    problems = clean_report()
    entries = manifest()
    print(
        f"{len(entries)} clean captures, audited bare and (policy losses) with their configuration declared:"
        f" {len(problems)} read wrongly" + (":" if problems else "")
    )
    for file, how, problem in problems:
        print(f"  {file} ({how}): {problem}")
    table = measure(all_plants(), progress=True)
    print("\nPlanted mistakes, named / planted:")
    print(table_text(table))
    wrong = sum(totals(scores)[2] for scores in table.values())
    for title, scores in table.items():
        for name, score in scores.items():
            if score.wrong:
                print(f"wrong name with more confidence, {title}, {name}: {'; '.join(score.wrong[:4])}")
    for title, scores in table.items():
        missed = [
            f"{name} in {', '.join(score.missed[:3])}"
            + (f" and {len(score.missed) - 3} more" if len(score.missed) > 3 else "")
            for name, score in scores.items()
            if score.missed
        ]
        if missed:
            print("\n".join(textwrap.wrap(f"not named, {title}: {'; '.join(missed)}", 120, subsequent_indent="    ")))
    (with_gradient, named_gradient, _), (with_loss, named_loss, _) = (totals(table[t]) for t in ("gradient", "loss only"))
    is_good = (
        not problems
        and named_gradient >= 0.95 * with_gradient
        and named_loss >= 0.8 * with_loss
        and not wrong
    )
    print(
        f"\nBars: 95 % with the gradient ({100 * named_gradient / with_gradient:.1f} %), 80 % with loss and advantages only "
        f"({100 * named_loss / with_loss:.1f} %), no wrong name with more confidence in any column ({wrong}): "
        f"{'met' if is_good else 'NOT met'}"
    )
    if json_path is not None:
        document = {
            "clean_problems": [list(p) for p in problems],
            **{
                title: [
                    {"mistake": n, "planted": sum(s.planted.values()), "named": sum(s.named.values()), "wrong": s.wrong}
                    for n, s in scores.items()
                ]
                for title, scores in table.items()
            },
        }
        rl_lab.replace_files({json_path: rl_lab.json_text(document)})
    return is_good
