"""Records of steps to sinks and rules. Nothing here loads torch."""
