"""The specification in plain torch, one subject per file. Slow, and readable on purpose."""
