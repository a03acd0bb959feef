"""Tell an engineer what their trainer really computed: recompute one recorded batch and name the choices and the mistakes.

    python -m extensions.audit extensions/captures/trl_grpo_grpo_pass2.npz       a recorded batch of a real trainer
    python -m extensions.audit BATCH.npz --declared grpo@trl-1.16.0 --set clip_high=0.28 --set beta=0.04
    python -m extensions.audit BATCH.npz --json report.json --fail-on warning
    python -m extensions.audit --recipes                                        how to record such a file in TRL or verl
    python -m extensions.audit --list                                           every mistake it knows, with what to change
    python -m extensions.audit --self-test                                      plants each mistake into each shipped capture
    python -m extensions.audit --self-test --damaged 10000                      damaged and hostile files instead

The report says, in this order: the batch in words; which advantage rule gives the reported advantages; which objective,
reduction and KL give the reported loss; whether the gradient agrees; then findings. Where several choices give the same
number on this batch it says "cannot tell", lists them, and says which recording would decide. Exit status: 0 clean, 1 a
finding at or above --fail-on, 2 a file or usage error (so that 1 always means a finding).

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

From a file to a finding:

    audit_read.py          the file, safely: formats, the names trainers use, shapes
    audit_declared.py      what the user says the trainer follows: --declared, --set
    audit_forms.py         the forms a loss may take, and the named edits of each
    audit_search.py        which of them give the loss and the gradient
    audit_advantages.py    which rule gives the advantages
    audit_preferences.py   which preference loss gives the number
    audit_checks.py        checks without a search, and what only looks like a mistake
    audit_mistakes.py      the catalogue: every finding, its severity, what to change
    audit_say_*.py         from matches to words and findings: loss, advantages, pairs
    audit_report.py        the report as text and JSON
    this file              the order of it all, and the command line
    audit_selftest.py      how good it is: mistakes planted, files damaged

Same as objectives.py: every formula is taken from there. Left out: what its NOT_EXPRESSED lists, and combinations of two
mistakes at once.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Sequence

import numpy as np

import rl_lab
from extensions import audit_advantages, audit_checks, audit_preferences, audit_search
from extensions.audit_declared import Declared, parse_declared
from extensions.audit_mistakes import CATALOGUE, NOTES, SEVERITIES, Finding
from extensions.audit_read import ALIASES, SUFFIXES, Recording, check_numbers, read_recording
from extensions.audit_report import Report, printed
from extensions.audit_say_advantages import say_advantages, say_time
from extensions.audit_say_loss import LossVerdict, say_value_loss
from extensions.audit_say_pairs import say_pairs
from extensions.objectives import ROWS, Row



def audit(recording: Recording, declared: Declared | None = None, numbers: dict[str, float] | None = None) -> Report:
    """Recompute one recorded batch and say what it follows. Gradient: none. Raises rl_lab.FileProblem as read_recording."""
    recording.numbers |= numbers or {}
    check_numbers(recording.numbers)
    report = Report(remarks=list(recording.remarks))
    audit_checks.describe_batch(recording, report.batch, report.words)
    report.findings += audit_checks.input_findings(recording)
    with np.errstate(all="ignore"):
        if audit_preferences.is_preference(recording):
            say_pairs(recording, declared, report)
        elif audit_advantages.is_environment(recording):
            say_time(recording, report)
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


def _audit_rollout(recording: Recording, declared: Declared | None, report: Report) -> None:
    if "mask" not in recording.arrays:
        report.missing.append("logps, old_logps, mask (rows x tokens), advantages, loss and dloss_dlogps")
        report.lines["advantages"] = ["not checked: nothing to compute them from"]
        report.lines["loss"] = ["not checked: no per-token array"]
        return
    advantages = audit_advantages.search_advantages(recording)
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
    result = audit_search.search_loss(recording, A, declared=wanted)
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


# ------------------------------------------------------------------------------------------ command line


def names_table() -> str:
    """The names accepted for every array and number, for --help."""
    lines = []
    for name, others in ALIASES.items():
        lines += textwrap.wrap(
            f"{name}" + (f" = {', '.join(others)}" if others else ""), 100, initial_indent="  ", subsequent_indent="      "
        )
    return "\n".join(lines)


def recipes() -> str:
    """The recording recipes of this file's docstring."""
    text = __doc__ or ""
    return text[text.find("Recording recipes") : text.find("Same as objectives.py")].rstrip()


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
    parser.add_argument("--recipes", action="store_true", help="print the lines that record a batch in TRL or verl")
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
    if arguments.list or arguments.recipes:
        print(list_mistakes() if arguments.list else recipes())
        return
    if arguments.damaged is not None and (not arguments.self_test or arguments.damaged < 1):
        parser.error(f"argument --damaged: got {arguments.damaged}, wanted a number above 0, with --self-test")
    if arguments.self_test:
        from extensions import audit_selftest

        is_good = audit_selftest.run_damaged(arguments.damaged) if arguments.damaged else audit_selftest.run(arguments.json)
        sys.exit(0 if is_good else 1)
    if arguments.batch is None:
        parser.error("the following arguments are required: BATCH (a recorded batch), or --recipes, --list or --self-test")
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
