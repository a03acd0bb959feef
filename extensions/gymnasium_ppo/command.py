"""The command line of extensions.gymnasium_ppo."""

from __future__ import annotations

import argparse
import statistics
import sys
import textwrap
from pathlib import Path
from typing import Sequence

from extensions.gymnasium_ppo.boundaries import MISTAKES, toy_table
from extensions.gymnasium_ppo.environments import import_gymnasium
from extensions.gymnasium_ppo.files import paths_of, restored, save_checkpoint, save_results, summary
from extensions.gymnasium_ppo.settings import CHOICES, PRESETS, EnvironmentSettings, run_of
from extensions.gymnasium_ppo.training import Trainer
from rl_lab import LabParser, add_settings, check_writable, chosen_settings, format_table, parse_seeds, progress_line

DESCRIPTION = """\
PPO from the lab's atoms in Gymnasium environments, on the CPU: a network in
place of the table of logits, episodes that end or run into a time limit,
mini-batches, evaluation on seeds of its own. Writes OUTPUT/ppo.csv (one row per
update), ppo.json (settings, evaluation) and checkpoint.npz."""

EXAMPLES = """\
examples:
  python -m extensions.gymnasium_ppo --env CartPole-v1 --output results-cartpole
  python plot_results.py --input results-cartpole --output cartpole.svg
  python -m extensions.gymnasium_ppo --env Pendulum-v1 --seeds 0-4 --output results-pendulum
  python -m extensions.gymnasium_ppo --resume --output results-cartpole

five mistakes at the end of an episode: exact numbers, then one in a training
  python -m extensions.gymnasium_ppo --toy
  python -m extensions.gymnasium_ppo --boundary-mistake one-done --output results-one-done

mistakes:
{mistakes}

presets, which a flag overrules (other environments take the defaults):
{presets}"""


def examples() -> str:
    """The end of the help text, with what the tables say."""
    mistakes = "\n".join(
        textwrap.fill(f"  {name:13} {mistake.what}", 80, subsequent_indent=" " * 16) for name, mistake in MISTAKES.items()
    )
    presets = []
    for name, preset in PRESETS.items():
        settings = [f"{key.replace('_', '-')} {value}" for key, value in preset.items()]
        presets.append(textwrap.fill(f"  {name}: " + ", ".join(settings), 80, subsequent_indent=" " * 4))
    return EXAMPLES.format(mistakes=mistakes, presets="\n".join(presets))


def build_parser() -> LabParser:
    parser = LabParser(prog="python -m extensions.gymnasium_ppo", description=DESCRIPTION, epilog=examples())
    parser.add_argument(
        "--env", metavar="ID", help="any Gymnasium id with Box or Discrete spaces; default CartPole-v1"
    )
    folder = Path("results-gymnasium")
    parser.add_argument("--output", type=Path, default=folder, metavar="DIR", help=f"folder to write; default {folder}")
    parser.add_argument(
        "--seeds", type=parse_seeds, metavar="A-B", help="run several seeds (0-4, or 0,7), each into OUTPUT/seed-N/"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in OUTPUT, with its settings")
    parser.add_argument(
        "--stop-after", type=int, metavar="N", help="end after N more updates with a checkpoint; --resume goes on"
    )
    parser.add_argument("--toy", action="store_true", help="print the exact numbers of the mistakes and train nothing")
    for name, choice in CHOICES.items():
        meanings = "; ".join(f"{value}: {meaning}" for value, meaning in choice.values.items() if meaning)
        parser.add_argument(
            "--" + name.replace("_", "-"),
            choices=tuple(choice.values),
            help=choice.meaning + (f" ({meanings})" if meanings else "") + f"; default {next(iter(choice.values))}",
        )
    parser.add_argument("--boundary-mistake", choices=tuple(MISTAKES), help="make this mistake in the training")
    add_settings(parser, EnvironmentSettings)
    # Whether a setting was given matters: what was not comes from the environment's preset, or from the checkpoint.
    parser.set_defaults(**dict.fromkeys(chosen_settings(parser.parse_args([]), EnvironmentSettings)))
    return parser


def given_settings(arguments: argparse.Namespace) -> dict[str, float | str]:
    """What was written on the command line among the things that decide a run's numbers."""
    names = (*chosen_settings(arguments, EnvironmentSettings), *CHOICES, "boundary_mistake")
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}


