"""One folder per concern beyond the core lab; run as `python -m extensions.NAME` from the top level."""
