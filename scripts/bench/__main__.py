"""``python scripts/bench``: see the package."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts the folder that it is told to run on its path, but the package, and checkpoint.py, are beside it.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from bench.cli import main

    main()
