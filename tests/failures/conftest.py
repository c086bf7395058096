# pyright: basic
"""What the failure tests share: the kit that runs whole commands."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "end_to_end"))
