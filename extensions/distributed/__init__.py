"""The same update on one process and on N ranks with M micro-batches each.

    rules.py      what to call backward() on; statistics over all ranks; clipping, stopping, logging
    shards.py     rows of extensions/objectives on one rank's part of a batch
    toy.py        eight answers on which mistakes are measured
    mistakes.py   the right rules and the usual mistakes, each against one process
    watch.py      who is missing: waits that end with a sentence that names the rank
    ranks.py      processes of this machine, started and watched here or by torchrun
    cost.py       collectives and bytes of an update
    command.py    python -m extensions.distributed

Same as the sources named in rules.py: sums first, one division last. Left out: sharded parameters (FSDP: the rules of the
loss hold, the norm of a gradient needs a sum of its own), pipeline and tensor parallelism, overlap of computing and sending.
"""
