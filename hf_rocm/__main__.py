"""Run the `hf-rocm` command with `python -m hf_rocm`."""

import sys

from hf_rocm.cli import main

if __name__ == "__main__":
    sys.exit(main())
