"""A run looked at: in the terminal, and as one HTML page.

top         `photinus top`: flags, which run; when to look again, keys, leaving the terminal as it was
view        the picture of a run for a terminal of some size, out of rich's texts, tables, bars and sparklines
report      `photinus report`: which runs, and where the page goes
page        what the page of a run, or of several beside each other, is filled with; the texts are in page.html.j2
event_text  what terminals and pages say alike of a run: its events and state in words, its speed
"""
