"""One pasted log line, or a log file: what each number means by an exact relation, and what to record next.

    python -m extensions.why "{'loss': 0.0, 'grad_norm': 0.12, 'reward': 0.5, 'reward_std': 0.3, 'kl': 0.0}"

    from extensions.why import read_records, explain_records
    for said in explain_records(read_records(text_or_path)):
        print(said.key, said.verdict, said.relation)
"""

from extensions.why.reader import read_records
from extensions.why.relations import VERDICTS, Said, explain_records, first_pass_token_mean_loss

__all__ = ["VERDICTS", "Said", "explain_records", "first_pass_token_mean_loss", "read_records"]
