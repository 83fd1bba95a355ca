"""`photinus top`: a run as it goes on, in the terminal.

watch      the command: flags, which run, when to look again
terminal   the screen: keys, size, redrawing in place, leaving it as it was
text       lines made of styled pieces, cut to a width
view       the picture: lines of a given width from a run; a pure function
marks      sparklines and bars out of characters
"""
