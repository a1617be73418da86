"""Command line and what stands behind it."""
