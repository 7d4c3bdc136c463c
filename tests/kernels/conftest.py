"""Makes reference.py importable: under importmode=importlib a test file does not see its
neighbours.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
