"""What processes and devices do: collectives, memory that runs out, settings that change bits."""
