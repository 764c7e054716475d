"""The run folder: what a run writes while it trains, and how it is read back. Nothing here loads torch."""