def toy_text(mistakes: Sequence[str]) -> str:
    """The exact numbers of some mistakes, computed by the functions that train."""
    rows = [
        [f"{mistake:13} {where}", f"{right:.4f}", f"{wrong:.4f}"]
        for mistake, where, right, wrong in toy_table()
        if mistake in mistakes
    ]
    return format_table(["mistake       where", "right", "wrong"], rows)


def advance_to_the_end(trainer: Trainer, folder: Path, label: str, stop_after: int | None) -> bool:
    """Train, writing a checkpoint now and then; whether the run is finished."""
    show = progress_line(label, trainer.run.updates, "episode_return")
    done = 0
    while not trainer.finished and done != stop_after:
        row = trainer.advance()
        done += 1
        if show:
            show(row)
        if row["step"] % trainer.run.settings.checkpoint_every == 0 and not trainer.finished:
            save_checkpoint(folder, trainer)
    if not trainer.finished:
        save_checkpoint(folder, trainer)
        if show:
            print(file=sys.stderr)
    return trainer.finished


def finish(trainer: Trainer, folder: Path) -> dict:
    """Evaluate, write the results, print the summary -> the deterministic evaluation."""
    evaluation, sampled = trainer.evaluate(True), trainer.evaluate(False)
    save_results(folder, trainer, evaluation, sampled)
    print(summary(trainer, evaluation, sampled))
    return evaluation


def check_combinations(parser: LabParser, arguments: argparse.Namespace, given: dict) -> None:
    """Flags that do not go together end the command with one line."""
    if arguments.resume and (given or arguments.seeds):
        flag = "seeds" if arguments.seeds else next(iter(given)).replace("_", "-")
        parser.error(f"argument --{flag}: not allowed with --resume, which keeps the settings of the checkpoint")
    if arguments.seeds and "seed" in given:
        parser.error(f"argument --seeds: not allowed with --seed {given['seed']}; give the seeds once")
    if arguments.stop_after is not None and (arguments.stop_after < 1 or arguments.seeds):
        wanted = "a whole number from 1" if arguments.stop_after < 1 else "one run: not allowed with --seeds"
        parser.error(f"argument --stop-after: got {arguments.stop_after}, wanted {wanted}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    given = given_settings(arguments)
    check_combinations(parser, arguments, given)
    if arguments.toy:
        print(toy_text(tuple(MISTAKES)))
        return
    import_gymnasium()
    folders = {None: arguments.output}
    if arguments.seeds:
        folders = {seed: arguments.output / f"seed-{seed}" for seed in arguments.seeds}
    check_writable([path for folder in folders.values() for path in paths_of(folder).values()], expected_bytes=1_000_000)

    env, evaluations, trainer = arguments.env or "CartPole-v1", [], None
    for seed, folder in folders.items():
        if arguments.resume:
            trainer = restored(folder, arguments.env)
        else:
            try:
                trainer = Trainer(run_of(env, **given, **({} if seed is None else {"seed": seed})))
            except ValueError as problem:
                name, _, rest = str(problem).partition(": ")
                parser.error(f"argument --{name.replace('_', '-')}: {rest}" if name in given else f"argument --env: {problem}")
        label = trainer.run.env + (f"  seed {seed}" if seed is not None else "")
        try:
            finished = advance_to_the_end(trainer, folder, label, arguments.stop_after)
            evaluations += [finish(trainer, folder)["mean_return"]] if finished else []
        except ValueError as problem:  # an atom refuses what the network gives, of a checkpoint of huge numbers say
            raise FloatingPointError(f"{folder}: the numbers of this run left their range ({problem})") from problem
        if not finished:
            print(f"{trainer.run.env}: stopped after update {len(trainer.history)} of {trainer.run.updates}.")
            print(f"Checkpoint: {paths_of(folder)['checkpoint']}; --resume --output {folder} goes on from it.")
        trainer.close()
    if len(evaluations) > 1:
        low, high = min(evaluations), max(evaluations)
        print(f"\n{env}, {len(evaluations)} seeds: median {statistics.median(evaluations):.2f}, from {low:.2f} to {high:.2f}")
    mistake = trainer.run.boundary_mistake
    if mistake is not None:
        print(f"\nThe training made the mistake {mistake}: {MISTAKES[mistake].what}.")
        print(f"Its exact numbers on a toy:\n\n{toy_text([mistake])}\n")
        print("Compare with the same command without --boundary-mistake and with another --output.")
    if evaluations:
        print(f"Files: {', '.join(str(path) for path in paths_of(folder).values())}")
