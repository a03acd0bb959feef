"""The report on a set of settings, as text and as JSON."""

from __future__ import annotations

import textwrap

from extensions.objectives import PREFERENCE_ROWS, ROWS, PreferenceRow, Row
from extensions.objectives.explain import active_fields
from extensions.settings.arithmetic import batch_words
from extensions.settings.meaning import Meaning, meaning
from extensions.settings.trainers import Settings
from extensions.settings.trap import compared
from extensions.settings.traps import Finding, findings_of

WIDTH = 80
PAPERS = tuple(name for name in (*ROWS, *PREFERENCE_ROWS) if "@" not in name)
# Step of the formula -> the fields that make it, in the order in which they are applied.
FORMULA = {
    "reward": ("group_filter", "overlong", "reward_parts", "reward_clip"),
    "advantage": ("baseline", "credit", "scale", "std_guard", "std_ddof", "std_eps", "gamma", "lam", "reward_limit"),
    "ratio": ("ratio", "log_ratio_min", "log_ratio_max", "sampler_correction", "sampler_bound", "sampler_high", "sampler_drop",
              "sampler_drop_level", "sampler_drop_high"),
    "surrogate": ("surrogate", "clip_low", "clip_high", "ratio_cap", "tau_positive", "tau_negative", "off_policy_rows",
                  "off_policy_threshold", "token_selection", "selected_share"),
    "KL": ("kl", "kl_coef", "kl_place", "kl_weight", "kl_gradient", "kl_limit"),
    "reduction": ("reduction", "kl_reduction", "rows_counted", "accumulation"),
    "critic": ("value_loss", "value_coef", "value_clip"),
    "entropy": ("entropy_coef",),
}  # fmt: skip
QUIET = {"group_filter": "none", "overlong": "none", "reward_parts": "sum_then_normalise", "credit": "outcome", "off_policy_rows": "keep",
         "kl_reduction": "same", "rows_counted": "all", "accumulation": "none", "kl_weight": "none", "kl_gradient": "own", "kl": "none",
         "value_loss": "none", "scale": "none"}  # fmt: skip
# Defaults worth saying when nobody wrote them.
MATTER = {
    "grpo": ("loss_type", "scale_rewards", "beta", "epsilon", "epsilon_high", "num_generations", "num_iterations", "max_completion_length",
             "per_device_train_batch_size", "learning_rate", "lr_scheduler_type", "temperature"),
    "rloo": ("beta", "epsilon", "num_generations", "num_iterations", "max_completion_length", "learning_rate"),
    "pairs": ("loss_type", "beta", "per_device_train_batch_size", "learning_rate", "max_length", "cpo_alpha"),
    "kto": ("beta", "desirable_weight", "undesirable_weight", "learning_rate"),
    "verl": ("algorithm.adv_estimator", "actor_rollout_ref.actor.loss_agg_mode", "actor_rollout_ref.actor.clip_ratio_low",
             "actor_rollout_ref.actor.clip_ratio_high", "actor_rollout_ref.actor.clip_ratio_c", "actor_rollout_ref.actor.use_kl_loss",
             "actor_rollout_ref.rollout.n", "algorithm.norm_adv_by_std_in_grpo", "algorithm.gamma", "algorithm.lam"),
    "openrlhf": ("algo.advantage.estimator", "algo.kl.init_coef", "reward.clip_range", "rollout.n_samples_per_prompt",
                 "actor.loss_agg_mode", "algo.advantage.lambd"),
    "openrlhf_dpo": ("model.beta", "model.label_smoothing", "adam.lr"),
    "sb3": ("n_steps", "batch_size", "n_epochs", "gamma", "gae_lambda", "clip_range", "target_kl", "normalize_advantage", "ent_coef"),
    "a2c": ("n_steps", "gamma", "gae_lambda", "normalize_advantage", "ent_coef"),
}  # fmt: skip


def formula(row: Row | PreferenceRow) -> dict[str, str]:
    """{step: its formula with the numbers of the row}, one notation for all trainers (letters: README.txt of objectives)."""
    fields = active_fields(row)
    if isinstance(row, PreferenceRow):
        return {name: text.split(": ", 1)[-1] for name, text in fields.items()}
    made = {}
    for step, names in FORMULA.items():
        parts = []
        for name in names:
            if name not in fields or str(getattr(row, name)) == QUIET.get(name):
                continue
            value = getattr(row, name)
            parts.append(fields[name].split(": ", 1)[-1] if isinstance(value, str) else f"{name} {value:g}")
        if parts and not (step == "KL" and not row.kl_coef):
            made[step] = "; ".join(parts)
    made.setdefault("KL", "none")
    return made


