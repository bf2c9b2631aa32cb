"""Checkpoints: whole or absent, loadable under any layout.

file_locks  advisory locks on files (``flock``), also on storage that gives them in its own way or
            not at all
files       a checkpoint as a folder of files: names, checksums, completeness, what a kill leaves
            behind
items       tensors as ``torch.save`` stores them, without calling it for each: a frame per shape,
            then the bytes
load        what a checkpoint holds of a run in Megatron-Core's terms, and how it gets back into one
            under any layout
plan        which tensors this rank writes and where in its file: Megatron-Core's plan, asked for
            once
progress    how far a run is: what a checkpoint says beside the weights
retention   what goes from a folder of checkpoints: what a kill left half done, and what newer ones
            supersede
rng         every random state of a rank, saved and restored: each rank has its own, whatever its
            coordinates
run_lock    one run at a time saves to a folder: a lock for the life of the run, and whose
            checkpoints are there
run_parts   what a checkpoint needs of a run: the process, and what training changes
save        one checkpoint from the live tensors to its published folder, in three steps that all
            ranks take
store       the checkpoints of a run: where it continues from, when one is written, what is kept
write       the files one rank writes into a checkpoint, in this thread or in one beside the
            training
"""
