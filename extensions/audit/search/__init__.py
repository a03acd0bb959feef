"""Which forms give the recorded numbers."""
