"""`photinus top`: a run as it goes on, in the terminal.

watch     the command: flags, which run; when to look again, keys, leaving the terminal as it was
view      the picture of a run for a terminal of some size, out of rich's texts, tables, bars and sparklines
"""
