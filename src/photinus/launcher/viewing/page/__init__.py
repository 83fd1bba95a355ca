"""`photinus report`: one HTML page of a run, or of several beside each other, that needs nothing else to be read.

make       the command: which runs, and where the page goes
page       the page: head, figures, sections, in order
figures    the charts of one run or several: what is drawn
sections   tables and bars: events, options, machine
chart      a chart as SVG: axes, lines, bands, layers, marks; knows nothing of runs
style      colours and layout, as CSS
"""
