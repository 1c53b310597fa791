"""How completions are decoded: compactly, or by the loop of transformers."""

from contextlib import AbstractContextManager

from grpo_ext.runtime.attributes import temporarily_set
from grpo_ext.sampling import engine


def decoding(compact: bool) -> AbstractContextManager[None]:
    """Inside, with `compact=False`, every copy of a prompt runs and finished rows stay, as in transformers."""
    return temporarily_set(engine, **({} if compact else {"decodes_compactly": lambda model, config: False}))
