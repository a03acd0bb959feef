"""Checks that need no search."""
