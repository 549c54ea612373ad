"""Run one stage of the pipeline in the current folder, which must contain params.yaml.

python -m stages measure
torchrun --nproc-per-node 4 -m stages measure
"""

import sys

from stages.common.cli import main

if __name__ == "__main__":
    main(sys.argv[1:])
