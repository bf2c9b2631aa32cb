"""Training jobs: torchrun on this machine, or what a scheduler needs to start it on many.

job         a job on several machines, checked where it is written
elastic     torchrun without its traceback
torchrun    torchrun's command line on one machine
supervise   runs torchrun and forwards signals
hosts       hostfiles, this machine's place in them, hosts that a start leaves out
slurm       Slurm batch script
kubernetes  Kubeflow manifests: TrainJob (Trainer v2), PyTorchJob (Training Operator)
ray_entry   Python program for ``ray job submit``
"""
