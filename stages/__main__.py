"""Run one stage in a folder with params.yaml.

python -m stages measure
torchrun --nproc-per-node 4 -m stages measure
"""

import sys

from stages.common.cli import main

if __name__ == "__main__":
    main(sys.argv[1:])
