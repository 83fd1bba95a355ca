"""A run looked at: in the terminal (top/) and as one HTML page (page/).

event_text    a run's events and state in words, for terminals and pages alike
run_argument  RUN on the command line: the folder of a run, something in it, a folder with runs in it, or nothing at all
top/          `photinus top`: a run as it goes on, in the terminal
page/         `photinus report`: one HTML page of a run, or of several beside each other
"""
