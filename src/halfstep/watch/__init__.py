"""Follows a training loop that halfstep does not own."""
