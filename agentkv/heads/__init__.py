"""Heads score pages: what the next proposals should read."""
