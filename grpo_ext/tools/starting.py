"""Imported before torch and TRL, whose import takes seconds: says so, on the main process and on standard error.
Also quiets bitsandbytes, which speaks while it is imported."""

import logging
import os
import sys

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
if "torch" not in sys.modules and os.environ.get("RANK", "0") == "0":
    print("Loading torch, transformers and TRL ...", file=sys.stderr, flush=True)
