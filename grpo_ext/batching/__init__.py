"""How a step is cut: sizes, prompt order, micro-batches, packs. Pure: torch and numbers."""
