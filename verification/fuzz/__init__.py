"""Random calls, command lines, files and interrupts against what the lab promises of all of them.

    python -m verification.fuzz [--seconds 60] [--seed N] [--only atoms|lines|files|interrupts] [--case N]

    case.py          what a kind of case is, a failure, and the shrinker
    definitions.py   every atom's formula on wide numbers, and how far rounding may move it
    atoms.py         random calls of the atoms
    child.py         a command in a forked process: its end, its output, its memory, its time
    lines.py         random command lines, made from the commands' own parsers
    damage.py        whole files and the ways to damage one
    files.py         damaged and hostile files for everything that reads one
    interrupts.py    signals at random moments of a run
    command.py       the table of kinds, and the report

A new kind of case is a module with a `KIND`, and its line in command.KINDS.
"""
