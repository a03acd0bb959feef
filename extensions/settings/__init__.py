"""From a trainer's settings file to what it means: the row of objectives, its formula, batch words, traps, memory.

    python -m extensions.settings FILE

    from extensions.settings import read_settings, settings_of, detect, meaning, findings_of
    found = read_settings(path)                      # flat keys, nothing executed
    settings = settings_of(found, detect(found))     # over the trainer's defaults
    meaning(settings).row                            # a row of extensions.objectives
    findings_of(settings)                            # traps, each with a number from the small batch
"""

from extensions.settings.arithmetic import BatchWords, batch_words
from extensions.settings.files import Found, read_settings
from extensions.settings.meaning import Meaning, Refused, meaning
from extensions.settings.trainers import TRAINERS, Settings, Trainer, detect, settings_of
from extensions.settings.traps import TRAPS, Finding, findings_of

__all__ = [
    "TRAINERS", "TRAPS", "BatchWords", "Finding", "Found", "Meaning", "Refused", "Settings", "Trainer", "batch_words", "detect",
    "findings_of", "meaning", "read_settings", "settings_of",
]  # fmt: skip
