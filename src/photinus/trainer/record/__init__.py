"""What a run measures and leaves in its folder, and which run it goes on from.

config         `config.json`: everything that says how a run came about, saved beside its results
curves         `curves.png`, drawn from a run's two CSV files
device_phases  the phases of training steps on a GPU's own time: what its stream did between two marks, told by events
ending         how a run ended, told in its events
rank_times     brings every rank's times and memory to rank 0, without an exchange of their own
resume         where a run goes on: which checkpoint it starts from, and whether that checkpoint fits the run
run_folder     the folder of a run on disk: checkpoints, numbers, config and picture. Rank 0's affair
run_lock       keeps a second job out of a run's folder
run_numbers    what is measured in a run: each rank collects its losses and times, and rank 0 writes those of all
settings       what a script gives its optimizers and schedulers, and what of it holds when a run is resumed
step_clock     splits each training step of this rank into phases, with a few readings of the clock
tensorboard    event files for TensorBoard beside a run's own files, in `tensorboard/` of its folder. Rank 0's affair
"""
