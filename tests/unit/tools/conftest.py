"""The tools are scripts: they find each other in their own folder, and so must their tests."""

import sys
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[3] / "tools"
if str(TOOLS) not in sys.path:
    sys.path.append(str(TOOLS))
