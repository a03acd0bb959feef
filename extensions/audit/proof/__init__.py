"""How good the audit is: planted mistakes and damaged files."""
