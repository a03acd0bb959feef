"""The reading: what a recorded gradient says about the loss it came from, solved for and never looked up.

    from extensions.audit.reading import read_loss
    reading = read_loss(recording, advantages)          # Reading; .as_json(), .lines()

For a loss over tokens, everything but l (the current log-probability) held fixed,

    dL/dl_t = - kappa law_i open_t weight_t gate(r_t, A_t)  +  kappa law_i beta k'(d_t)

Rooms, each importing only those above it: facts (the batch as flat arrays), gates (one line a gate), fit (kappa, beta by a
robust fit), counts (1 / kappa as a count), closed (tokens without gradient as thresholds), factors (caps and weights),
value (the loss predicted from what was read), reading (the order of it all), words (sentences), compare (findings).
"""

from extensions.audit.reading.reading import Reading, read_loss

__all__ = ["Reading", "read_loss"]
