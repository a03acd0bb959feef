"""python -m extensions.settings FILE: what a trainer's settings file really configures."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import rl_lab
from extensions.objectives import PREFERENCE_ROWS, ROWS
from extensions.settings.files import plain, read_settings
from extensions.settings.ledger import add_flags, ledger_document, ledger_text, model_of
from extensions.settings.meaning import Meaning, meaning
from extensions.settings.report import PAPERS, document, text
from extensions.settings.trainers import TRAINERS, Settings, detect, settings_of
from extensions.settings.trap import SEVERITIES
from extensions.settings.traps import findings_of

EXAMPLES = """\
FILE is YAML, JSON, TOML, key=value lines, a verl or OpenRLHF command line, or a
Python file with GRPOConfig(...), DPOConfig(...), PPO(...); it is never executed.

examples:
  python -m extensions.settings grpo.yaml
  python -m extensions.settings train.py --paper dapo
  python -m extensions.settings run_verl.sh --versus grpo.yaml
  python -m extensions.settings ppo.yaml --trainer sb3.PPO --set n_envs=8
  python -m extensions.settings grpo.yaml --model 7e9,32,4096,152064,32 --tokens 2048

exit status: 0 no finding at or above --fail-on, 1 a finding, 2 a file or a flag"""


def build_parser() -> rl_lab.LabParser:
    parser = rl_lab.LabParser(
        prog="python -m extensions.settings",
        description="What a trainer's settings file really configures: formula, batch sizes, traps.",
        epilog=EXAMPLES,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the settings file")
    parser.add_argument("--trainer", choices=sorted(TRAINERS), help="whose settings they are, where the file does not say")
    parser.add_argument("--versus", metavar="FILE|ROW", help="compare with another settings file or a named row")
    parser.add_argument("--paper", choices=sorted(PAPERS), metavar="NAME", help=f"difference to the paper: {', '.join(PAPERS[:12])}, ...")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting over those of the file; may be repeated")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="processes of TRL, which no settings file holds (default 1)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the report as JSON")
    parser.add_argument("--fail-on", choices=("mistake", "warning", "never"), default="mistake", help="exit with 1 from this severity on (default mistake)")
    add_flags(parser)
    return parser


def load(path: Path, trainer: str | None, changes: list[str], processes: int) -> Settings:
    """Settings of a file with --set over them. Raises FileProblem."""
    found = read_settings(path)
    for change in changes:
        key, _, value = change.partition("=")
        found.values[key.strip()] = plain(value)
    chosen = TRAINERS[trainer] if trainer else detect(found)
    if chosen is None:
        raise rl_lab.FileProblem(f"{path}: whose settings these are cannot be told; give --trainer {', '.join(TRAINERS)}")
    return settings_of(found, chosen, processes)


def other_meaning(parser: rl_lab.LabParser, arguments: argparse.Namespace) -> tuple[str, Meaning] | None:
    name = arguments.paper or arguments.versus
    if name is None:
        return None
    rows = ROWS | PREFERENCE_ROWS
    if name in rows:
        return name, Meaning(rows[name], rows[name])
    if not Path(name).exists():
        parser.error(f"--versus: {name} is no file and no row; python -m extensions.objectives --list names the rows")
    return name, meaning(load(Path(name), None, [], arguments.processes))


def run(parser: rl_lab.LabParser, arguments: argparse.Namespace) -> int:
    settings = load(arguments.file, arguments.trainer, arguments.set, arguments.processes)
    against = other_meaning(parser, arguments)
    model = model_of(arguments, parser)
    print(text(settings, against))
    made = document(settings, against)
    if model is not None:
        print("\n" + ledger_text(model))
        made["ledger"] = ledger_document(model)
    if arguments.json:
        rl_lab.replace_files({arguments.json: json.dumps(made, indent=1, allow_nan=False) + "\n"})
    if arguments.fail_on == "never":
        return 0
    limit = SEVERITIES.index(arguments.fail_on)
    return int(any(SEVERITIES.index(finding.severity) >= limit for finding in findings_of(settings)))


def main(argv: list[str] | None = None) -> None:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.processes < 1:
        parser.error("--processes: wanted at least 1")
    for change in arguments.set:
        if "=" not in change:
            parser.error(f"--set: got {change!r}, wanted KEY=VALUE")
    if arguments.paper and arguments.versus:
        parser.error("--paper and --versus: wanted one of the two")
    try:
        status = run(parser, arguments)
    except (rl_lab.FileProblem, ValueError) as problem:
        parser.exit(2, f"{parser.prog}: error: {str(problem).splitlines()[0]}\n")
    if status:
        sys.exit(status)
