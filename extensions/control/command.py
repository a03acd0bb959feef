"""The command line of extensions.control."""

from __future__ import annotations

from pathlib import Path
from typing import Sequence

import numpy as np

import plot_results
from extensions.control import contract, nolimit, qp, solvers, worked
from extensions.control.figure import draw
from extensions.control.mpc import plan
from extensions.control.training import ControlSettings, TrainingRun, train
from rl_lab import (
    FileProblem,
    LabParser,
    add_settings,
    check_writable,
    chosen_settings,
    csv_text,
    format_table,
    json_text,
    progress_line,
    replace_files,
    software,
)

DESCRIPTION = """\
Control behind a learned policy: Riccati, MPC and QP atoms, whole-body tasks and limits, and the
action contract u = C(s, a). Prints worked examples; --train runs PPO in a loop with the stack."""

EXAMPLES = """\
examples:
  python -m extensions.control
  python -m extensions.control --plot control.svg --json control.json
  python -m extensions.control --train --contract all --output results-control
  python -m extensions.control --solver quadprog"""


def build_parser() -> LabParser:
    parser = LabParser(prog="python -m extensions.control", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("--train", action="store_true", help="train PPO through the stack (about half a minute a contract)")
    parser.add_argument(
        "--contract",
        choices=(*contract.CONTRACTS, "all"),
        default="sampled",
        help="what the ratio is made of; default sampled",
    )
    parser.add_argument(
        "--solver", choices=solvers.NAMES, default="active-set", help="QP solver; default active-set, the lab's own"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="with --train: write DIR/CONTRACT.csv and .json")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers as JSON")
    parser.add_argument("--plot", type=plot_results.figure_path, metavar="FILE", help="draw them: .svg, .png or .pdf")
    add_settings(parser, ControlSettings)
    return parser


def print_examples() -> int:
    """All worked examples -> how many disagree."""
    count = agree = 0
    for section, make in worked.SECTIONS.items():
        print(f"{section.upper()}\n")
        for item in make():
            print(f"  {item.title}\n{item.text('result', 'known')}\n")
            count, agree = count + 1, agree + item.agrees()
    print(f"{agree} of {count} agree.\n")
    return count - agree


def print_solver(name: str) -> None:
    """The chosen solver on the examples' problems, and on one that has no solution."""
    solve = solvers.solver(name)
    problems = {"double integrator, |u| <= 1": worked.limited().problem(np.array([5.0, 0.0]))}
    problems |= {key: problem for key, (problem, _, _) in qp.hock_schittkowski().items()}
    problems["u <= 1 and u >= 2"] = worked.infeasible()
    if name == "projected-gradient":
        problems = {key: problem for key, problem in problems.items() if problem.G is None}
    rows = []
    for key, problem in problems.items():
        answer, own = solve(problem), qp.active_set(problem)
        apart = f"{np.abs(answer.x - own.x).max():.1e}" if answer.usable and own.usable else "-"
        rows.append([key, answer.status, f"{answer.residual:.1e}", apart, f"{answer.x[0]:.6g}"])
    print(f"Solver {name}:\n\n" + format_table(["problem", "status", "KKT residual", "from active-set", "x_1"], rows))
    print("\nAsk the status, then the residual, then use x: on the last problem a finite x means nothing.\n")


def print_no_limit() -> None:
    rows = [[o.objective, f"{o.mean:.3f}", f"{o.a_outside:.4f}", f"{o.u_outside:.4f}"] for o in nolimit.outcomes()]
    print("No objective adds a constraint (a limit of 1, and a feedback that likes more):\n")
    print(format_table(["objective", "mean of a", "share of a outside", "share of u outside"], rows))


def trained(run: TrainingRun) -> list[str]:
    first, last = run.history[0], run.history[-1]
    return [
        run.contract, f"{first['completed']:.2f} -> {last['completed']:.2f}", f"{first['mean_reward']:.3f} -> {last['mean_reward']:.3f}",
        f"{first['first_ratio_above_band']:.3f}", f"{last['correction']:.3f}", f"{last['margin']:.2f}",
        f"{sum(row['planner_failures'] for row in run.history)}", f"{1e3 * run.latency:.2f}",
    ]  # fmt: skip


TRAINED = ["contract", "goals reached", "mean reward", "ratios > 1.2", "|u - a|", "margin", "failures", "ms per plan"]


def as_json() -> dict:
    """riccati, mpc, qp, infeasible, contract: the numbers by name."""
    regulator, planned = worked.regulator(), plan(worked.limited(), np.array([5.0, 0.0]))
    exact = {name: contract.exact(name) for name in contract.CONTRACTS}
    failed = qp.active_set(worked.infeasible())
    return {
        "riccati": {"P": regulator.P.tolist(), "K": regulator.K.tolist()},
        "mpc": {
            "u": planned.u[:, 0].tolist(),
            "objective": planned.solution.objective,
            "residual": planned.solution.residual,
        },
        "qp": {name: qp.active_set(p).objective + constant for name, (p, constant, _) in qp.hock_schittkowski().items()},
        "infeasible": {"status": failed.status, "residual": failed.residual},
        "contract": {
            name: {
                "ratio_mean": e.ratio_mean,
                "share_above_band": e.share_above_band,
                "gradient": e.gradients["R = u"],
                "gradients": e.gradients,
                "variances": e.variances,
            }
            for name, e in exact.items()
        },
        "no_limit": [o._asdict() for o in nolimit.outcomes()],
    }


def run_documents(run: TrainingRun, folder: Path, solver: str) -> dict[Path, str]:
    config = {
        "contract": run.contract,
        "solver": solver,
        **{name: getattr(run.settings, name) for name in run.settings.__dataclass_fields__},
    }
    document = {"config": config, "software": software(), "seconds_per_plan": run.latency, "final_metrics": run.history[-1]}
    return {folder / f"{run.contract}.csv": csv_text(run.history), folder / f"{run.contract}.json": json_text(document)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    settings = chosen_settings(arguments, ControlSettings)
    if arguments.output and not arguments.train:
        parser.error("--output: only with --train")
    try:
        solver = solvers.solver(arguments.solver)
    except solvers.SolverMissing as problem:
        raise FileProblem(str(problem)) from problem
    if arguments.train and arguments.solver == "projected-gradient":
        parser.error("--solver projected-gradient: takes a box only, and the stack also limits speeds; choose another")
    names = contract.CONTRACTS if arguments.contract == "all" else (arguments.contract,)
    results = [arguments.output / f"{name}{end}" for name in names for end in (".csv", ".json")] if arguments.output else []
    check_writable([*results, *(path for path in (arguments.json, arguments.plot) if path)], 2**20)
    runs = []
    if arguments.train:
        for name in names:
            progress = progress_line(name, settings["updates"], "completed")
            runs.append(
                train(name, solver=None if arguments.solver == "active-set" else solver, on_step=progress, **settings)
            )
        print(format_table(TRAINED, [trained(run) for run in runs]))
        print("\nratios > 1.2: at the first pass, where the policy has not changed; right is 0.")
    else:
        if print_examples():
            raise FloatingPointError("a worked example disagrees with its known number")
        print_solver(arguments.solver)
        print_no_limit()
    texts = {
        path: text
        for run in runs
        if arguments.output
        for path, text in run_documents(run, arguments.output, arguments.solver).items()
    }
    if arguments.json:
        texts[arguments.json] = json_text(as_json())
    if texts:
        replace_files(texts)
        print("\n" + "\n".join(f"wrote {path}" for path in texts))
    if arguments.plot:
        try:
            plot_results.save(draw(runs), arguments.plot)
        except plot_results.PlotProblem as problem:
            raise FileProblem(str(problem)) from problem
        print(f"wrote {arguments.plot}")
