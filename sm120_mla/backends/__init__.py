"""Attention backends, one class each. ``attention`` validates a call, chooses a backend and hands it over."""
