"""What ends a run, undoes a step or names the culprit when numbers or ranks fail.

divergence         when a step counts as diverged
recovery           what follows a step that diverged: an error, the step without its update, or the
                   last checkpoint
shared_error       what is saved when a run ends by an error: the last sound step, where every rank
                   met the same error
watchdog           ends a run in which some rank no longer gets on, after every rank that still can
                   has said where it is
watchdog_evidence  what a rank that is stuck can say about itself, and what the words of all ranks
                   come to
"""
