"""Where a result comes from: the command and the version that made it, for whoever finds the file later."""

from __future__ import annotations

import sys
from pathlib import Path

from runflat import __version__


def origin() -> dict[str, object]:
    """The command line of this process and runflat's version, as they stand in result files and in run.json."""
    name = Path(sys.argv[0]).name
    return {"command": ["runflat" if name == "cli.py" else name, *sys.argv[1:]], "version": __version__}
