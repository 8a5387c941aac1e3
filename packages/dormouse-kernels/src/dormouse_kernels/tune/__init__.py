"""An offline tuner of tiles: `python -m dormouse_kernels.tune --help`. Nothing here runs when an op is called."""
