"""Make `suspects` importable by name, as a third party's package would be."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