def unwritten(settings: Settings) -> dict[str, object]:
    """Defaults that matter and that nobody wrote."""
    return {key: settings.defaults[key] for key in MATTER[settings.trainer.method]
            if key in settings.defaults and not settings.has(key)}  # fmt: skip


def document(settings: Settings, against: tuple[str, Meaning] | None = None) -> dict:
    """What --json writes."""
    made, findings = meaning(settings), findings_of(settings)
    words = batch_words(settings)
    return {
        "trainer": settings.trainer.name,
        "version": settings.version,
        "row": None if made.row is None else made.row.name,
        "changed": {name: [_plain(a), _plain(b)] for name, (a, b) in made.changed.items()},
        "formula": {} if made.row is None else formula(made.row),
        "not_expressed": made.missing,
        "unwritten_defaults": {key: _plain(value) for key, value in unwritten(settings).items()},
        "batch": {key: _plain(value) for key, value in words.numbers.items()},
        "findings": [finding.as_json() | {"number": _numbers(finding)} for finding in findings],
        "against": None if against is None or made.row is None else {
            "name": against[0], "differences": differences(made, against[1])},
    }  # fmt: skip


def _plain(value: object) -> object:
    return str(value) if isinstance(value, float) and value in (float("inf"), float("-inf")) else value


def _numbers(finding: Finding) -> dict | None:
    return None if finding.number is None else {key: _plain(value) for key, value in finding.number.items()}


def differences(ours: Meaning, theirs: Meaning) -> dict[str, list]:
    """Field -> [ours, theirs], for fields that have an effect in one of the two rows."""
    if ours.row is None or theirs.row is None or type(ours.row) is not type(theirs.row):
        return {}
    mine, other = active_fields(ours.row), active_fields(theirs.row)
    return {
        name: [_plain(getattr(ours.row, name)), _plain(getattr(theirs.row, name))]
        for name in dict.fromkeys((*mine, *other))
        if getattr(ours.row, name) != getattr(theirs.row, name)
    }


def wrapped(text: str, first: str, later: str | None = None) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=" " * len(first) if later is None else later,
                         break_long_words=False, break_on_hyphens=False)  # fmt: skip


def text(settings: Settings, against: tuple[str, Meaning] | None = None) -> str:
    """The report for a reader."""
    made, words = meaning(settings), batch_words(settings)
    lines = [f"{settings.trainer.title}"]
    lines += [wrapped(note, "  note: ") for note in settings.found.notes]
    lines += [wrapped(f"{key} = {what}", "  not a constant, default taken: ") for key, what in settings.found.unreadable.items()]
    lines += [wrapped(f"{old} is read as {new}", "  ") for old, new in settings.renamed.items()]
    lines += ["", "Objective"]
    if made.row is None:
        lines.append(wrapped(f"The table of objectives has no row for this: {'; '.join(made.missing)}.", "  "))
    else:
        lines.append(f"  row        {made.row.name}" + ("" if not made.changed else ", with"))
        lines += [f"               {name} {new} instead of {old}" for name, (old, new) in made.changed.items()]
        lines += [wrapped(what, f"  {step:10s} ") for step, what in formula(made.row).items()]
        lines += [wrapped(f"not in the row: {what}", "  ") for what in made.missing]
    lines += ["", "Not written, and it matters"]
    lines += [f"  {key} = {value}" for key, value in unwritten(settings).items()] or ["  nothing: every setting that matters is written"]
    lines += ["", "Batch"] + [wrapped(line, "  ") for line in words.lines]
    lines += [wrapped(f"assumed: {what}.", "  ") for what in words.assumed]
    lines += ["", "Findings"]
    found = findings_of(settings)
    if not found:
        lines.append("  none")
    for finding in found:
        lines.append(f"  {finding.severity}: {finding.name}")
        lines.append(wrapped(finding.words, "    "))
        if finding.number_words:
            lines.append(wrapped(finding.number_words, "    number: "))
        lines.append(wrapped(finding.change, "    change: "))
        lines.append(wrapped(finding.source, "    source: "))
    if against is not None:
        lines += ["", *versus(made, against)]
    return "\n".join(lines)


def versus(made: Meaning, against: tuple[str, Meaning]) -> list[str]:
    name, other = against
    if made.row is None or other.row is None or type(made.row) is not type(other.row):
        return [f"Against {name}: the two read different data; compare like with like."]
    found = differences(made, other)
    lines = [f"Against {name} ({other.row.name})"]
    lines += [f"  {field}: {mine} here, {theirs} there" for field, (mine, theirs) in found.items()] or ["  no difference that acts"]
    return [*lines, wrapped("on the small batch: " + compared(made.row, other.row)[0].replace("as meant", name), "  ")]
