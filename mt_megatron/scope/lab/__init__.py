"""The lab: perturbations of a running training, previewed, armed, audited, and undone to the bit.

specification   perturbations as data, from YAML or commands
random_numbers  numbers that depend on a key and an element's place alone
values          exact arithmetic of each kind of change
placement       places of a rank's elements in whole tensors
targets         modules, parameters and heads that a pattern means
changes         changed weights, activations and gradients at work
wires           lost and changed data between ranks
links           delays, drops, offsets and scan's faults at work
agreement       what every rank must have alike
snapshot        all that training changes, kept and put back
preview         what a perturbation would change
pair            one step with and without a perturbation
lab             commands, steps, undo
"""
