"""What can be shown about the numbers of a checked file: which values are half precision where, and by which way of the program."""
