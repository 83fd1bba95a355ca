"""What a run measures and leaves in its folder, and which run it goes on from.

config       `config.json`: everything that says how a run came about, saved beside its results
resume       where a run goes on: which checkpoint it starts from, and whether that checkpoint fits the run
run_folder   the folder of a run on disk: checkpoints, numbers, config, picture and how the run ended. Rank 0's affair
run_numbers  what is measured in a run: each rank collects its losses, times and memory, and rank 0 writes those of all
settings     what a script gives its optimizers and schedulers, and what of it holds when a run is resumed
step_clock   splits each training step of this rank into phases, by the host's clock or on a GPU's own time
tensorboard  event files for TensorBoard beside a run's own files, in `tensorboard/` of its folder. Rank 0's affair
"""
