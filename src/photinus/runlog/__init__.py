"""Write, read and summarize the files that a run leaves in its folder for people to look at.

| file | who writes it | a line is |
|---|---|---|
| config.json | rank 0 at each start | options, and every start with its versions, hosts, commit and machine |
| losses.csv | rank 0, a few steps at a time | a step: step, epoch, loss, start |
| metrics.csv | rank 0 at each end of an epoch, whole | an epoch: step, loss, what was logged, speed |
| ranks.jsonl | rank 0, once a second or seldomer | where the time of some steps went on every rank, and their memory |
| digests.bin | rank 0 | digests of parameters and optimizer states at a step (not text) |
| events.jsonl | rank 0; other ranks their own errors | something that happened: a start, a checkpoint, an end, ... |

Every file may be looked at while it is written: what is half there is left out, and comes with the next look. This room
knows nothing of torch, so that the command line reads runs without it.

comparison  two runs compared bit by bit, by what both recorded
curve       a curve of any number of points in a bounded number of bins, that hides no extreme
digests     `digests.bin`: what a run trains at some steps, in 64 bits each
events      `events.jsonl`: what happened in a run, a line each, only ever added to; and the process that a start names
figures     charts of one run or several, drawn by matplotlib: for a page, or in one picture
files       how files of a run's folder are opened, replaced as a whole, and read while another process writes them
run         a run as its folder shows it, read once or again and again while it is written; how to find its folder
stragglers  which rank holds the others up, and in which phase; or which link between two hosts
tables      the numbers of a run: losses.csv, metrics.csv, and of all ranks ranks.jsonl
units       numbers as people read them: durations, speeds, sizes, losses
"""
