"""Triton kernels, one family per file, with their launch configurations. Never imports ``reference``."""
