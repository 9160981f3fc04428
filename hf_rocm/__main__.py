"""`python -m hf_rocm` is the `hf-rocm` command."""

import sys

from hf_rocm.cli import main

if __name__ == "__main__":
    sys.exit(main())
