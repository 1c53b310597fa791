"""Import this before torch and TRL: the main process prints on standard error that their import takes seconds.

Also silences bitsandbytes, which logs while it is imported.
"""

import logging
import os
import sys

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
if "torch" not in sys.modules and os.environ.get("RANK", "0") == "0":
    print("Loading torch, transformers and TRL ...", file=sys.stderr, flush=True)
