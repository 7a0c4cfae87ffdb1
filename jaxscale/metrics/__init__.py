"""What a run reports: the clock and counters of its steps, and where the records go."""
