"""Training: configuration in, checkpoints and records out.

depth_losses   losses of multi-token prediction and sentence order, from the last stage to every rank and the
               records
distributed    the processes of a run: who this one is, the groups it joins, its random numbers
evaluate       validation: the same tokens every time, each counted once
health/        what ends a run, undoes a step or names the culprit when numbers or ranks fail
init_from_hf   continued pre-training from a folder in Hugging Face's form: every rank reads the
               parts that it holds
lab_file       checks of --scope-lab before the start
logging/       everything a run says: lines, panel, records, picture, other services
loop           a run from its configuration to its figures
lr             learning rate and weight decay over a run
model          model chunks, optimizer and schedule of one rank, wired together
nan_watch      search for the module that first made a number that is none: the step again, with a
               tap on every module
preflight      the checks that need the device or an earlier checkpoint
run_folder     the folder of a run, beside whose metrics its trace and its recording lie
scan_session   the trainer's part of tracing: where the trace of a run goes, and what a step does for
               it
scope_session  the trainer's part of MegaScope: where the recording of a run goes, and what a step does
               for it
scope_trainer  the trainer as pause, lab and generation see it
signals        SIGTERM, SIGUSR1 and Ctrl-C ask a run to save and end; a second one ends the process
               at once
step           one optimizer step, and what all ranks agree on about it
steps          the steps of a run one after another: their batches, their size, and what is done
               about a bad one
update         the parts of one optimizer update, apart, so that all ranks can agree before the
               weights change
validate       every check that needs no process group, all problems at once
"""
