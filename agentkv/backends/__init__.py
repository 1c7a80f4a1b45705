"""Forwards, attention and sampling on a device."""
