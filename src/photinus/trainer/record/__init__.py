"""The measurements and files of a run, and the run that it continues.

config       `config.json`: everything that says how a run came about, saved beside its results
curves       `curves.png`: the picture of a run, drawn at its end from the files in its folder
digests      what a loop trains at some steps, in 64 bits each: to compare runs, and ranks
loggers      TensorBoard and others, where rank 0 sends a run's numbers beside the run's own files
resume       where a run goes on: in which folder, and from which checkpoint
run_folder   the folder of a run: from where the run starts, its checkpoints and numbers, and how it ended
run_numbers  what is measured in a run: each rank collects its losses, times and memory, and rank 0 writes those of all
settings     what a script gives its optimizers and schedulers, and what of it holds when a run is resumed
spec         what a run is, in one value: recorded, saved with each checkpoint, compared when a run is resumed
step_losses  the losses of a loop's steps: each rank's since the last exchange, and those of all ranks
step_clock   splits each training step of this rank into phases, by the host's clock or on a GPU's own time
"""
