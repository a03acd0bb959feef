"""The same update on one process and on N ranks with M micro-batches each.

    rules.py      what to call backward() on; statistics over all ranks; clipping, stopping, logging
    toy.py        eight answers on which mistakes are measured
    mistakes.py   the right rules and the usual mistakes, each against one process
"""
