"""From matches to words and findings."""
