"""`photinus top`: a run as it goes on, in the terminal.

watch     the command: flags, which run
screen    the terminal: when to look again, keys, leaving it as it was
view      the picture of a run for a terminal of some size, out of rich's texts, tables and bars
curve     a curve out of characters: a sparkline as wide as there is room
"""
