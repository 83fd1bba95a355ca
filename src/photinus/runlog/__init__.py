"""What a run leaves in its folder for people to look at, as files: how they are written, read and summed up.

| file | who writes it | a line is |
|---|---|---|
| config.json | rank 0 at each start | options, and every start with its versions, hosts, commit and machine |
| losses.csv | rank 0, a few steps at a time | a step: step, epoch, loss, start |
| metrics.csv | rank 0 at each end of an epoch, whole | an epoch: step, loss, what was logged, speed |
| ranks.jsonl | rank 0, once a second or seldomer | where the time of some steps went on every rank, and their memory |
| events.jsonl | rank 0; other ranks their own errors | something that happened: a start, a checkpoint, an end, ... |

Every file may be looked at while it is written: what is half there is left out, and comes with the next look. This room
knows nothing of torch, so that the command line reads runs without it.

chart       charts drawn by matplotlib; they know nothing of runs
curve       A curve of any number of points in a bounded number of buckets, that hides no extreme
events      `events.jsonl`: what happened in a run, a line each, only ever added to
figures     the charts of one run or several, for a picture or a page: what is drawn
find        finds the run that somebody means: the folder they name, or the newest one below where they stand
plain_file  opens a file of a run's folder: a plain one, never a link to write through
process     rank 0's process as a start describes it, and whether it still runs
run         A run as its folder shows it, looked at once or again and again while it is written
slow_links  which link between two hosts holds all ranks up
stragglers  which rank holds the others up, and in which phase: a pure function over one window or several
tables      the two CSV files of a run: `losses.csv`, a row per step, and `metrics.csv`, a row per epoch
tail        new lines of a file that another process writes: appends to, or replaces by another of the same name
units       numbers as people read them: durations, speeds, sizes, losses
windows     `ranks.jsonl`: where the time of some steps went on every rank, and their memory
"""
