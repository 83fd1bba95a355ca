"""`photinus report`: one HTML page of a run, or of several beside each other, that needs nothing else to be read.

make      the command: which runs, and where the page goes
page      the page: fills page.html.j2, beside which lies style.css with the colours of light and dark windows
facts     all else that the page says: key figures, bars, rows of tables
"""
