"""Checkpoints: complete or absent, verified before use, without pickle.

state_memory  a state in the memory of the ranks of a host, for a process to write
durable    files that are, after a kill, a full disk or a power cut, the old ones or the new; torch's checksums
folder     a folder of checkpoints: written whole or not at all, verified before they are used, kept as long as needed
image      the state of a loop as bytes in memory files, cut over the ranks of a host, sealed with a digest
image_reader  reads images, and finds the newest snapshot in the memory of the hosts
manifest   manifest.json: what a checkpoint consists of, so that a damaged one can be told from a good one
parts      entries whose tensors lie in parts on several ranks: one torch file, into which each host writes its own
position   how far a run has come, and how long it is: N epochs, or N steps
statefile  `photinus.save` and `photinus.load`: states in one file, which plain torch.load reads, too
states     from objects to plain states that a file can hold, and back, all or none
writer     a process that writes checkpoints while the ranks train on: the end of it in a rank
writer_process  its other end
"""
