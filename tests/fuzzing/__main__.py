"""python -m tests.fuzzing [--slow] [--first N --last M], from the repository's root."""

import os
import sys
from pathlib import Path

os.environ["EPSILONS_COUNT_RUNS"] = "0"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/, where tests import each other from

from fuzzing.running import main

if __name__ == "__main__":
    main()
