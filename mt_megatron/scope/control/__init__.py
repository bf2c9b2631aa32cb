"""Commands to a running training: pause, step, resume, generate.

trainer   what is needed of the program that trains
"""
