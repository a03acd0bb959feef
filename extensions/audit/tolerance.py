"""When two numbers are equal: every tolerance of the audit, by name.

A trainer computes in float32, whose numbers are 1.2e-7 apart at 1 (one ulp). A sum of terms is off by a few ulps of their
total size, so a recomputed loss is compared relative to the sum of the absolute terms, never to itself: a loss of 0 is a
sum of large terms. A gradient has thousands of entries that pass through more steps; its relative norm is off by up to
1e-5. A number that is solved from such a gradient (a factor, a coefficient) inherits that, and is compared three times more
loosely. Settings are typed by people: two that agree to a thousandth are the same. Where the trainer's own arithmetic is
coarser than float32, its spacing (`Recording.eps`) takes over. A tolerance may be loosened only with a recording in hand
that needs it, and tightened only while all shipped captures stay right.
"""

from __future__ import annotations

COARSE = 1e-5
"""A spacing above this is half precision: then 2 to 4 times the spacing replaces the tolerances below."""
VALUE = 8e-7
"""Of a loss, times the total size of its terms: about 7 ulps."""
TERM = 2e-6
"""Of a term that is a mean of its own (entropy, critic, a loss of pairs), times its size."""
GRADIENT = 1e-5
"""Of a gradient: norm of the difference over the norm."""
FACTOR = 3e-5
"""Of a factor that was solved from a gradient."""
PAIR_VALUE = 5e-6
"""Of a loss of pairs where a gradient is compared as well, and the value only confirms."""
PAIR_GRADIENT = 2e-5
"""Of a gradient with respect to scores, which are sums over whole answers."""
ADVANTAGE = 1.2e-6
"""Of an advantage, times the largest one: 10 ulps."""
TWO_ULPS = 2.4e-7
"""What a mean of rewards loses, times the largest reward."""
METRIC = 3e-6
"""Of a reported array, times its largest entry."""
LOGGED = 1e-5
"""Of a number that went through a log's text."""
SUM_OVER_ANSWER = 2e-5
"""Of a log-probability summed over an answer, and of a reported mean."""
SETTING = 1e-3
"""Two settings are the same."""
SHOWN = 1e-4
"""A factor nearer to 1 than this is not shown."""
LOG_PROBABILITY = 1e-4
"""A log-probability above this is above 0."""
RATIO = 1e-3
"""A log-ratio of a first pass further from 0 than this did not come from rounding."""
NOTHING = 1e-9
"""A number below this is 0 here."""
