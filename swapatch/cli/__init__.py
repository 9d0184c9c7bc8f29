"""``python -m swapatch``: what only the command line needs."""
